"""The examples run as they are, and their models grow."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_model_grows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = runpy.run_path(str(path))["model"]
    decisions = re.findall(r"^step (\d+).*: (\w+), layer", capsys.readouterr().out, re.MULTILINE)
    assert decisions[0] == ("20", "add")
    assert [int(step) for step, _ in decisions] == list(range(20, 20 * len(decisions) + 1, 20))
    grown = [action for _, action in decisions if action != "fix"]
    assert len(grown) == sum(loop.passes for loop in model.plan.loops.values())
