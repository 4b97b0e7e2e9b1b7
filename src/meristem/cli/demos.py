"""The verbs of `demo`: a method at work on a small task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meristem.choices import DemoCriterion, KnownTaskKind
from meristem.cli.app import examples, group

demo_app = group("demo", "See a method at work on a small task.")


@demo_app.command(
    "incrt", epilog=examples("meristem demo incrt", "meristem demo incrt --task bag", "meristem demo incrt --heads 6")
)
def demo_incrt(
    heads: Annotated[int, typer.Option(help="Heads of the teacher, which the model should find: 1 to 8.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the task and of the model.")] = 0,
    task: Annotated[
        KnownTaskKind, typer.Option(help="A teacher's heads; a bag, where 1 is enough; noise, with nothing to learn.")
    ] = "teacher",
    criterion: Annotated[DemoCriterion, typer.Option(help="What heads are born by.")] = "demand",
    steps: Annotated[int, typer.Option(help="Updates; 0 for as many as it takes.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for picture and events.")] = Path("runs/demo-incrt"),
) -> None:
    """A model finds its number of heads on a task whose answer is known, in ten seconds or so."""
    from meristem.synthetic.demo import Demo, show

    show(Demo(task, heads, criterion, seed, steps), out, say=print)
