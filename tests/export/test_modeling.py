"""The exported model is the run's: the same logits, and everything that transformers does with a model works."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments

from meristem.export.standalone import modeling_meristem as modelling
from meristem.export.standalone.configuration_meristem import MeristemConfig
from meristem.growth import newborn_head
from meristem.growth.apply import apply_edit
from meristem.growth.edits import AddBlock, AddHead, RemoveHead
from meristem.model import Classifier, Decoder
from meristem.plan import Plan
from model.helpers import grown_plans, lively, random_tokens

from .helpers import EVERYTHING, assert_same, in_transformers, with_lively_gates


@pytest.fixture(scope="module")
def own() -> Decoder:
    return with_lively_gates(lively(EVERYTHING)).eval()


@pytest.fixture
def exported(own: Decoder) -> Any:
    return in_transformers(own)


def widened(plan: Plan) -> Plan:
    """The plan with a wider stream: the norm of a few numbers may be next to nothing, and blow rounding up."""
    return replace(plan, width=16 * plan.width)


@given(plan=grown_plans().map(widened), seed=st.integers(0, 100))
@settings(max_examples=40)
def test_any_plan_gives_the_same_logits(plan: Plan, seed: int) -> None:
    model = with_lively_gates(lively(plan, seed=seed)).eval()
    exported = in_transformers(model)
    assert_same(exported, model, random_tokens(plan, seed=seed))
    assert exported.config.num_hidden_layers == len(exported.model.layers)


@given(plan=grown_plans().map(widened), pooling=st.sampled_from(["mean", "first"]), seed=st.integers(0, 100))
@settings(max_examples=20)
def test_any_classifier_gives_the_same_logits(plan: Plan, pooling: str, seed: int) -> None:
    model = Classifier(replace(plan, classes=3, pooling=pooling, tied=True), seed).eval()
    tokens = random_tokens(plan, 3, seed=seed).clamp(min=1)
    tokens[1, (tokens.shape[1] + 1) // 2 :] = 0
    assert_same(in_transformers(model), model, tokens)


def test_models_that_grew_give_the_same_logits() -> None:
    model = lively(Plan.prism(layers=3, width=32, heads=4, dims=(16,), vocabulary=50, context=16)).eval()
    head = newborn_head(model.plan.layers[1], 32, None, 3)
    head = head._replace(out=torch.randn(head.out.shape, generator=torch.Generator().manual_seed(4)))
    for edit in (AddHead(1, head), RemoveHead(0, 0), AddBlock(2, copy_of=0), AddBlock(4, seed=1)):
        apply_edit(model, None, edit)
    assert_same(in_transformers(model), model, random_tokens(model.plan))


def test_long_contexts_are_the_same_too() -> None:
    """Positions are float32 in transformers, and made in float64 here."""
    model = lively(Plan.prism(layers=3, width=64, heads=8, dims=(32, 16), vocabulary=61, context=1024)).eval()
    assert_same(in_transformers(model), model, random_tokens(model.plan, 1))


def test_attention_written_out_is_the_fused_one(own: Decoder, exported: Any) -> None:
    exported.set_attn_implementation("eager")
    tokens = random_tokens(own.plan)
    assert_same(exported, own, tokens)
    shown = exported(tokens, output_attentions=True, output_hidden_states=True)
    assert [weights.shape[1] for weights in shown.attentions] == [2, 1, 4, 2, 2, 3, 3, 5]
    assert len(shown.hidden_states) == 1 + len(exported.model.layers)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_have_the_shape_of_their_layer(kind: str, own: Decoder, exported: Any) -> None:
    tokens = random_tokens(own.plan, 2, 12)
    cache = (
        DynamicCache(config=exported.config)
        if kind == "dynamic"
        else StaticCache(config=exported.config, max_cache_len=16)
    )
    with torch.no_grad():
        whole = exported(tokens).logits
        parts = [
            exported(part, past_key_values=cache, use_cache=True).logits
            for part in (tokens[:, :7], tokens[:, 7:8], tokens[:, 8:])
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 1, 2, 2, 2, 1, 1, 5]
    assert [layer.keys.shape[3] for layer in cache.layers] == [16, 16, 8, 8, 8, 16, 16, 8]


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("how", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_generation_is_greedy_decoding_with_left_padding(how: dict[str, Any], own: Decoder, exported: Any) -> None:
    prompts = [[5, 17, 3, 60], [44], [9, 9, 2, 31, 7, 8]]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    exported.generation_config.eos_token_id = None
    found = exported.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **how)
    assert found[:, width:].tolist() == [greedy(own, prompt, 8) for prompt in prompts]


def test_beams_and_draws_do_not_depend_on_the_cache(exported: Any) -> None:
    exported.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 17, 3], [44, 2, 1]])
    for how in ({"num_beams": 3}, {"do_sample": True, "top_k": 20}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            found.append(exported.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6,
                                           use_cache=use_cache, **how))  # fmt: skip
        assert torch.equal(*found)


def test_saving_and_loading_changes_nothing(exported: Any, tmp_path: Path) -> None:
    exported.save_pretrained(tmp_path)
    again = type(exported).from_pretrained(tmp_path)
    assert again.config.to_dict()["per_layer_config"] == exported.config.to_dict()["per_layer_config"]
    assert again.config.plan == EVERYTHING.to_dict()
    pairs = zip(exported.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(name == twin and torch.equal(*values) for (name, *a), (twin, *b) in pairs for values in [(*a, *b)])
    assert again.lm_head.weight is again.model.embed_tokens.weight


def loss_gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_recomputed_layers_have_the_same_gradients(own: Decoder, exported: Any) -> None:
    tokens = random_tokens(own.plan)
    exported.train()
    plain = loss_gradients(exported, tokens)
    exported.gradient_checkpointing_enable()
    torch.testing.assert_close(loss_gradients(exported, tokens), plain)


def test_the_loss_is_ours(own: Decoder, exported: Any) -> None:
    tokens = random_tokens(own.plan)
    expected = own(tokens[:, :-1], targets=tokens[:, 1:]).loss
    assert expected is not None
    assert exported(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(float(expected.detach()), rel=1e-5)


def test_it_compiles_as_a_whole(own: Decoder, exported: Any) -> None:
    tokens = random_tokens(own.plan)
    compiled = torch.compile(exported.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=tokens).logits, exported(tokens).logits)


def test_lora_adapts_every_layer(own: Decoder, exported: Any) -> None:
    adapted = get_peft_model(exported, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert sum("q_proj.lora_A" in name for name in trained) == exported.config.num_hidden_layers
    tokens = random_tokens(own.plan)
    assert_same(adapted, own, tokens)  # an adapter begins with no effect
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert adapted.merge_and_unload()(tokens).logits.shape == (*tokens.shape, own.plan.vocabulary)


def test_a_trainer_learns(own: Decoder, exported: Any, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(own.plan, 8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=8, learning_rate=1e-2, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="no", gradient_checkpointing=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(exported, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]


def test_a_trainer_that_smooths_labels_moves_them_by_one(own: Decoder, exported: Any, tmp_path: Path) -> None:
    """Without our name among its models it would train the copying of the inputs."""
    rows = random_tokens(own.plan, 4)
    arguments = TrainingArguments(
        str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True, label_smoothing_factor=0.1
    )
    trainer = Trainer(exported, arguments)
    with torch.no_grad():
        loss = trainer.compute_loss(exported, {"input_ids": rows, "labels": rows})
        scores = exported(rows).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(scores, rows[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_a_language_model_becomes_a_classifier(own: Decoder, tmp_path: Path) -> None:
    """The answer is read from the last real token, on whichever side the padding is."""
    in_transformers(own).save_pretrained(tmp_path)
    model = modelling.MeristemForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    tokens = random_tokens(own.plan, 1, 6).clamp(min=1)
    padding, ones = torch.zeros(1, 4, dtype=torch.long), torch.ones_like(tokens)
    with torch.no_grad():
        plain = model(tokens, attention_mask=ones).logits
        right = model(torch.cat((tokens, padding), 1), attention_mask=torch.cat((ones, padding), 1)).logits
        left = model(torch.cat((padding, tokens), 1), attention_mask=torch.cat((padding, ones), 1)).logits
    torch.testing.assert_close(right, plain)
    torch.testing.assert_close(left, plain, rtol=1e-4, atol=1e-5)
    assert model(tokens, labels=torch.tensor([2])).loss.requires_grad


@pytest.mark.parametrize("kind", ["classes", "several classes", "numbers"])
def test_micro_batches_of_a_classifier_share_its_loss(own: Decoder, tmp_path: Path, kind: str) -> None:
    """What the labels are is told by how they look, and a Trainer that accumulates gradients trains on the same."""
    in_transformers(own).save_pretrained(tmp_path)
    labels = {
        "classes": torch.arange(8) % 3,
        "several classes": torch.randint(2, (8, 3)).float(),
        "numbers": torch.linspace(-2, 2, 8),
    }[kind]
    rows = [{"input_ids": row, "labels": label} for row, label in zip(random_tokens(own.plan, 8), labels, strict=True)]
    trained = []
    for size in (8, 2):
        torch.manual_seed(0)
        count = 1 if kind == "numbers" else 3
        model = modelling.MeristemForSequenceClassification.from_pretrained(tmp_path, num_labels=count)
        model.config.pad_token_id = None
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            learning_rate=0.1, optim="sgd", max_grad_norm=0, report_to="none", disable_tqdm=True, use_cpu=True,
            save_strategy="no", logging_steps=1,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        trained.append((trainer.state.log_history[0]["loss"], dict(model.named_parameters())))
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-4)
    torch.testing.assert_close(trained[0][1], trained[1][1], rtol=1e-4, atol=1e-6)


def test_other_fields_of_the_configuration_are_used(own: Decoder) -> None:
    """Those that models from elsewhere have: biases, an output of its own, another base and stretch of positions."""
    config = {**in_transformers(own).config.to_dict(), "attention_bias": True, "tie_word_embeddings": False}
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    model: Any = modelling.MeristemForCausalLM(MeristemConfig(**config))
    assert model.model.layers[0].self_attn.k_proj.bias is not None
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    frequencies = model.model.rotary_embs["16"].inv_freq
    expected = 5e5 ** (-torch.arange(0, 16, 2) / 16) / 2
    torch.testing.assert_close(frequencies, expected)


def test_attention_is_written_as_vllm_reads_it() -> None:
    """One call of the attention interface in `forward`, found in the source, with a scaling that is an attribute."""
    source = inspect.getsource(modelling.MeristemAttention)
    tree = ast.parse(source)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attention_interface"
    ]
    (call,) = calls
    scaling = next(word.value for word in call.keywords if word.arg == "scaling")
    assert ast.unparse(scaling) == "self.scaling"
    assert any(word.arg is None for word in call.keywords)  # **kwargs
    assert modelling.MeristemPreTrainedModel._supports_attention_backend
