"""The verb `prune`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from meristem.choices import PruneOrder
from meristem.cli.app import app, examples
from meristem.cli.messages import paced, show_log
from meristem.cli.options import AsJson, Average, Device, Step


@app.command(
    "prune",
    epilog=examples(
        "meristem prune runs/first --keep 0.75 --out runs/small",
        "meristem prune runs/first --budget kv=0.7 --repair 50 --out runs/small",
        "meristem prune runs/first --keep 1 --repair 50 --out runs/control",
    ),
)
def prune_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder for the new run.")],
    keep: Annotated[float | None, typer.Option(help="Share of the heads to keep, such as 0.75.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="The most of heads, kv, attention or parameters: a share, kv=0.7, or an amount, heads=100.",
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Nats by which the loss may rise; inf is no limit.")] = 0.01,
    repair: Annotated[int, typer.Option(help="Updates of training afterwards.")] = 0,
    repair_rate: Annotated[
        float, typer.Option(help="Their first learning rate, as a share of the run's peak; it falls to 0.")
    ] = 0.2,
    order: Annotated[PruneOrder, typer.Option(help="Which heads go first; random and norm are controls.")] = "measured",
    fold: Annotated[bool, typer.Option(help="Let the other heads of a layer take over what they can.")] = True,
    sequences: Annotated[int, typer.Option(help="Training rows set aside to measure losses on, at most.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the random order.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Prepared data, made alike, instead of the run's own.")] = None,
    step: Step = None,
    average: Average = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make a smaller model of a trained one: heads leave that the others can stand in for. Writes a new run."""
    show_log("stderr")
    from meristem.pruning import PruneSettings, prune_run
    from meristem.pruning.attempts import Stopped

    settings = PruneSettings(keep, budget, tolerance, repair, repair_rate, order, fold, sequences, seed)
    report = paced(lambda text: print(text, file=sys.stderr, flush=True))
    try:
        result = prune_run(
            run, out, settings, data=data, step=step, average=average, device=device, report=report
        )  # fmt: skip
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        raise typer.Exit(128 + stopped.signal) from None
    except KeyboardInterrupt:
        print("stopped: nothing was kept; prune again to begin anew", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT) from None
    print(json.dumps(result.to_dict(), indent=1, allow_nan=False) if as_json else result)
