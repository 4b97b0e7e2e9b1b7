"""The verbs `train` and `resume`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from meristem.cli.app import app, examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from meristem.training.loop import Outcome

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


class _WithSettings(TyperCommand):
    """A command that takes the settings of a configuration, which its help lists."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from meristem.config import all_settings  # the policies' own defaults come with torch: only now

        super().format_epilog(ctx, formatter)
        with formatter.section("Settings, each with what it takes and what it is if not given"):
            formatter.write_dl([(f"--{s.key}", f"{s.takes}  [default: {s.default}]") for s in all_settings()])


@app.command(
    "train",
    cls=_WithSettings,
    context_settings=OVERRIDES,
    epilog=examples(
        "meristem train configs/demo.toml --out runs/first --data.path data",
        "meristem train configs/demo.toml --out runs/depth --growth.policies sgt --train.steps 2000",
    ),
)
def train_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A TOML file; `meristem configs` writes the ready ones.")],
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    go_on: Annotated[bool, typer.Option("--continue", help="If the run is there already, resume it.")] = False,
) -> None:
    """Train a model. Any value of the configuration can be given here: --train.steps 100."""
    from meristem.config import load_config
    from meristem.training.train import resume, train

    resolved = load_config(config, context.args, _note)
    exists = go_on and (out / "config.toml").is_file()
    _finish(lambda: resume(out, resolved) if exists else train(resolved, out))


@app.command(
    "resume",
    context_settings=OVERRIDES,
    epilog=examples("meristem resume runs/first", "meristem resume runs/first --train.device cpu"),
)
def resume_command(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin anew on purpose; logs and checkpoints are kept aside.")
    ] = False,
) -> None:
    """Go on with a run from its newest whole checkpoint."""
    from meristem.config import override
    from meristem.runs.run_folder import RunFolder
    from meristem.training.train import resume

    _finish(lambda: resume(run, override(RunFolder.open(run).config, context.args), from_start=from_start))


def _note(text: str) -> None:
    """Tell what should be known about a configuration, once however many processes there are."""
    from meristem.training.distributed import own_rank

    if own_rank() == 0:
        print(text, file=sys.stderr)


def _finish(train: Callable[[], Outcome]) -> None:
    """Train, and draw what was learned; leave with the signal's exit status if one ended the run."""
    from meristem.training.display import silence_output
    from meristem.training.distributed import own_rank

    try:
        outcome = train()
    except KeyboardInterrupt:  # at once: not even a save that is under way is waited for
        os._exit(128 + signal.SIGINT)
    if own_rank() == 0:
        from meristem.report.pictures import draw_growth, draw_loss

        draw_loss(outcome.folder)
        draw_growth(outcome.folder)
        if outcome.signal is None:
            held_out = "" if outcome.held_out is None else f", held-out loss {outcome.held_out:.4f}"
            print(f"finished at step {outcome.step}{held_out}: {outcome.folder}")
        else:
            try:
                print(f"go on with: meristem resume {outcome.folder}", flush=True)
            except OSError:  # nobody reads any more
                silence_output()
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
