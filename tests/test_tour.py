"""The notebook of the tour runs from top to bottom, here with few updates, and without Jupyter."""

import json
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

TOUR = Path(__file__).resolve().parents[1] / "examples/tour.ipynb"
CELLS: list[dict[str, Any]] = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
STEPS = 4


class Shown:
    """In place of IPython's SVG: a picture that can be read."""

    def __init__(self, data: str | None = None, filename: str | None = None) -> None:
        text = Path(filename).read_text(encoding="utf-8") if filename is not None else data or ""
        self.title = ElementTree.fromstring(text).findtext("{http://www.w3.org/2000/svg}title")


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    display = ModuleType("IPython.display")
    display.SVG = Shown  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            code, found = re.subn(r"^STEPS = \d+", f"STEPS = {STEPS}", "".join(cell["source"]), flags=re.MULTILINE)
            assert bool(found) == ("STEPS" not in names)
            exec(compile(code, f"cell {number}", "exec"), names)
    assert names["STEPS"] == STEPS
    assert names["loaded"].step == STEPS
    said = capsys.readouterr().out
    assert "neutral: parameters, FLOPs and KV cache are exactly equal" in said
    assert said.endswith("logits differ by less than 1e-4: True\n")


def test_its_outputs_tell_nothing_of_the_machine_they_were_made_on() -> None:
    outputs = [json.dumps(output) for cell in CELLS for output in cell.get("outputs", ())]
    assert sum("image/svg+xml" in output for output in outputs) == 3
    assert not [output for output in outputs if re.search(r"/tmp|/home|/root|tokens/s|elapsed", output)]
    assert TOUR.stat().st_size < 300_000


def test_its_links_lead_somewhere() -> None:
    text = "".join(line for cell in CELLS if cell["cell_type"] == "markdown" for line in cell["source"])
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert targets
    assert [target for target in targets if not (TOUR.parent / target).exists()] == []
