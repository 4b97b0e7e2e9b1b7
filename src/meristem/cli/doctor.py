"""The verb `doctor`."""

from __future__ import annotations

import json

from meristem.cli.app import app, examples
from meristem.cli.options import AsJson, Device


@app.command("doctor", epilog=examples("meristem doctor", "meristem doctor --json"))
def doctor_command(
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Versions, the device and the kernels that would run on it, and what is missing for which extra."""
    from meristem.doctor import check_up

    found = check_up(device)
    print(json.dumps(found.to_dict(), indent=1) if as_json else found)
