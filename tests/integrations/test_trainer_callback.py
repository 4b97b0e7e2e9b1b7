"""A Trainer with the callback grows as a plain loop does, also when it is interrupted and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from meristem.errors import RunError
from meristem.growth import Grower, Incrt, Observe, Policy, Sgt
from meristem.integrations import GrowthCallback
from meristem.model import Decoder
from meristem.plan import Plan

STEPS, BATCH = 24, 4
POLICY = Sgt(total_steps=STEPS, passes=2, max_layers=2, start=4, window=5)
PLAN = POLICY.prepare(Plan.uniform(layers=3, width=32, heads=4, vocabulary=64, context=16))
Item = dict[str, Tensor]


@dataclass(frozen=True)
class Watched(Incrt):
    """Births by demand that never come, as all layers are full: the demand is measured and judged all the same."""

    name: ClassVar[str] = "watched"
    exchanges: ClassVar[bool] = False


DEMAND = Watched(STEPS, feed_every=1, decide_every=4, calibration=6, cool_down=2, warm_up=1, feeds=2, max_heads=4)


def make_items(count: int = STEPS * BATCH) -> list[Item]:
    windows = torch.randint(64, (count, 17), generator=torch.Generator().manual_seed(0))
    return [{"tokens": window[:-1], "targets": window[1:]} for window in windows]


class Stop(TrainerCallback):  # type: ignore[misc]  # has no types
    """Ends a run early, after a checkpoint of its last step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def make_trainer(
    out: Path, *others: TrainerCallback, policies: Sequence[Policy] = (Observe(8), POLICY), **arguments: Any
) -> tuple[Trainer, GrowthCallback]:
    """A new model and its trainer, which reads the items in order."""
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "optim": "adamw_torch",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "label_names": ["targets"], **arguments,
    }  # fmt: skip
    callback = GrowthCallback(Grower(Decoder(PLAN, seed=0), None, policies))
    trainer = Trainer(
        callback.grower.model,
        TrainingArguments(str(out), **settings),
        train_dataset=make_items(),
        eval_dataset=make_items(8),
        callbacks=[callback, *others],
    )
    return trainer, callback


def plain_loop(policies: Sequence[Policy] = (Observe(8), POLICY)) -> tuple[Grower, list[dict[str, Any]]]:
    model = Decoder(PLAN, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    grower = Grower(model, optimizer, policies)
    items, events = make_items(), []
    for step in range(STEPS):
        tokens, targets = (
            torch.stack([item[k] for item in items[step * BATCH :][:BATCH]]) for k in ("tokens", "targets")
        )
        loss = model(tokens, targets).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        events += [event.to_dict() for event in grower.step(tokens, targets).events]
    return grower, events


def decoder(grower: Grower) -> Decoder:
    assert isinstance(grower.model, Decoder)
    return grower.model


def assert_equal_growers(one: Grower, other: Grower) -> None:
    assert one.state_dict() == other.state_dict()
    torch.testing.assert_close(one.tensors(), other.tensors(), rtol=0, atol=0)
    assert one.model.plan == other.model.plan
    weights, twins = decoder(one).state_dict(), decoder(other).state_dict()
    assert list(weights) == list(twins)
    for name, weight in weights.items():
        assert torch.equal(weight, twins[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, GrowthCallback]:
    """An uninterrupted run, with evaluations in between."""
    out = tmp_path_factory.mktemp("whole")
    trainer, callback = make_trainer(out, eval_strategy="steps", eval_steps=3)
    trainer.train()
    return trainer, callback


def test_a_trainer_grows_like_a_plain_loop(whole: tuple[Trainer, GrowthCallback]) -> None:
    trainer, callback = whole
    grower, events = plain_loop()
    assert [event["action"] for event in events] == ["add", "deepen", "add", "deepen"]
    assert callback.events == events
    assert_equal_growers(callback.grower, grower)
    assert [seen["step"] for seen in callback.observations] == [8, 16, 24]
    measured = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert measured == list(range(3, STEPS + 1, 3))
    said = [entry for entry in trainer.state.log_history if "growth" in entry]
    assert [entry["step"] for entry in said] == [4, 9, 14, 19]
    assert said[0]["growth"].startswith(f"layer {events[0]['layer']} now loops heads ")


def test_nothing_is_left_on_the_model(whole: tuple[Trainer, GrowthCallback]) -> None:
    assert not decoder(whole[1].grower)._forward_pre_hooks


@pytest.mark.parametrize("step", [3, 4, 11])  # before any growth, at a birth, in a ramp and between two probes
def test_a_resumed_run_goes_on_exactly(step: int, tmp_path: Path, whole: tuple[Trainer, GrowthCallback]) -> None:
    first, before = make_trainer(tmp_path, Stop(step), save_strategy="steps", save_steps=1000)
    first.train()
    assert json.loads((tmp_path / f"checkpoint-{step}" / "grower.json").read_text())["done"] == step
    second, after = make_trainer(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert before.events + after.events == whole[1].events
    assert_equal_growers(after.grower, whole[1].grower)
    said = [entry["step"] for entry in second.state.log_history if "growth" in entry]
    assert said == [4, 9, 14, 19]  # also those from before


@pytest.mark.parametrize("step", [5, 14])  # while the demand is calibrated, and between two decisions
def test_what_gauges_remember_is_saved_and_taken_up(step: int, tmp_path: Path) -> None:
    """The demand is measured with the targets of the batch, as in a plain loop."""
    grower, events = plain_loop([DEMAND, POLICY])
    assert sum(event["event"] == "measured" for event in events) > 3
    assert grower.tensors()
    first, before = make_trainer(
        tmp_path, Stop(step), policies=[DEMAND, POLICY], save_strategy="steps", save_steps=1000
    )
    first.train()
    second, after = make_trainer(tmp_path, policies=[DEMAND, POLICY])
    second.train(resume_from_checkpoint=True)
    assert before.events + after.events == events
    assert_equal_growers(after.grower, grower)
    (tmp_path / f"checkpoint-{step}" / "grower.safetensors").unlink()
    third, _ = make_trainer(tmp_path, policies=[DEMAND, POLICY])
    with pytest.raises(RunError, match=rf"checkpoint-{step}: does not fit this grower \(tensors = .* missing"):
        third.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))


def test_a_checkpoint_without_the_grower_is_refused(tmp_path: Path) -> None:
    first, _ = make_trainer(tmp_path, Stop(5), save_strategy="steps", save_steps=1000)
    first.train()
    (tmp_path / "checkpoint-5" / "grower.json").unlink()
    second, _ = make_trainer(tmp_path)
    with pytest.raises(RunError, match=r"checkpoint-5/grower\.json: not found"):
        second.train(resume_from_checkpoint=True)


def test_entropy_is_measured_in_the_precision_of_the_training(tmp_path: Path) -> None:
    trainer, callback = make_trainer(tmp_path, Stop(5), bf16=True)
    seen: list[torch.dtype] = []
    callback.grower.model.stack[1].attention.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    trainer.train()
    assert len(seen) > 5  # steps and measurements
    assert set(seen) == {torch.bfloat16}


def test_without_transformers_the_extra_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import meristem.integrations"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "transformers is not installed; install it with: pip install 'meristem[hf]'" in result.stderr
