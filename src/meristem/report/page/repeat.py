"""How to repeat a run."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from meristem.errors import RunError
from meristem.files import read_json
from meristem.runs.run_folder import PRUNE_FILE


def repeat_command(run: Path, processes: int) -> str:
    """The command that trains, or prunes, the same again, from the folder in which the run was begun."""
    out = shlex.quote(f"{run}-again")
    with suppress(RunError, KeyError, TypeError, AttributeError):
        pruned = read_json(run / PRUNE_FILE)
        given = {name.replace("_", "-"): value for name, value in pruned["changed"].items() if name != "fold"}
        flags = [part for name, value in given.items() for part in (f"--{name}", f"{value}")]
        flags += ["--no-fold"] * ("fold" in pruned["changed"])
        return f"meristem prune {shlex.join([pruned['source'], *flags])} --step {pruned['step']} --out {out}"
    start = "meristem" if processes == 1 else f"torchrun --nproc-per-node={processes} -m meristem"
    return f"{start} train {shlex.quote(str(run / 'config.toml'))} --out {out}"
