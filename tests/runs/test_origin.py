"""What a run began with cannot change under it unnoticed; nor can its logs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meristem.config import override
from meristem.errors import InputError, RunError
from meristem.files import sha256_of
from meristem.plan import Plan
from meristem.runs.checkpoint import MANIFEST, STATE, list_checkpoints
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.train import resume
from training.helpers import STEPS, assert_equal_runs, copy_run, metrics, trained


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("last", [0, 8])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr = 0.003", "lr = 0.004", r"optimizer\.lr = 0\.004: the run began with 0\.003.*config\.toml"),
        ("[train]\nsteps = 12", "[train]\nsteps = 13", r"train\.steps = 13: the run began with 12"),
        ("context = 32", "context = 16", r"model\.context = 16: the run began with 32"),
        ("dims = [16]", "dims = [32, 16]", r"model\.dims = \[32, 16\]: the run began with \[16\]"),
    ],
)
def test_an_edited_configuration_is_refused_by_key(
    old: str, new: str, message: str, last: int, whole: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(whole, tmp_path / "run", last=last)
    replace_in(run.path / "config.toml", old, new)
    before = run.metrics.read_bytes()
    for command in (resume, load_run):
        with pytest.raises(InputError, match=message):
            command(run.path)
    assert run.metrics.read_bytes() == before


def test_what_may_change_is_noted(whole: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = copy_run(whole, tmp_path / "run", last=8)
    replace_in(run.path / "config.toml", "[log]\nevery = 1\n", "[log]\nevery = 2\n")
    resume(run.path, override(run.config, ["--eval.batch", "3"]))
    said = caplog.text
    assert "log.every is 2 from here on; it was 1\n" in said
    assert "eval.batch is 3 from here on; it was 4\n" in said
    assert said.count("from here on") == 2


def test_a_reformatted_configuration_is_the_same(whole: RunFolder, tmp_path: Path) -> None:
    """Values count, not bytes."""
    run = copy_run(whole, tmp_path / "run", last=8)
    replace_in(run.path / "config.toml", "lr = 0.003", "lr = 3.0e-3  # as before")
    content = json.loads((run.path / "plan.json").read_text())
    (run.path / "plan.json").write_text(json.dumps(content))
    resume(run.path)
    assert_equal_runs(run, whole)


def other_plan(run: RunFolder) -> None:
    layers = [layer.heads for layer in run.plan.layers]
    plan = run.plan
    other = Plan.from_heads(
        layers[::-1], width=plan.width, vocabulary=plan.vocabulary, context=plan.context,
        feed_forward=plan.feed_forward,
    )  # fmt: skip
    (run.path / "plan.json").write_text(other.to_json())


def other_tokenizer(run: RunFolder) -> None:
    replace_in(run.path / "tokenizer.json", "bytes", "byte5")


def other_origin(run: RunFolder) -> None:
    replace_in(run.path / "origin.json", '"data": "', '"data": "0')


def swapped_origin(run: RunFolder) -> None:
    """Whole, but of another run; the configuration goes with it."""
    other = trained(Path(run.config.data.path), run.path.parent / "other", train__seed=5, train__steps=1)
    for name in ("origin.json", "config.toml", "plan.json"):
        shutil.copy(other.path / name, run.path / name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_plan, r"plan\.json: layers\[0\]\.heads is not what the run began with"),
        (other_tokenizer, r"tokenizer\.json: is not the file that the run began with"),
        (other_origin, r"origin\.json: its content is not what was written when the run began"),
        (swapped_origin, r"origin\.json: is not that of the run that step-00000008 belongs to"),
    ],
)
def test_other_files_are_named(
    damage: Callable[[RunFolder], None], message: str, whole: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(whole, tmp_path / "run", last=8)
    damage(run)
    with pytest.raises(RunError, match=message):
        resume(run.path)


def test_checkpoints_of_today_load_with_a_note(
    whole: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs as they were before there was an origin: data.json instead, and nothing in the checkpoints' states."""
    run = copy_run(whole, tmp_path / "run", last=8)
    origin = json.loads((run.path / "origin.json").read_text())
    (run.path / "data.json").write_text(json.dumps({"digest": origin["data"]}))
    (run.path / "origin.json").unlink()
    for path in list_checkpoints(run.checkpoints):
        state = json.loads((path / STATE).read_text())
        for name in ("origin", "settings", "logs", "good", "rewinds"):
            del state[name]
        (path / STATE).write_text(json.dumps(state))
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["files"][STATE] = {
            "sha256": sha256_of(path / STATE), "bytes": (path / STATE).stat().st_size
        }  # fmt: skip
        (path / MANIFEST).write_text(json.dumps(manifest))
    assert resume(run.path).step == STEPS
    assert "of an older version of Meristem, so nothing in it vouches for" in caplog.text
    assert_equal_runs(run, whole)
    replace_in(run.path / "config.toml", "lr = 0.003", "lr = 0.004")  # from now on it is bound
    with pytest.raises(InputError, match=r"optimizer\.lr = 0\.004: the run began with 0\.003"):
        resume(run.path)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_changed_log_is_said_and_kept_aside(
    whole: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the line is still JSON, and the number one that could be."""
    run = copy_run(whole, tmp_path / "run", last=8)
    text = run.metrics.read_text()
    entry = json.loads(text.splitlines()[2])
    run.metrics.write_text(text.replace(json.dumps(entry), json.dumps({**entry, "loss": entry["loss"] + 1})))
    damaged = run.metrics.read_bytes()
    resume(run.path)
    assert "metrics.jsonl: is not what was recorded until step 8 (changed)" in caplog.text
    assert (run.path / "metrics.jsonl.aside-1").read_bytes() == damaged
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_log_that_is_gone_is_said(
    name: str, whole: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = copy_run(whole, tmp_path / "run", last=8)
    (run.path / name).unlink()
    resume(run.path)
    assert f"{name}: is not what was recorded until step 8 (it has 0 bytes, and had " in caplog.text
