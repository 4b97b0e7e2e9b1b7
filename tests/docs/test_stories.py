"""Every command and every block of code that the documents show is run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from commands import Call
from meristem.errors import InputError

from .blocks import SHELL, Block, blocks_of, lines_of, words_of
from .props import Props
from .story import ROOT, Story, Untold

# The method notes have formulas, and the lab log tells of commands as they were given.
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "lab-log.md")]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]

# How commands begin that are not run, and why. Each must be in the documents.
NOT_RUN = {
    "make ": "sets up an environment of its own; its targets are looked up below",
    "pip install": "needs a network; its extras are looked up below",
    "pip wheel": "needs a network",
    "meristem compare configs/compare/deeper.toml": "is as long as its FLOPs; see tests/comparison/test_running.py",
    "meristem bench recipe": "trains 124M parameters beside checkouts of others, on CUDA; see tests/bench",
    "meristem bench step --sizes": "measures models of up to 757M parameters beside a checkout; see tests/bench",
}
# How blocks begin that are nothing to be run, and what they are. Each must be in the documents.
NO_COMMANDS = {
    "RUN, step 800": "what the audit printed, of a run that is not here",
    "demand = how fast": "words",
    "average +=": "a formula, which tests/training/test_averaging.py has too",
    "options: ": "what mkdocs is to show of the module (make docs)",
}


def left_out(line: str) -> bool:
    return line.startswith(tuple(NOT_RUN))


def blocks_on(name: str) -> list[Block]:
    return blocks_of(name, (ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def props(tmp_path_factory: pytest.TempPathFactory) -> Props:
    return Props(tmp_path_factory.mktemp("props"))


@pytest.fixture
def story(props: Props, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Story:
    monkeypatch.chdir(tmp_path)
    return Story(props, call, monkeypatch)


@pytest.mark.parametrize("name", [name for name in NAMES if blocks_on(name)])
def test_what_a_page_shows_can_be_done(name: str, story: Story) -> None:
    for block in blocks_on(name):
        if not block.text.startswith(tuple(NO_COMMANDS)):
            story.run(block, left_out)


# --- what is left out is left out on purpose -------------------------------------------------------------------------


def shown_blocks() -> list[Block]:
    return [block for name in NAMES for block in blocks_on(name)]


def shown_lines() -> list[str]:
    """All commands of the documents."""
    return [line for block in shown_blocks() if block.language in SHELL for _, line in lines_of(block)]


def test_nothing_is_left_out_that_is_not_there() -> None:
    assert [begin for begin in NOT_RUN if not any(line.startswith(begin) for line in shown_lines())] == []
    assert [begin for begin in NO_COMMANDS if not any(b.text.startswith(begin) for b in shown_blocks())] == []


def test_targets_of_make_are_there() -> None:
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {words[0][1] for line in shown_lines() if re.match(r"make \w", line) for words in words_of(line)}
    assert asked <= made


def test_extras_that_are_installed_are_there() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    asked = {name for names in re.findall(r"pip install [^`\n]*\[([\w,]+)\]", pages) for name in names.split(",")}
    assert asked
    assert asked <= extras


# --- and nothing else is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("    cowsay hello", "new.md:3: cowsay hello: nothing here runs cowsay"),
        ("```bash\nmeristem doctor && cowsay hello\n```", "new.md:4: .*nothing here runs cowsay"),
        ("```text\nanything\n```", "new.md:4: nothing runs a block of text"),
        ("    meristem trian configs/demo.toml --out runs/first", "trian"),
        ("    meristem train configs/demo.toml --out runs/first --train.stepps 3", "train.stepps"),
        ("    meristem report runs/first --folder elsewhere", "--folder"),
        ("```python\nDecoder(plan).grow()\n```", "'Decoder' object has no attribute 'grow'"),
        ("    model = Decoder(plna)", "name 'plna' is not defined"),
        ("```toml\n[growth]\npolicies = ['sgd']\n```", "sgd"),
        ("```\nmeristem plan --heads\n```", "--heads"),
    ],
)
def test_what_cannot_be_done_is_noticed(added: str, problem: str, story: Story) -> None:
    (block,) = blocks_of("new.md", f"Try this:\n\n{added}\n")
    with pytest.raises((Untold, AssertionError, InputError, AttributeError, NameError), match=problem):
        story.run(block, left_out)


def test_blocks_are_found() -> None:
    text = "Words.\n\n    a = 1\n\n    b = Plan(\n    )\n\nWords `x`.\n\n"
    text += "1. ```sh\n   make\n   ```\n\n    meristem a \\\n        --b c   # d\n"
    assert [(block.line, block.language, block.text) for block in blocks_of("page", text)] == [
        (3, "python", "a = 1\n\nb = Plan(\n)\n"),
        (11, "sh", "make\n"),
        (14, "sh", "meristem a \\\n    --b c   # d\n"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("meristem a 'b c'  # d", [[["meristem", "a", "b c"]]]),
        ("meristem a [--b c ...] && meristem d", [[["meristem", "a"]], [["meristem", "d"]]]),
        ('echo "a, b" | meristem predict x', [[["echo", "a, b"], ["meristem", "predict", "x"]]]),
        ("pip install '.[eval]'", [[["pip", "install", ".[eval]"]]]),
    ],
)
def test_commands_are_read_as_by_a_shell(line: str, words: list[list[list[str]]]) -> None:
    assert words_of(line) == words
