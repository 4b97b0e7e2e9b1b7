"""The verb `configs`: the configurations that come with Meristem, where one can change them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meristem.cli.app import app, examples


@app.command("configs", epilog=examples("meristem configs", "meristem configs --out my-configs"))
def configs_command(
    out: Annotated[Path, typer.Option(help="Folder to write them into.")] = Path("configs"),
) -> None:
    """Write the ready configurations into a folder; a file that is there already stays as it is."""
    from meristem.files import read_text, write_atomically

    ready = _ready_folder()
    missing = [path for path in sorted(ready.rglob("*.toml")) if not (out / path.relative_to(ready)).exists()]
    for path in missing:
        place = out / path.relative_to(ready)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, read_text(path))
        print(place)
    if not missing:
        print(f"{out}: all of them are there")


def _ready_folder() -> Path:
    """Where the configurations are: in an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"
