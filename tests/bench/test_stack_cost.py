"""What a stack costs is measured on the model that it makes."""

from __future__ import annotations

import json
from pathlib import Path

from commands import Call


def test_a_stack_is_measured_and_written_down(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "stack.json"
    said = call(
        "bench", "growth", "--policy", "stack", "--layers", "4", "--width", "32", "--heads", "2", "--vocabulary", "64",
        "--context", "16", "--batch", "2", "--steps", "3", "--device", "cpu", "--out", file,
    )  # fmt: skip
    assert said.code == 0, said.err
    report = json.loads(file.read_text())
    assert report["layers"] == [2, 4]
    assert len(report["milliseconds"]) == 2
    assert all(value > 0 for value in (*report["milliseconds"], report["stack_seconds"]))
    assert "2 blocks" in said.out
