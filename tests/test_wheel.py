"""What is installed has every file that the code opens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from commands import Call

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel() -> dict[str, Path]:
    """The files of the wheel by their place in it, as hatchling would pack them."""
    return {
        Path(file.distribution_path).as_posix(): Path(file.path)
        for file in WheelBuilder(str(ROOT)).recurse_included_files()
    }


def test_the_wheel_has_every_file_of_the_package_and_the_configurations(wheel: dict[str, Path]) -> None:
    """Pages, tasks and standalone code too: what git ignores, for one, would be left out without a word."""
    homes = {"meristem": ROOT / "src/meristem", "meristem/configs": ROOT / "configs"}
    expected = {
        f"{place}/{path.relative_to(home).as_posix()}"
        for place, home in homes.items()
        for path in home.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert set(wheel) == expected
    assert {"meristem/report/page/assets/page.html", "meristem/py.typed", "meristem/configs/demo.toml"} <= expected


def test_an_installed_meristem_writes_its_configurations(wheel: dict[str, Path], tmp_path: Path) -> None:
    for place, path in wheel.items():
        (tmp_path / "site" / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / "site" / place)
    command = [sys.executable, "-m", "meristem", "configs"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, check=True)
    ready = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "configs").rglob("*.toml")}
    assert {path.relative_to(tmp_path): path.read_text() for path in (tmp_path / "configs").rglob("*.toml")} == ready


def test_configurations_of_ones_own_stay(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "configs"
    assert f"{out / 'demo.toml'}\n" in call("configs", "--out", out).out
    assert "all of them are there" in call("configs", "--out", out).out
    (out / "demo.toml").write_text("# mine")
    (out / "compare" / "sgt.toml").unlink()
    assert call("configs", "--out", out).out == f"{out / 'compare' / 'sgt.toml'}\n"
    assert (out / "demo.toml").read_text() == "# mine"
