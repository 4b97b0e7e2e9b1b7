"""How to repeat a run."""

from __future__ import annotations

import shlex
from pathlib import Path


def repeat_command(run: Path, processes: int) -> str:
    """The command that trains the same again, from the folder in which the run was begun."""
    start = "meristem" if processes == 1 else f"torchrun --nproc-per-node={processes} -m meristem"
    return f"{start} train {shlex.quote(str(run / 'config.toml'))} --out {shlex.quote(f'{run}-again')}"
