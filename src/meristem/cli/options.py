"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

Step = Annotated[str | None, typer.Option(help="Checkpoint to take, or best; the newest if not given.")]
Average = Annotated[bool, typer.Option("--average", help="Take the average of its weights (train.average).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
