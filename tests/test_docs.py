"""What the documentation says is true; what it shows to be done is in tests/docs."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import meristem
import meristem.gauges
import meristem.growth
import meristem.integrations
from meristem.comparison.file import REFERENCES, read_comparison
from meristem.config import all_settings, load_config

ROOT = Path(__file__).resolve().parents[1]


def test_every_configuration_key_is_documented() -> None:
    guide = (ROOT / "docs/configuration.md").read_text()
    assert [setting.key for setting in all_settings() if f"`{setting.key}`" not in guide] == []


def test_what_a_policy_of_ones_own_needs_is_where_its_page_says() -> None:
    section = (ROOT / "docs/own-policy.md").read_text()
    gauges_of_it = section.partition("| gauge |")[2].partition("\n\n")[0]
    table = "".join(re.findall(r"^\| `.*?\|", gauges_of_it, re.MULTILINE))
    gauges = {name: getattr(meristem.gauges, name) for name in re.findall(r"`(\w+)\(", table)}
    given = {"HeadTrial": {"layer": 0, "head": 0, "sequences": 1}, "UpdateLoss": {"updates": 10}}
    assert set(gauges) == set(given) | {"Demand", "Energy", "EntropyGauge", "HeadShares", "StepTime", "TrainingLoss"}
    assert all(isinstance(gauge(**given.get(name, {})), meristem.gauges.Gauge) for name, gauge in gauges.items())
    methods = "needs|decide|begin|prepare|moved|dump|load|exchanges|remembers|feeding|observed|measured"
    for name in re.findall(rf"`({methods})\b", section):
        assert hasattr(meristem.Policy, name) or name in meristem.Decision.__dataclass_fields__
    assert {"newborn_head", "Moves"} <= set(meristem.growth.__all__)
    assert "Instrument" in meristem.gauges.__all__


def test_the_budgets_of_the_page_can_be_had() -> None:
    section = (ROOT / "docs/comparisons.md").read_text()
    budgets = re.findall(r"^\| `(\{.*?\})` \|", section, re.MULTILINE)
    assert len(budgets) == 5
    rest = 'config = "../demo.toml"\nseeds = [0, 1]\nprimary = ["sgt", "plain"]\n[arms.sgt]\n[arms.plain]'
    for budget in budgets:
        tables = tomllib.loads(f"budget = {budget}\n{rest}")
        read_comparison(tables, ROOT / "configs/compare/guide.toml")
    named = re.findall(r'"@\w+(?:\.(\w+))?"', section)
    assert {name or "run" for name in named} == set(REFERENCES)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_file_builds_its_plan(path: Path) -> None:
    config = load_config(path)
    assert config.model.build(50304).layers
    assert tomllib.loads(path.read_text())["data"]["path"]


def test_the_files_of_the_architecture_are_there() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", (ROOT / "docs/architecture.md").read_text())
    assert len(named) > 20
    assert [name for name in named if not any((ROOT / home / name).exists() for home in ("src/meristem", ""))] == []


def test_the_site_has_every_page() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"^ +- .*: ([\w/-]+\.md)$", config.partition("\nnav:")[2], re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(shown) == sorted(pages)


def test_the_reference_has_everything_that_users_import() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    shown = set(re.findall(r"^::: meristem\.(?:[a-z_]+\.)*(\w+)$", page, re.MULTILINE))
    modules = (meristem, meristem.growth, meristem.gauges, meristem.integrations)
    beside = {"LoadedRun", "load_tokenizer", "prepare", "prepare_labelled"}  # of modules whose other names are inner
    assert shown - beside == {name for module in modules for name in module.__all__} - {"__version__"}


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.stem)
def test_prose_is_wrapped(page: Path) -> None:
    """Tables and pictures excepted, which cannot be, and commands as they were given."""
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120 and not line.startswith(("|", "![", "    "))] == []


# --- citations of the method notes -----------------------------------------------------------------------------------

METHODS = {page.stem: page.read_text() for page in (ROOT / "docs/methods").glob("*.md")}
CITED = re.compile(
    r"(?P<page>prism|sgt|incrt)\.md(?: (?P<sections>(?:(?:, | and )?(?:D\d+|O\d+|\d(?:\.\d)?)\b)+))?"
    r"|(?:test_(?P<method>sgt|incrt)_)?oracles?[ _](?P<oracles>\d+(?:(?:, | and | to |_and_|_)\d+)*)"
    r"|section (?P<section>\d(?:\.\d)?)\b"
    r"|\b(?P<decision>D\d+)\b",
    re.IGNORECASE,
)


def numbers(text: str) -> set[int]:
    """The numbers of a list such as `1 to 3, 7 and 9`."""
    ranges = (re.findall(r"\d+", part) for part in re.split(r", | and |_and_|_", text))
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def citations(text: str) -> Iterator[tuple[str, str]]:
    """The page and the pattern of everything that a file cites; a bare number is one of the page named last."""
    page = "prism"  # also that of oracles without a prefix in the name of a test
    for match in CITED.finditer(re.sub(r"\s+(?:# )?", " ", text)):
        page = (match["page"] or page).lower()
        for item in re.findall(r"[DO]?\d[\d.]*", match["sections"] or match["decision"] or match["section"] or ""):
            if item[0] in "DO":
                yield page, rf"^- \*\*{item} " if item[0] == "D" else rf"^\| {item} \|"
            else:
                yield page, rf"^(\*\*|##+ ){re.escape(item)} "
        if match["oracles"]:
            in_a_name = "_" in match[0]
            named = match["method"] or ("prism" if in_a_name else page)
            yield from ((named, rf"^\| O?{number} \|") for number in numbers(match["oracles"]))


def test_what_code_and_tests_cite_is_in_the_method_notes() -> None:
    files = [path for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    cited = [(path, *found) for path in files if path != Path(__file__) for found in citations(path.read_text())]
    assert len(cited) > 150
    missing = [
        f"{path.relative_to(ROOT)} cites {page}.md: {pattern}"
        for path, page, pattern in cited
        if not re.search(pattern, METHODS[page], re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(prism.md 2.1 and 6, oracles 1 to 3)", ["2.1", "6", "1", "2", "3"]),
        ("def test_sgt_oracle_14_vectors", ["14"]),
        ("def test_incrt_oracles_1_and_2_half", ["1", "2"]),
        ("(sgt.md 1, D4, and the oracle 7 of it)", ["1", "D4", "7"]),
    ],
)
def test_citations_are_found(text: str, expected: list[str]) -> None:
    found = [re.sub(r"[^\dD.]", "", pattern).strip(".") for _, pattern in citations(text)]
    assert found == expected
