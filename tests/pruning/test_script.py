"""The study that is run where a GPU is lent by the minute."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from meristem.runs.run_folder import RunFolder

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prune_124m.py"


def test_every_size_is_held_against_the_whole_model_with_the_same_repair(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("prune_124m", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "prune.json"
    flags = ["--keep", "0.7,0.5", "--orders", "measured,norm", "--device", "cpu", "--sequences", "16"]
    monkeypatch.setattr(sys, "argv", ["prune_124m.py", str(whole.path), "--out", str(out), *flags])
    script.main()
    lines = json.loads(out.read_text())["lines"]
    assert [(line["order"], line["keep"]) for line in lines] == [
        ("", 1), ("", 1.0), ("measured", 0.7), ("measured", 0.5), ("norm", 0.7), ("norm", 0.5),
    ]  # fmt: skip
    control = lines[1]
    assert control["rise"] == 0
    assert lines[3]["heads"] == 3
    assert lines[3]["rise"] == pytest.approx(lines[3]["held_out"] - control["held_out"])
    assert lines[3]["kv_share"] < lines[2]["kv_share"] < 1
    script.main()  # all of it is there already
    assert json.loads(out.read_text())["lines"] == lines
