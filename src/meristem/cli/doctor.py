"""The verb `doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meristem.cli.app import app, examples


@app.command("doctor", epilog=examples("meristem doctor", "meristem doctor --json"))
def doctor_command(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Versions, the device and the kernels that would run on it, and what is missing for which extra."""
    from meristem.doctor import check_up

    found = check_up(device)
    print(json.dumps(found.to_dict(), indent=1) if as_json else found)
