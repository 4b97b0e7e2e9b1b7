"""A report says what it can of damaged logs, and what it cannot; of a run that cannot be written it only prints."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem import files
from meristem.config import load_config
from meristem.report.page.file import report_page
from meristem.report.pictures import draw_growth, draw_loss, run_text
from meristem.runs.origin import Origin
from meristem.runs.run_folder import RunFolder
from training.helpers import EAGER_HEADS, EAGER_PRUNING, copy_run, prepared, trained

GROWS: dict[str, dict[str, Any]] = {
    "loops": {
        "train__steps": 30, "growth__policy": "sgt", "growth__start": 5.0, "growth__window": 5.0,
        "growth__observe": True, "growth__observe_every": 3, "growth__excluded": [],
    },
    "heads": {"train__steps": 30, **EAGER_HEADS},
    "blocks, and policies of one's own": {
        "growth__policies": [
            "stack", "report.own_policies:Odd", "report.own_policies:MeToo", "report.own_policies:Blocks", "prune",
        ],
        "growth__stack__at": [3], "growth__blocks__add": 10, "growth__blocks__remove": [11], **EAGER_PRUNING,
    },
}  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, -1, 10**400, 3.5, "x", [], {}, [None], [[]], [[1, "y"]], {"layer": 7}, 1e308)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    data = prepared(folder / "data")
    return {name: trained(data, folder / name, **changes) for name, changes in GROWS.items()}


@pytest.fixture(autouse=True)
def _one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations, which nothing here damages, are read and checked once: each time takes longer than a report."""
    monkeypatch.setattr("meristem.runs.run_folder.load_config", cache(load_config))
    monkeypatch.setattr(Origin, "check", lambda *_: None)


def mutated(value: Any, draw: random.Random) -> Any:
    """A JSON value with something in it exchanged or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(list(value))
        if draw.random() < 0.2:
            return {key: entry for key, entry in value.items() if key != name}
        return {**value, name: mutated(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        index = draw.randrange(len(value))
        return [*value[:index], mutated(value[index], draw), *value[index + 1 :]]
    return draw.choice(VALUES)


@pytest.mark.parametrize("kind", GROWS)
def test_damaged_lines_never_stop_a_report(kind: str, runs: dict[str, RunFolder], tmp_path: Path, call: Call) -> None:
    run = copy_run(runs[kind], tmp_path / "run")
    logs = {log: log.read_text().splitlines() for log in run.logs if log.is_file()}
    draw = random.Random(0)
    for _ in range(25):
        for log, lines in logs.items():
            changed = list(lines)
            for _ in range(3):
                index = draw.randrange(len(lines))
                changed[index] = json.dumps(mutated(json.loads(lines[index]), draw))
            log.write_text("\n".join(changed) + "\n")
        said = call("report", run.path)
        assert (said.code, said.err) == (0, "")
        assert "warning: " in said.out
        assert (run.path / "loss.svg").is_file()
        assert (run.path / "report.html").is_file()


def places(value: Any, begin: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything that stands in a JSON value; of a list only its first and last entry."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        if isinstance(value, dict) or key in (0, len(value) - 1):
            yield (*begin, key)
            yield from places(entry, (*begin, key))


def exchanged(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with a new entry at one place; without it where the new one is `places` itself."""
    key, *rest = place
    copy = value.copy()
    if not rest and new is places:
        copy.pop(key)
    else:
        copy[key] = exchanged(value[key], tuple(rest), new) if rest else new
    return copy


@pytest.mark.parametrize("kind", GROWS)
def test_no_change_in_any_place_stops_a_report(kind: str, runs: dict[str, RunFolder], tmp_path: Path) -> None:
    run = copy_run(runs[kind], tmp_path / "run")
    for log in (log for log in run.logs if log.is_file()):
        whole = log.read_text()
        entries = [json.loads(line) for line in whole.splitlines()]
        for entry in {(e.get("event"), e.get("action"), *e): e for e in entries}.values():
            for place in places(entry):
                lines = [json.dumps(exchanged(entry, place, new)) for new in (*VALUES, places)]
                log.write_text(whole + "\n".join(lines) + "\n")
                assert run_text(run.path)
                assert draw_growth(run.path)
                assert draw_loss(run.path)
                assert report_page([run.path])
        log.write_text(whole)


def test_a_whole_log_is_not_warned_of(runs: dict[str, RunFolder], call: Call) -> None:
    for run in runs.values():
        assert "warning" not in call("report", run.path).out


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"step":' * 100_000])
def test_a_line_nested_too_deeply_is_passed_over(
    deep: str, runs: dict[str, RunFolder], tmp_path: Path, call: Call
) -> None:
    run = copy_run(runs["loops"], tmp_path / "run")
    with run.events.open("a") as file:
        file.write(deep + "\n")
    said = call("report", run.path)
    assert said.code == 0
    assert "events.jsonl: 1 line cannot be read" in said.out


@pytest.mark.parametrize("verb", ["report", "eval"])
def test_a_run_that_cannot_be_written_is_only_read(
    verb: str, runs: dict[str, RunFolder], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_run(runs["loops"], tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    plain = files.write_atomically

    def refuse(path: Path, text: str) -> None:  # root may write anywhere, so that a mode would not do
        if run.path in path.parents:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        plain(path, text)

    monkeypatch.setattr("meristem.runs.run_folder.write_atomically", refuse)
    said = call(verb, run.path)
    assert said.code == 0, said.err
    assert f"{run.path} cannot be written to: nothing was saved (see --out)" in said.out
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    said = call(verb, run.path, "--out", tmp_path / "elsewhere")
    assert said.code == 0, said.err
    assert (tmp_path / "elsewhere" / "loss.svg").is_file()
    assert (tmp_path / "elsewhere" / "eval.json").is_file() == (verb == "eval")
