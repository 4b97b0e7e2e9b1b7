"""What `meristem doctor` says of this machine, and of ones that lack something."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import meristem.doctor
from commands import Call
from meristem.doctor import check_up

ROOT = Path(__file__).resolve().parents[1]


def test_what_this_machine_has(call: Call) -> None:
    said = call("doctor", "--device", "cpu")
    assert said.code == 0
    assert f"torch {torch.__version__}" in said.out
    assert "trains in float32" in said.out
    assert "attention: flash (head dim 32, 64, 128, 256, 512)" in said.out
    facts = json.loads(call("doctor", "--device", "cpu", "--json").out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["memory_gib"] > 0


def test_every_extra_of_the_project_is_told_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = check_up("cpu").extras
    assert found is not None
    assert set(found) == set(project["optional-dependencies"])


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.11", "aaa>=1; extra == 'one'", 'bbb[x]>=2,<3; extra == "one"', "ccc; extra == 'two'"]
    monkeypatch.setattr(meristem.doctor, "requires", lambda name: lines)
    monkeypatch.setattr(meristem.doctor, "_version", lambda name: None if name == "bbb" else "1.0")
    found = check_up("cpu")
    assert found.extras == {"one": ["bbb"], "two": []}
    assert "extra one  lacks bbb: pip install 'meristem[one]'\nextra two  is there" in str(found)


def test_a_package_that_is_not_installed_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(meristem.doctor, "requires", requires)
    assert "extras: not known" in str(check_up("cpu"))


def test_a_device_that_is_not_there_is_refused(call: Call) -> None:
    said = call("doctor", "--device", "nonsense")
    assert (said.code, "device" in said.err) == (2, True)
