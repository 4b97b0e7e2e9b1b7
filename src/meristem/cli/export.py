"""The verb `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meristem.choices import ExportFormat
from meristem.cli.app import app, examples
from meristem.cli.options import Average, Step


@app.command(
    "export",
    epilog=examples(
        "meristem export runs/first --out exported/first",
        "meristem export runs/first --to llama --out exported/llama --average",
    ),
)
def export_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder for the exported model.")],
    to: Annotated[ExportFormat, typer.Option(help="Hugging Face, a stock Llama or Qwen3, ONNX, or GGUF.")] = "hf",
    step: Step = None,
    average: Average = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Write a trained model so that others can load it without Meristem, and check that it says the same."""
    from meristem.export import export_run

    def report(text: str) -> None:
        print(text, file=sys.stderr)

    print(export_run(run, out, to, step=step, average=average, overwrite=overwrite, report=report))
