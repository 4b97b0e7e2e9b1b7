"""The verb `compare`: a question turned into runs, a table with intervals and a page."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from meristem.cli.app import app, examples
from meristem.cli.messages import show_log


@app.command(
    "compare",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        "meristem compare configs/compare/prism.toml --preset tiny --jobs 2",
        "meristem compare configs/compare/sgt.toml --out runs/sgt --data.path data --jobs 4",
        "meristem compare configs/compare/sgt.toml --out runs/sgt --show",
    ),
)
def compare_command(
    context: typer.Context,
    comparison: Annotated[
        Path, typer.Argument(help="A TOML file of arms, seeds and a budget; see `meristem configs`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for runs and results; runs/compare/NAME[-PRESET].")] = None,
    preset: Annotated[str | None, typer.Option(help="One of the file's presets, such as tiny.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, among which cores and GPUs are divided.")] = 1,
    limit: Annotated[
        float, typer.Option(min=0, help="Begin no run that would end more than so many seconds from now.")
    ] = math.inf,
    lines: Annotated[
        list[Path] | None, typer.Option(help="lines.jsonl of the same comparison on another machine; repeat for more.")
    ] = None,
    only_show: Annotated[bool, typer.Option("--show", help="Train nothing; show what is done so far.")] = False,
) -> None:
    """Compare arms fairly: train what is missing, pair by seed, and say what is shown and what is not.

    Values of the base configuration can be given here: --data.path data.
    """
    show_log("stderr")
    from meristem.comparison.analysis import reported
    from meristem.comparison.ended import describe_lines, finished_runs
    from meristem.comparison.file import load_comparison
    from meristem.comparison.lines import read_lines
    from meristem.comparison.processes import AskedToStop
    from meristem.comparison.record import show
    from meristem.comparison.running import check_place, run_comparison
    from meristem.comparison.tables import summary
    from meristem.errors import InputError
    from meristem.files import absolute, write_atomically
    from meristem.report.page.comparison import comparison_page

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    wanted = load_comparison(comparison, preset, context.args)
    folder = out or Path("runs/compare") / (comparison.stem if preset is None else f"{comparison.stem}-{preset}")
    elsewhere = read_lines(lines or (), absolute("out", folder))
    if only_show:
        check_place(folder)
        if not folder.is_dir() and not elsewhere:
            raise InputError("out", str(folder), "is no folder, so no run is there to be shown; leave out --show")
        if elsewhere:
            say(describe_lines(wanted, elsewhere))
        results = finished_runs(wanted, folder, elsewhere)
        if not results:
            print(f"no run of {wanted.name} has ended yet in {folder}")
            return
        folder.mkdir(parents=True, exist_ok=True)
    else:
        try:
            results = run_comparison(wanted, folder, jobs=jobs, limit=limit, lines=elsewhere, say=say)
        except AskedToStop as stop:
            raise typer.Exit(128 + stop.args[0]) from None
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None
    analysis, text = show(wanted, results, folder, elsewhere)
    write_atomically(folder / "comparison.html", comparison_page(wanted, analysis, reported(wanted, results)))
    print(text, *summary(analysis), sep="\n")
    print(f"page: {folder / 'comparison.html'}")
