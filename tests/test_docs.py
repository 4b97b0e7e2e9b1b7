"""What the documentation shows is true."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

from meristem.cli import main
from meristem.config import _known_keys, load_config
from meristem.plan import Plan

ROOT = Path(__file__).resolve().parents[1]


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan", "model.decoder", "model.encoder", "model.generate"])
def test_the_examples_of_docstrings_are_true(name: str) -> None:
    known = {"Plan": Plan, "torch": torch}
    outcome = doctest.testmod(importlib.import_module(f"meristem.{name}"), extraglobs=known)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_every_configuration_key_is_in_the_guide() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    assert [key for key in _known_keys() if f"`{key}`" not in guide] == []


GUIDE_PLANS = re.findall(r"^    meristem (plan .*?)(?:  +#.*)?$", (ROOT / "docs/guide.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", GUIDE_PLANS)
def test_the_plans_of_the_guide_are_accepted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in line.split(" && "):
        monkeypatch.setattr("sys.argv", ["meristem", *command.removeprefix("meristem ").split()])
        with pytest.raises(SystemExit) as leaving:
            main()
        assert leaving.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_file_builds_its_plan(path: Path) -> None:
    config = load_config(path)
    assert config.model.build(50304).layers
    assert tomllib.loads(path.read_text())["data"]["path"]


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md", "docs/incrt.md"])
def test_prose_is_wrapped(name: str) -> None:
    """Lines of tables excepted, which cannot be."""
    lines = enumerate((ROOT / name).read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > 140 and not line.startswith("|")] == []
