"""Heads, blocks and loops that come while a Trainer trains an HfModel: as in a plain loop, also when resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, get_scheduler

from meristem.errors import InputError
from meristem.growth import Grower, Incrt, Observe, Policy, Prune, RandomBirths, Sgt, Stack, prepared
from meristem.integrations import GrowthCallback, HfModel
from meristem.model import Classifier, Decoder
from meristem.plan import Plan
from meristem.training.optimizer import parameter_groups

from .test_trainer_callback import Stop, assert_equal_growers

STEPS, BATCH = 24, 4
POLICIES = (
    Stack(total_steps=STEPS, start_layers=2, at=(5,)),
    RandomBirths(births=3, total_steps=STEPS, start_heads=2, warm_up=3, decide_every=3, last_birth=20),
    Sgt(total_steps=STEPS, passes=2, max_layers=2, start=4, window=4, beta=0.25),
)
BASE = Plan.uniform(layers=4, width=32, heads=4, vocabulary=64, context=16)
ACTIONS = [(3, "birth"), (5, "stack"), (12, "birth"), (13, "add"), (17, "deepen"), (18, "birth"), (21, "fix")]
LABELLED = Plan.uniform(layers=2, width=32, heads=4, vocabulary=64, context=16, classes=3)
RATE, DECAY, CLIP = 1e-2, 0.1, 0.5


def windows(count: int = STEPS * BATCH) -> Tensor:
    return torch.randint(1, 64, (count, 16), generator=torch.Generator().manual_seed(0))


def items(count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    return [{"input_ids": window, "labels": window} for window in windows(count)]


def make_trainer(
    out: Path, *others: TrainerCallback, policies: Sequence[Policy] = POLICIES, wrap: bool = True, **changes: Any
) -> tuple[Trainer, GrowthCallback]:
    """A new model and its trainer, which reads the items in order; `changes` are of Trainer or TrainingArguments."""
    own = {
        "train_dataset": items(), "eval_dataset": items(8), **{k: changes.pop(k) for k in list(changes) if k in OWN}
    }  # fmt: skip
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential",
        "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": CLIP, "optim": "adamw_torch",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, **changes,
    }  # fmt: skip
    model = own.pop("model", None) or Decoder(prepared(BASE, policies), seed=0)
    callback = GrowthCallback(Grower(model, None, policies))
    made = own.pop("optimizer", None)
    trainer = Trainer(
        HfModel(model) if wrap else model,
        TrainingArguments(str(out), **settings),
        callbacks=[callback, *others],
        optimizers=(None if made is None else made(model), None),
        **own,
    )
    return trainer, callback


OWN = ("model", "optimizer", "train_dataset", "eval_dataset", "data_collator")


def plain_loop(policies: Sequence[Policy] = POLICIES) -> tuple[Grower, list[dict[str, Any]]]:
    """The same updates by hand: clipped, decayed where that is right, with a rate that falls in a line."""
    model = Decoder(prepared(BASE, policies), seed=0)
    optimizer = adamw(model)
    grower = Grower(model, optimizer, policies)
    rate = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    events = []
    for tokens in windows().split(BATCH):
        targets = torch.cat([tokens[:, 1:], torch.full((BATCH, 1), -100)], dim=1)
        loss = model(tokens, targets).loss
        assert loss is not None
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        events += [event.to_dict() for event in grower.step(tokens, targets).events]
    return grower, events


def adamw(model: Decoder) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameter_groups(model, weight_decay=DECAY), lr=RATE)


def moments(grower: Grower) -> dict[str, Tensor]:
    assert isinstance(grower.model, nn.Module)
    assert grower.optimizer is not None
    state = grower.optimizer.state
    return {f"{name}.{key}": value for name, p in grower.model.named_parameters() for key, value in state[p].items()}


@pytest.fixture(scope="module")
def whole() -> tuple[Grower, list[dict[str, Any]]]:
    grower, events = plain_loop()
    assert [(e["step"], e["action"]) for e in events if e["event"] == "growth"] == ACTIONS
    return grower, events


def test_a_trainer_grows_like_a_plain_loop(tmp_path: Path, whole: tuple[Grower, list[dict[str, Any]]]) -> None:
    """Clipping, decay, the falling rate and evaluations in between included."""
    trainer, callback = make_trainer(tmp_path, eval_strategy="steps", eval_steps=5)
    trainer.train()
    assert callback.events == whole[1]
    assert_equal_growers(callback.grower, whole[0])
    torch.testing.assert_close(moments(callback.grower), moments(whole[0]), rtol=0, atol=0)
    optimizer, model = callback.grower.optimizer, trainer.model
    assert optimizer is not None
    assert model.seen is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("step", [2, 3, 5, 14])  # before any growth, at a birth, at the stack, in a ramp
def test_a_resumed_run_goes_on_exactly(step: int, tmp_path: Path, whole: tuple[Grower, list[dict[str, Any]]]) -> None:
    first, before = make_trainer(tmp_path, Stop(step), save_strategy="steps", save_steps=1000)
    first.train()
    second, after = make_trainer(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert before.events + after.events == whole[1]
    assert_equal_growers(after.grower, whole[0])
    torch.testing.assert_close(moments(after.grower), moments(whole[0]), rtol=0, atol=0)


def test_an_optimizer_of_ones_own_follows(tmp_path: Path, whole: tuple[Grower, list[dict[str, Any]]]) -> None:
    """It was made for the small model, before the Trainer gave that the structure of a checkpoint."""
    make_trainer(tmp_path, Stop(13), optimizer=adamw, save_strategy="steps", save_steps=1000)[0].train()
    second, after = make_trainer(tmp_path, optimizer=adamw)
    second.train(resume_from_checkpoint=True)
    assert_equal_growers(after.grower, whole[0])


def test_gates_that_no_loop_uses_stay_put(tmp_path: Path) -> None:
    """Decayed, they would shrink: here they have no gradient, and are not zero."""
    trainer, callback = make_trainer(tmp_path, policies=[Sgt(total_steps=STEPS, passes=2, start=20, window=4)])
    gates = callback.grower.model.gate_delta  # type: ignore[attr-defined]
    weight = callback.grower.model.embedding.weight  # type: ignore[attr-defined]
    trainer.add_callback(Stop(3))
    with torch.no_grad():
        gates.fill_(0.5)
    before = weight.detach().clone()
    trainer.train()
    assert bool((gates == 0.5).all())
    assert not torch.equal(weight, before)
    saved = [len(group["params"]) for group in trainer.optimizer.state_dict()["param_groups"]]
    assert sum(saved) == len(list(trainer.model.parameters()))  # each in one of the Trainer's own two groups


def test_the_best_model_comes_back_with_its_structure(tmp_path: Path) -> None:
    class Worse(TrainerCallback):  # type: ignore[misc]  # has no types
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            metrics["eval_loss"] = float(state.global_step)

    trainer, callback = make_trainer(
        tmp_path, Worse(), eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, max_steps=STEPS,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert callback.grower.model.plan.heads == (3, 2)
    again = HfModel.from_pretrained(tmp_path / "checkpoint-4")
    assert again.model.plan == callback.grower.model.plan
    torch.testing.assert_close(again.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
    with pytest.raises(InputError, match=r"grower\.done = 24: must be 0, as of the Trainer"):
        trainer.train()


def test_demand_and_pruning_in_micro_batches_and_bf16(tmp_path: Path) -> None:
    """Heads by demand, measured in the precision of the training, on the last micro-batch of each update."""
    policies = [
        Incrt(STEPS, feed_every=1, decide_every=4, calibration=6, cool_down=2, warm_up=1, feeds=2, start_heads=1),
        Prune(),
        Observe(8),
    ]
    trainer, callback = make_trainer(
        tmp_path, policies=policies, bf16=True, gradient_accumulation_steps=2, per_device_train_batch_size=2
    )
    trainer.train()
    assert callback.grower.done == STEPS
    assert any(event["event"] == "measured" for event in callback.events)
    assert [seen["step"] for seen in callback.observations] == [8, 16, 24]


def test_a_classifier_grows(tmp_path: Path) -> None:
    policies = [RandomBirths(births=2, total_steps=STEPS, start_heads=2, warm_up=3, decide_every=3, last_birth=20)]
    model = Classifier(prepared(LABELLED, policies), seed=0)
    rows = [{"input_ids": window, "label": int(window[0]) % 3} for window in windows()]
    trainer, _ = make_trainer(tmp_path, policies=policies, model=model, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert sum(model.plan.heads) == 4 + 2
    assert trainer.evaluate()["eval_loss"] > 0


# --- what is refused, with a sentence --------------------------------------------------------------------------------


def test_a_policy_of_another_length_is_refused(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, policies=[Sgt(total_steps=1000, passes=2)], max_steps=60)
    with pytest.raises(InputError, match=r"sgt\.total_steps = 1000: must be 60, the updates of the Trainer"):
        trainer.train()


def test_other_models_are_refused(tmp_path: Path) -> None:
    growth = GrowthCallback(Grower(Decoder(prepared(BASE, POLICIES)), None, POLICIES))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(InputError, match=r"Trainer\.model = 'LlamaForCausalLM': must be the Decoder that the grower"):
        Trainer(llama, arguments, train_dataset=items(), callbacks=[growth])
    with pytest.raises(InputError, match=r"Trainer\.model = 'Decoder': must be the Decoder that the grower grows"):
        Trainer(HfModel(Decoder(BASE)), arguments, train_dataset=items(), callbacks=[growth])
    with pytest.raises(InputError, match=r"Trainer\.model = 'Decoder': must be HfModel\(model\): stack puts new"):
        Trainer(growth.grower.model, arguments, train_dataset=items(), callbacks=[growth])
    with pytest.raises(InputError, match="grower = 'Decoder': must be a Grower"):
        GrowthCallback(growth.grower.model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="model = 'LlamaForCausalLM': must be a Decoder or a Classifier"):
        HfModel(llama)


def test_an_optimizer_that_is_not_the_trainers_is_refused(tmp_path: Path) -> None:
    trainer, callback = make_trainer(tmp_path)
    callback.grower.attach(torch.optim.AdamW(trainer.model.parameters()))
    with pytest.raises(InputError, match=r"grower\.optimizer = 'AdamW': must be the Trainer's"):
        trainer.train()


def test_several_processes_are_refused(tmp_path: Path) -> None:
    trainer, callback = make_trainer(tmp_path)
    arguments = SimpleNamespace(world_size=2, n_gpu=0)
    optimizer = torch.optim.AdamW(trainer.model.parameters())
    state = SimpleNamespace(max_steps=STEPS, global_step=0)
    with pytest.raises(InputError, match=r"policy = 'stack': puts new parameters .* several processes or GPUs"):
        callback.on_train_begin(arguments, state, None, model=trainer.model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("wrap", "columns", "complaint"),
    [
        (True, lambda w: {"input_ids": w}, "labels = None: must be given to train"),
        (True, lambda w: {"labels": w}, "input_ids = None: must be given"),
        (True, lambda w: {"input_ids": w[:-1], "labels": w[1:]}, "labels = .*moved by one already"),
        (False, lambda w: {"tokens": w}, r"columns = \['tokens'\]: must be tokens and targets for a Decoder; HfModel"),
        (False, lambda w: {"input_ids": w, "labels": w}, "keys expected by the model: tokens,targets"),
        (False, lambda w: {"tokens": w, "targets": w}, "targets = .*are equal to the tokens: the model would learn to"),
    ],
)
def test_columns_that_are_missing_or_wrong(
    wrap: bool, columns: Callable[[Tensor], dict[str, Tensor]], complaint: str, tmp_path: Path
) -> None:
    rows = [columns(window) for window in windows()]
    trainer, _ = make_trainer(tmp_path, policies=[Observe(8)], wrap=wrap, train_dataset=rows)
    with pytest.raises(ValueError, match=complaint):  # ours, and one of the Trainer's own
        trainer.train()


def test_columns_that_the_trainer_leaves_are_named(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, policies=[Observe(8)], wrap=False, remove_unused_columns=False)
    with pytest.raises(InputError, match=r"columns = \['input_ids', 'labels'\]: must be tokens and targets for a Dec"):
        trainer.train()


def test_constant_texts_may_be_copied(tmp_path: Path) -> None:
    rows = [{"tokens": torch.full((16,), 7), "targets": torch.full((16,), 7)} for _ in range(STEPS * BATCH)]
    trainer, callback = make_trainer(tmp_path, Stop(2), policies=[Observe(8)], wrap=False, train_dataset=rows)
    trainer.train()
    assert callback.grower.done == 2
