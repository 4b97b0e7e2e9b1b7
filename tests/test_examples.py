"""The examples run as they are, and their models grow."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meristem.runs.run_folder import RunFolder
from meristem.training.train import resume
from training.helpers import assert_equal_runs, copy_run, final_state, run_jobs, tiny_config, trained
from training.test_distributed import assert_close_runs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def said_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The model of an example, and its decisions: step, and what was done."""
    monkeypatch.chdir(tmp_path)
    model = runpy.run_path(str(EXAMPLES / name), run_name="__main__")["model"]
    return model, re.findall(r"^step (\d+)[^:]*: (.*)$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("name", ["growth_accelerate.py", "growth_hf.py", "growth_pytorch.py"])
def test_depth_grows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, decisions = said_of(name, tmp_path, monkeypatch, capsys)
    assert re.match(r"add, layer \d|layer \d now loops heads", decisions[0][1])
    assert [int(step) for step, _ in decisions] == list(range(20, 20 * len(decisions) + 1, 20))
    grown = [text for _, text in decisions if not re.match(r"fix|growth has ended", text)]
    assert len(grown) == sum(loop.passes for loop in model.plan.loops.values())


def test_heads_grow_by_a_policy_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, decisions = said_of("own_policy.py", tmp_path, monkeypatch, capsys)
    assert [step for step, _ in decisions] == ["20", "40", "60", "80"]
    assert all(re.match(r"birth in layer \d \(its heads look", text) for _, text in decisions)
    assert sum(model.plan.heads) == 3 + 4


def test_a_pretrained_model_goes_on_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, decisions = said_of("import_and_grow.py", tmp_path, monkeypatch, capsys)
    assert decisions
    (loop,) = model.plan.loops.values()
    assert len(loop.heads) == 2
    begun, run = (RunFolder.open(Path("runs") / name) for name in ("imported", "looped"))
    assert run.plan.layers == begun.plan.layers
    assert run.newest_plan == model.plan
    assert [entry["held_out_loss"] for entry in run.read(run.metrics) if "held_out_loss" in entry][-1] < 4
    exported = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokens = torch.randint(256, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, model.logits(tokens), rtol=0, atol=1e-5)


def test_heads_and_depth_grow_with_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, decisions = said_of("growth_fabric.py", tmp_path, monkeypatch, capsys)
    births = [text for _, text in decisions if text.startswith("a head is born")]
    assert len(births) == sum(model.plan.heads) - 4 * 2 == 4
    assert sum("now loops" in text for _, text in decisions) == sum(loop.passes for loop in model.plan.loops.values())


def test_every_example_is_tested() -> None:
    loops = {"growth_accelerate.py", "growth_fabric.py", "growth_hf.py", "growth_pytorch.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*loops, "own_policy.py", "import_and_grow.py"}


# --- a policy of one's own in runs of the command line ---------------------------------------------------------------

OWN: dict[str, Any] = {
    "growth__policies": ["own_policy:WidestLayer"], "growth__widestlayer__every": 3, "growth__widestlayer__most": 3,
    "model__schedule": "uniform", "model__heads": 1, "model__head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def own(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was not interrupted, with births after 3, 6 and 9 of 12 updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLES)
        run = trained(data, tmp_path_factory.mktemp("own") / "run", **OWN)
    assert [(e["step"], e["policy"], e["action"]) for e in run.read(run.events) if e["event"] == "growth"] == [
        (step, "widestlayer", "birth") for step in (3, 6, 9)
    ]
    return run


def test_it_goes_on_bit_equal_where_it_was_killed(
    own: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    for last, births in ((4, 1), (8, 2)):
        run = copy_run(own, tmp_path / f"run-{last}", last=last)
        assert final_state(run)["growth"]["policies"]["widestlayer"]["state"] == births
        sys.modules.pop("own_policy")  # as a process of its own would
        resume(run.path)
        assert_equal_runs(run, own)
        assert final_state(run) == final_state(own)


def test_two_processes_equal_one(own: RunFolder, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **OWN).to_toml(), encoding="utf-8")
    run_jobs((2, "train", config, tmp_path / "run"))
    run = RunFolder.open(tmp_path / "run")
    assert_close_runs(run, own)
    assert run.newest_plan == own.newest_plan
    assert sum(run.newest_plan.heads) == 2 + 3
