"""GGUF files hold the model: by a reader, by the arithmetic of llama.cpp, and by llama.cpp itself."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from meristem.data import ByteTokenizer, HfTokenizer
from meristem.errors import InputError
from meristem.export import export_run
from meristem.export.gguf import Content, as_gguf, gguf_content, llama_cpp_difference, read_gguf, write_content
from meristem.export.reference import reference_of
from meristem.model import Decoder, Transformer
from meristem.plan import LayerPlan, Plan, Rotary
from meristem.runs.run_folder import load_run
from model.helpers import lively, random_tokens

from .helpers import EVERYTHING, FIXTURES, assert_same_logits, with_lively_gates
from .test_llama import paddable_plans
from .test_tokenizers import bpe


def content_of(model: Transformer) -> Content:
    plan = model.plan
    return gguf_content(as_gguf(model), plan, ByteTokenizer(), "name")


def with_room(plan: Plan) -> Plan:
    """The plan with a vocabulary that has the bytes."""
    return replace(plan, vocabulary=320)


def logits_of(content: Content, tokens: Tensor) -> Tensor:
    """What llama.cpp computes from such a file, written down from its sources: `llama`, `deci` and `qwen3`."""
    kind, read = content.architecture, {name: torch.from_numpy(array) for name, array in content.tensors.items()}

    def fact(name: str) -> Any:
        return content.metadata[f"{kind}.{name}"]

    def per_layer(name: str) -> list[int]:
        value = fact(name)
        return value if isinstance(value, list) else [value] * fact("block_count")

    dim, eps, length = fact("attention.key_length"), fact("attention.layer_norm_rms_epsilon"), tokens.shape[1]
    frequencies = fact("rope.freq_base") ** (-torch.arange(0, dim, 2).double() / dim)
    frequencies = frequencies / read.get("rope_freqs.weight", 1.0)
    frequencies = frequencies / content.metadata.get(f"{kind}.rope.scaling.factor", 1.0)
    angles = torch.arange(length)[:, None] * frequencies

    def turned(heads: Tensor) -> Tensor:
        """Neighbours are rotated, or, in a qwen3, halves."""
        halves = kind == "qwen3"
        pairs = heads.unflatten(-1, (2, -1) if halves else (-1, 2)).movedim(-2 if halves else -1, 0)
        cos, sin = angles.cos().float(), angles.sin().float()
        found = torch.stack((pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos))
        return found.movedim(0, -2 if halves else -1).flatten(-2)

    x = read["token_embd.weight"][tokens]
    width = x.shape[-1]
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    counts = zip(*map(per_layer, names), strict=True)
    for index, (heads, kv_heads, hidden) in enumerate(counts):
        weight = {name: read.get(f"blk.{index}.{name}.weight") for name in
                  ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm",
                   "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
        normed = rms_norm(x, (width,), weight["attn_norm"], eps)
        queries, keys, values = (
            (normed @ weight[name].T + read.get(f"blk.{index}.{name}.bias", 0))  # type: ignore[union-attr]
            .unflatten(-1, (count, dim))
            .transpose(1, 2)
            for name, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads))
        )
        if kind == "qwen3":
            queries = rms_norm(queries, (dim,), weight["attn_q_norm"], eps)
            keys = rms_norm(keys, (dim,), weight["attn_k_norm"], eps)
        attended = scaled_dot_product_attention(
            turned(queries), turned(keys), values, is_causal=True, scale=1 / math.sqrt(dim), enable_gqa=True
        )
        update = attended.transpose(1, 2).flatten(2) @ weight["attn_output"].T  # type: ignore[union-attr]
        assert hidden > 0  # at 0 a deci would forget the update
        x = x + update
        normed = rms_norm(x, (width,), weight["ffn_norm"], eps)
        gate, up, down = (weight[name] for name in ("ffn_gate", "ffn_up", "ffn_down"))
        assert gate is not None
        assert up is not None
        assert down is not None
        x = x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return (
        rms_norm(x, (width,), read["output_norm.weight"], eps) @ read.get("output.weight", read["token_embd.weight"]).T
    )


@given(plan=paddable_plans().map(with_room))
@settings(max_examples=30)
def test_what_llama_cpp_computes_is_the_same(plan: Plan) -> None:
    assume(not plan.qk_norm or plan.rotary.band is None)  # which is refused
    model = with_lively_gates(lively(plan)).eval()
    tokens = random_tokens(plan)
    assert_same_logits(logits_of(content_of(model), tokens), model, tokens)


def test_the_architecture_is_the_plainest_that_holds_the_plan() -> None:
    plan = Plan.uniform(layers=2, width=32, heads=4, vocabulary=320, context=16)
    assert content_of(Decoder(plan)).architecture == "llama"
    assert content_of(Decoder(replace(plan, qk_norm=True))).architecture == "qwen3"
    uneven = replace(plan, layers=(LayerPlan(2, 8, 2), LayerPlan(3, 8, 1)))
    content = content_of(Decoder(uneven))
    assert content.architecture == "deci"
    assert content.metadata["deci.attention.head_count"] == [2, 3]
    assert content.metadata["deci.attention.head_count_kv"] == [2, 1]
    assert sum(tensor.size for tensor in content.tensors.values()) == uneven.parameters
    looped = content_of(Decoder(with_room(EVERYTHING)))
    assert looped.metadata["deci.feed_forward_length"] == [32, 40, 32, 32, 40, 40, 40, 40]


def test_the_file_holds_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    done = export_run(FIXTURES / "loops", tmp_path / "out", "gguf")
    assert "llama.cpp itself was not run" in str(done)
    found, run = read_gguf(tmp_path / "out" / "model.gguf"), load_run(FIXTURES / "loops", device="cpu")
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(found, tokens), run.model.logits(tokens), rtol=0, atol=1e-5)
    names = found.metadata["tokenizer.ggml.tokens"]
    assert isinstance(names, list)
    assert (len(names), names[ord("A")], names[256]) == (320, "A", "<|endoftext|>")
    assert found.metadata["tokenizer.ggml.eos_token_id"] == 256


def test_byte_level_bpe_is_held(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(bpe())
    model = Decoder(Plan.uniform(layers=1, width=16, heads=2, vocabulary=320, context=16))
    metadata = gguf_content(as_gguf(model), model.plan, tokenizer, "name").metadata
    tokens, merges, kinds = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    assert isinstance(kinds, list)
    ids = tokenizer.encode("the cat").tolist()
    assert "".join(str(tokens[number]) for number in ids) == "the\u0120cat"
    assert all(len(str(pair).split(" ")) == 2 for pair in merges)
    assert kinds[tokenizer.end_of_text] == 3


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokenizer.normalizer", {"normalizer": {"type": "Lowercase"}}),
        ("tokenizer.pre_tokenizer.type", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("tokenizer.pre_tokenizer.add_prefix_space", {"pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}}),
    ],
)  # fmt: skip
def test_other_tokenizers_are_refused_by_name(field: str, change: dict[str, Any]) -> None:
    tokenizer = HfTokenizer(json.dumps({**json.loads(bpe()), **change}))
    model = Decoder(Plan.uniform(layers=1, width=16, heads=2, vocabulary=320, context=16))
    with pytest.raises(InputError, match=field):
        gguf_content(as_gguf(model), model.plan, tokenizer, "name")


def test_what_cannot_be_held_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this run is of a classifier"):
        export_run(FIXTURES / "classifier", tmp_path / "out", "gguf")
    odd = Decoder(replace(with_room(EVERYTHING), layers=(LayerPlan(2, 12, 2), LayerPlan(2, 16, 2)), gates=None))
    with pytest.raises(InputError, match="head_dim = 12"):
        content_of(odd)
    banded = replace(UNIFORM, qk_norm=True, rotary=Rotary(5e5, 8.0, (1.0, 4.0), 8192))
    with pytest.raises(InputError, match=r"rotary\.band"):
        content_of(Decoder(banded))


UNIFORM = Plan.uniform(layers=2, width=32, heads=4, vocabulary=320, context=24, kv_group=2)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "normed": {"qk_norm": True}, "gains": {"qk_norm": True, "qk_gain": True, "rotary": Rotary(5e5, 2.0)},
    "biases": {"qkv_bias": True, "tied": False, "norm_eps": 1e-6, "rotary": Rotary(5e5, 8.0, (1.0, 4.0), 16)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("plan", [UNIFORM, with_room(EVERYTHING)], ids=["uniform", "everything"])
def test_llama_cpp_itself_says_the_same(plan: Plan, variant: str, tmp_path: Path) -> None:
    """Where it is installed (the package llama-cpp-python)."""
    pytest.importorskip("llama_cpp")
    model = with_lively_gates(lively(replace(plan, **VARIANTS[variant]))).eval()
    write_content(tmp_path / "model.gguf", content_of(model))
    difference = llama_cpp_difference(tmp_path / "model.gguf", reference_of(model, 256))
    assert difference is not None
    assert difference < 1e-4


@pytest.mark.slow
def test_llama_cpp_itself_cuts_texts_alike(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    done = export_run(FIXTURES / "loops", tmp_path / "out", "gguf")
    assert done.difference is not None
    loaded = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    for text in ("Page 3: 12", "n\u00e9 <|endoftext|>\n\n  it's"):
        assert loaded.tokenize(text.encode(), add_bos=False, special=False) == ByteTokenizer().encode(text).tolist()
