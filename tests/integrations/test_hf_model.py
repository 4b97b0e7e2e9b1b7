"""An HfModel means what Hugging Face's models mean, and gives what our own do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from meristem.decoding import Sampling, generate
from meristem.errors import InputError, RunError
from meristem.growth import AddBlock, AddHead, newborn_head
from meristem.growth.apply import apply_edit
from meristem.integrations import HfModel
from meristem.model import Classifier, Decoder
from meristem.plan import Plan
from model.test_llama import llama as as_llama

PLAN = Plan.uniform(layers=2, width=32, heads=4, vocabulary=64, context=16)
LABELLED = Plan.uniform(layers=2, width=32, heads=4, vocabulary=64, context=16, classes=3)


@pytest.fixture
def model() -> HfModel:
    return HfModel(Decoder(PLAN, seed=1))


@pytest.fixture
def classifier() -> HfModel:
    return HfModel(Classifier(LABELLED, seed=1))


def drawn(rows: int = 3, length: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def shifted(tokens: Tensor) -> Tensor:
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)


# --- loss and logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits_in_training", [True, False])
def test_labels_equal_to_the_inputs_train_the_next_token(logits_in_training: bool) -> None:
    """The loss and its gradients are those of our own model with the targets moved, to the bit."""
    tokens = drawn()
    model, own = HfModel(Decoder(PLAN, seed=1), logits_in_training=logits_in_training), Decoder(PLAN, seed=1)
    output = model(input_ids=tokens, labels=tokens)
    loss = own(tokens, shifted(tokens)).loss
    assert loss is not None
    assert torch.equal(output.loss, loss)
    output.loss.backward()
    loss.backward()
    torch.testing.assert_close(gradients(model.model), gradients(own), rtol=0, atol=0)
    if logits_in_training:
        assert torch.equal(output.logits, own.logits(tokens))
    else:
        assert output.logits is None
        assert torch.equal(model.eval()(tokens, labels=tokens).logits, own.logits(tokens))
    assert "loss" not in model(tokens)
    assert torch.equal(model(tokens)["logits"], own.logits(tokens))


@pytest.mark.parametrize("side", ["left", "right"])
def test_it_means_what_a_llama_of_transformers_means(side: str, model: HfModel) -> None:
    """Loss, logits and greedy tokens, of rows that are padded on either side, with labels that are left out."""
    llama = as_llama(model.model)  # type: ignore[arg-type]
    tokens, mask = drawn(), torch.ones(3, 10, dtype=torch.int64)
    for row, count in ((1, 4), (2, 7)):
        padded = slice(0, count) if side == "left" else slice(10 - count, None)
        tokens[row, padded], mask[row, padded] = 5, 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 3:5] = -100
    if side == "left":  # theirs asks padding for the first token
        labels[1, 4] = labels[2, 7] = -100
    ours, theirs = (m(input_ids=tokens, attention_mask=mask, labels=labels) for m in (model, llama))
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    real = mask.bool()
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens, mask).logits, ours.logits, rtol=0, atol=0)
    if side == "left":
        asked: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(**asked), llama.generate(**asked, pad_token_id=0))
        ended = int(model.generate(**asked)[0, 12])
        asked |= {"eos_token_id": ended, "pad_token_id": 9}
        assert torch.equal(model.generate(**asked), llama.generate(**asked))


def test_what_the_mask_leaves_out_is_not_trained_on(model: HfModel) -> None:
    """Whatever the labels say there, and on whichever side it is."""
    tokens, mask = drawn(2), torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    left = model(tokens, mask, labels=tokens).loss
    right = torch.stack([tokens[0], tokens[1].roll(-3)])
    torch.testing.assert_close(left, model(right, mask.fliplr().sort(1, descending=True)[0], labels=right).loss)
    own = shifted(right)
    own[1, 6:] = -100
    assert torch.equal(left, model.model(right, own).loss)


def test_micro_batches_share_the_loss_by_their_labels(model: HfModel) -> None:
    tokens = drawn(4)
    labels = tokens.clone()
    labels[:2, 4:] = -100
    count = (labels[:, 1:] != -100).sum()
    parts = [
        model(tokens[rows], labels=labels[rows], num_items_in_batch=count).loss for rows in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(parts), model(tokens, labels=labels).loss)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_has_a_class_for_each_row(side: str, classifier: HfModel) -> None:
    tokens, labels = drawn(3), torch.tensor([0, 2, 1])
    own = tokens.clone()
    own[1, 6:] = 0
    output = classifier(input_ids=tokens, attention_mask=(own != 0).long(), labels=labels)  # padded with any id
    native = classifier.model(own, labels)
    assert torch.equal(output.loss, native.loss)
    assert torch.equal(output.logits, classifier.model.logits(own))
    moved = own.clone() if side == "right" else torch.stack([own[0], own[1].roll(4), own[2]])
    assert torch.equal(classifier(moved, labels=labels).loss, native.loss)


@pytest.mark.parametrize("logits_in_training", [True, False])
@pytest.mark.parametrize("classifies", [True, False])
def test_recomputed_blocks_have_the_same_gradients(classifies: bool, logits_in_training: bool) -> None:
    plan = LABELLED if classifies else PLAN
    model = HfModel(Classifier(plan) if classifies else Decoder(plan), logits_in_training=logits_in_training)
    tokens = drawn()
    labels = torch.tensor([0, 2, 1]) if classifies else tokens
    model(tokens, labels=labels).loss.backward()
    expected, runs = {name: grad.clone() for name, grad in gradients(model).items()}, 0
    model.zero_grad()
    states = [model.is_gradient_checkpointing]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    states.append(model.is_gradient_checkpointing)

    def count(*call: Any) -> None:
        nonlocal runs
        runs += 1

    model.model.stack[0].feed_forward.register_forward_pre_hook(count)
    model(tokens, labels=labels).loss.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert runs == 2  # once more for the gradients
    model.gradient_checkpointing_disable()
    assert [*states, model.is_gradient_checkpointing] == [False, True, False]
    model(tokens, labels=labels)
    assert runs == 3
    for wrong in ({"use_reentrant": True}, {"offload": True}, {"every_n_layers": 2}):
        (name,) = wrong
        arguments = {"gradient_checkpointing_kwargs": wrong} if name == "use_reentrant" else wrong
        with pytest.raises(InputError, match=f"gradient_checkpointing_kwargs.{name} = .*: is not taken here"):
            model.gradient_checkpointing_enable(**arguments)


def test_what_is_wrong_is_named(model: HfModel, classifier: HfModel) -> None:
    tokens = drawn()
    calls: list[tuple[HfModel, dict[str, Any], str]] = [
        (model, {"labels": tokens}, "input_ids = None: must be given"),
        (model, {"input_ids": tokens[0]}, r"input_ids = \(10,\): must be \(B, T\).*use input_ids\[None\]"),
        (model, {"input_ids": tokens + 60}, "input_ids = .*: must be token ids from 0 to 63"),
        (model, {"input_ids": tokens, "labels": tokens[:, 1:]}, r"labels = \(3, 9\): must have the shape \(3, 10\)"),
        (model, {"input_ids": tokens, "token_type_ids": tokens}, "token_type_ids = .*: is not taken here; input_ids"),
        (model, {"input_ids": tokens, "attention_mask": tokens[:, None]}, r"attention_mask = \(3, 1, 10\): must be"),
        (model, {"input_ids": tokens, "attention_mask": [1]}, "attention_mask = 'list': must be"),
        (model, {"input_ids": tokens, "attention_mask": 0 * tokens}, "attention_mask = 'a row without a one'"),
        (model, {"input_ids": tokens, "attention_mask": tokens != tokens[0, 4]}, "attention_mask = 'zeros between"),
        (classifier, {"input_ids": tokens, "labels": tokens}, r"labels = \(3, 10\): must have the shape \(3,\)"),
        (classifier, {"input_ids": tokens, "labels": torch.tensor([0, 1, 3])}, "targets = 3: must be classes from 0"),
        (classifier, {"input_ids": 0 * tokens, "attention_mask": tokens}, "input_ids = 0: is padding to a classifier"),
    ]
    for called, inputs, complaint in calls:
        with pytest.raises(InputError, match=complaint):
            called(**inputs)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_sampled_tokens_follow_torchs_seed(model: HfModel) -> None:
    tokens = drawn(2, 4)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}
    torch.manual_seed(3)
    first, second = (model.generate(tokens, **settings) for _ in range(2))
    torch.manual_seed(3)
    seed = int(torch.randint(1 << 62, ()))
    own = generate(model.model, tokens.tolist(), max_tokens=8, sampling=Sampling(0.7, 9, 0.9, seed))  # type: ignore[arg-type]
    assert first.tolist() == [[*row, *new] for row, new in zip(tokens.tolist(), own, strict=True)]
    assert not torch.equal(first, second)


def test_requests_that_cannot_be_are_named(model: HfModel, classifier: HfModel) -> None:
    tokens = drawn(2, 10)
    right = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    calls: list[tuple[HfModel, dict[str, Any], str]] = [
        (model, {"max_new_tokens": 8}, "max_new_tokens = 8: must be at most 7: context 16, prompt 10"),
        (model, {"num_beams": 4}, "num_beams = 4: is not taken here; do_sample"),
        (model, {"attention_mask": right, "max_new_tokens": 2}, "attention_mask = .*must have it on the left"),
        (model, {"eos_token_id": [1, 2]}, "eos_token_id = "),
        (classifier, {"max_new_tokens": 1}, "model = 'Classifier': must be a Decoder"),
    ]
    for called, settings, complaint in calls:
        with pytest.raises(InputError, match=complaint):
            called.generate(tokens, **settings)


# --- saving and loading ----------------------------------------------------------------------------------------------


def test_weights_carry_their_structure(model: HfModel, tmp_path: Path) -> None:
    own = model.model
    apply_edit(own, None, AddHead(1, newborn_head(own.plan.layers[1], own.plan.width, None, seed=0)))
    apply_edit(own, None, AddBlock(2, copy_of=1))
    model.save_pretrained(tmp_path / "new" / "folder")
    saved = tmp_path / "new" / "folder" / "model.safetensors"
    torch.testing.assert_close(load_file(saved), dict(model.state_dict()), rtol=0, atol=0)
    assert HfModel.from_pretrained(saved.parent).model.plan == own.plan
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for again in (HfModel(Decoder(PLAN)), HfModel.from_pretrained(tmp_path)):
        again.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert again.model.plan == own.plan
        torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
        assert torch.equal(again(drawn()).logits, model(drawn()).logits)


def test_weights_of_another_model_are_refused(model: HfModel, tmp_path: Path) -> None:
    other = HfModel(Decoder(Plan.uniform(layers=2, width=64, heads=4, vocabulary=64, context=16)))
    with pytest.raises(InputError, match=r"embedding\.weight = \(64, 64\): must be of shape \(64, 32\)"):
        model.load_state_dict(other.state_dict())
    save_file(dict(model.model.state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="has no 'plan': it was not saved from an HfModel"):
        HfModel.from_pretrained(tmp_path)


# --- a Trainer with what HF users give it ----------------------------------------------------------------------------


def test_a_trainer_with_a_tokenizer_and_its_collator(tmp_path: Path) -> None:
    """Texts of several lengths, padded by the collator: the loss falls, and predictions have logits."""
    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{number}": number + 2 for number in range(20)}}
    backend = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[EOS]")
    texts = [" ".join(f"w{(start + i) % 20}" for i in range(4 + start % 9)) for start in range(80)]
    model = HfModel(Decoder(PLAN, seed=0))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[tokenizer(text, return_token_type_ids=False) for text in texts],
        eval_dataset=[tokenizer(text, return_token_type_ids=False) for text in texts[:8]],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 4
    assert trainer.predict(trainer.eval_dataset).predictions.shape[0] == 8
    prompt = tokenizer(["w3 w4", "w9 w10 w11"], return_tensors="pt", padding=True, padding_side="left")
    written = model.generate(prompt["input_ids"], prompt["attention_mask"], max_new_tokens=2)
    assert tokenizer.batch_decode(written, skip_special_tokens=True) == ["w3 w4 w5 w6", "w9 w10 w11 w12 w13"]


def trainer_of(model: HfModel, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, save_strategy="no", report_to="none", seed=0,
        disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in drawn(rows=12)])


def test_a_trainer_recomputes_blocks(tmp_path: Path) -> None:
    plain, again = (HfModel(Decoder(PLAN, seed=0)) for _ in range(2))
    trainer_of(plain, tmp_path).train()
    trainer_of(again, tmp_path, gradient_checkpointing=True).train()
    assert again.is_gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


def test_a_trainer_that_smooths_labels_is_refused(tmp_path: Path) -> None:
    """It would take the labels away and hold them to the logits without moving them: the model would learn to copy."""
    with pytest.raises(AttributeError, match="label_smoothing_factor must be 0"):
        trainer_of(HfModel(Decoder(PLAN)), tmp_path, label_smoothing_factor=0.1)
