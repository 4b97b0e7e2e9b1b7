"""The run folder: links, damaged files, changed configurations, small held-out sets, and threads."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from meristem.config import override
from meristem.data import ByteTokenizer, prepare
from meristem.errors import RunError
from meristem.runs.run_folder import RunFolder
from meristem.training.loop import Outcome
from meristem.training.train import resume, train
from training.helpers import STEPS, copy_run, metrics, tiny_config, write_texts


def test_a_link_to_an_empty_folder_takes_the_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    train(tiny_config(data, train__steps=1), tmp_path / "link")
    assert (tmp_path / "empty" / "config.toml").is_file()


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_damaged_origin_is_named(content: str | None, whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=4)
    (run.path / "origin.json").unlink()
    if content is not None:
        (run.path / "origin.json").write_text(content)
    with pytest.raises(RunError, match=r"origin\.json"):
        resume(run.path)


def test_lines_that_are_no_entries_are_passed_over(whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=4)
    with run.metrics.open("a") as file:
        file.write('3\n[1]\n{"loss": 1}\n{"step": 1')
    assert resume(run.path).step == STEPS
    assert metrics(run) == metrics(whole)


def test_changes_on_resume_are_kept(whole: RunFolder, data: Path, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=4)
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    resume(run.path, override(run.config, ["--data.path", str(moved), "--log.every", "3"]))
    assert run.config.data.path == str(moved)
    assert run.config.log.every == 3


def test_too_little_held_out_data_costs_the_evaluation_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_texts(tmp_path / "texts")
    (tmp_path / "texts" / "short.txt").write_text("ab")
    index = prepare([texts], tmp_path / "data", tokenizer=ByteTokenizer(), held_out=1e-9)
    context = index.held_out.tokens
    assert context > 0
    outcome = train(tiny_config(tmp_path / "data", model__context=context, train__steps=2), tmp_path / "run")
    assert outcome.held_out is None
    assert f"no held-out loss: fewer than context + 1 = {context + 1} tokens are held out" in capsys.readouterr().out


def test_a_run_can_live_in_a_thread(data: Path, tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(train(tiny_config(data, train__steps=2), tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert [outcome.step for outcome in outcomes] == [2]
    entries = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert entries[-1]["event"] == "finished"
