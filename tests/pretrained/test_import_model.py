"""Imported models against transformers, which has made them from random weights; nothing is downloaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meristem import InputError, RunError, generate, import_model, load_run
from meristem.cli import main
from meristem.decoding import Sampling
from meristem.model import Decoder
from meristem.plan import Plan, Rotary
from meristem.training.train import resume

from .helpers import CHECKPOINTS, CONTEXT, LLAMA3, VOCABULARY, random_model, saved, their_logits, transformers


def tokens(batch: int = 2, length: int = CONTEXT) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def imported(folder: Path, out: Path, **options: Any) -> Decoder:
    import_model(folder, out, **options)
    return load_run(out, device="cpu").decoder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_parameters_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = CHECKPOINTS[name]
    theirs = random_model(family, **settings)
    model = imported(saved(theirs, tmp_path / "hf"), tmp_path / "run")
    expected = their_logits(theirs, tokens())
    found = model(tokens()).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    own = {id(parameter): parameter.numel() for parameter in theirs.parameters()}
    norms = (2 * 3 + 1) * 32 if family == "Olmo" else 0  # its norms have no gains; ours have, of 1
    assert model.plan.parameters == sum(own.values()) + norms
    prompt = tokens(1, 5)
    continued = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 5:].tolist()
    assert generate(model, [prompt[0].tolist()], max_tokens=20, sampling=Sampling(temperature=0)) == [continued]


@pytest.mark.parametrize(("dtype", "shards"), [(torch.float16, None), (torch.bfloat16, "20KB")])
def test_half_precision_and_several_files(dtype: torch.dtype, shards: str | None, tmp_path: Path) -> None:
    theirs = random_model("Llama").to(dtype)
    folder = saved(theirs, tmp_path / "hf", **({} if shards is None else {"max_shard_size": shards}))
    assert (folder / "model.safetensors.index.json").is_file() == (shards is not None)
    model = imported(folder, tmp_path / "run")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    again = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(model(tokens()).logits, their_logits(again, tokens()), rtol=0, atol=1e-4)


def test_a_shorter_context_and_keys_of_ones_own(tmp_path: Path) -> None:
    theirs = random_model("Qwen2")
    folder = saved(theirs, tmp_path / "hf")
    model = imported(folder, tmp_path / "run", context=16, own_keys=True)
    assert model.plan.context == 16
    assert model.plan.kv_heads == model.plan.heads == (4, 4, 4)
    expected = their_logits(theirs, tokens(length=16))
    torch.testing.assert_close(model(tokens(length=16)).logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(InputError, match=f"context = {CONTEXT + 1}"):
        import_model(folder, tmp_path / "other", context=CONTEXT + 1)
    assert not (tmp_path / "other").exists()


def test_the_run_says_what_it_is(tmp_path: Path) -> None:
    folder = saved(random_model("Qwen3", head_dim=16, rope_parameters=LLAMA3), tmp_path / "hf")
    run = import_model(folder, tmp_path / "run")
    assert run.plan.rotary == Rotary(5000.0, 8.0, (1.0, 4.0), 16)
    assert run.newest_plan == run.plan == Plan.from_json(run.plan.to_json())
    text = run.plan.table()
    for words in ("with gains", "an output of its own", "norm epsilon 1e-06", "rotary base 5,000 slowed down by 8"):
        assert words in text
    assert not run.damages()
    with pytest.raises(InputError, match=r"imported and has no data.*model\.start_from"):
        resume(run.path)
    with pytest.raises(InputError, match="already holds something"):
        import_model(folder, run.path)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("Llama"), tmp_path_factory.mktemp("llama"))


def changed(
    source: Path,
    out: Path,
    config: Mapping[str, Any] = {},
    tensors: Mapping[str, Tensor | None] = {},
) -> Path:
    """A copy of a folder with other settings, and other weights; None takes one away."""
    out.mkdir()
    content = json.loads((source / "config.json").read_text()) | dict(config)
    (out / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))
    (out / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    weights = {**load_file(source / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"model_type": "gemma2"}, "model_type", "must be one of llama, mistral, qwen2, qwen3, olmo"),
        ({"model_type": "mixtral"}, "model_type", "experts"),
        ({"model_type": "gone"}, "model_type", "must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act", "must be silu"),
        ({"attention_bias": True}, "attention_bias", "a bias of the attention's output"),
        ({"mlp_bias": True}, "mlp_bias", "biases in the feed-forward"),
        ({"clip_qkv": 8.0}, "clip_qkv", "clipped"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "quantised"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window", "shorter than the context, 48"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "sliding_window",
            "shorter than the context",
        ),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types", "must be full_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "default, linear or llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type", "default, linear or llama3"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor", "must be a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "must be 1"),
        ({"rope_parameters": [1]}, "rope_parameters", "must be an object"),
        ({"hidden_size": "gone"}, "hidden_size", "is missing"),
        ({"hidden_size": "32"}, "hidden_size", "must be an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "must be at most"),
        ({"num_attention_heads": 5, "head_dim": None}, "num_attention_heads", "must divide hidden_size"),
        ({"num_key_value_heads": 3}, "kv_heads", "must be one of"),
        ({"model_type": "qwen3", "head_dim": "gone"}, "head_dim", "is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "must be true or false"),
        ({"tie_word_embeddings": True}, "lm_head.weight", "is not the embedding"),
        ({"vocab_size": 300}, "model.embed_tokens.weight", r"must be of shape \(300, 32\)"),
        ({"vocab_size": 200}, "tokenizer", "more than the 200 of the model"),
        ({"num_hidden_layers": 4}, "model.layers.3.self_attn.q_proj.weight", "is missing"),
        ({"num_hidden_layers": 2}, "weights", "no place for"),
        ({"model_type": "qwen2"}, "model.layers.0.self_attn.q_proj.bias", "is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    config: dict[str, Any], field: str, words: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        import_model(changed(llama, tmp_path / "hf", config), tmp_path / "run")
    assert caught.value.field == field
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tensors", "field", "words"),
    [
        ({"model.norm.weight": None}, "model.norm.weight", "is missing"),
        ({"model.norm.weight": torch.ones(31)}, "model.norm.weight", r"must be of shape \(32,\)"),
        ({"model.norm.bias": torch.ones(32)}, "weights", r"model\.norm\.bias"),
        ({"model.norm.weight": torch.full((32,), math.nan)}, "norm.weight", "must be finite"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight", "float32, float16 or bfloat16"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tensors: dict[str, Tensor | None], field: str, words: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        import_model(changed(llama, tmp_path / "hf", tensors=tensors), tmp_path / "run")
    assert caught.value.field == field
    assert not (tmp_path / "run").exists()


def test_tables_of_old_checkpoints_are_no_weights(llama: Path, tmp_path: Path) -> None:
    old = {
        "rope_parameters": "gone", "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    run = import_model(changed(llama, tmp_path / "hf", old, table), tmp_path / "run")
    assert run.plan.rotary == Rotary(500.0, 2.0)


def test_pickled_weights_are_never_loaded(llama: Path, tmp_path: Path) -> None:
    folder = changed(llama, tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pytorch_model\.bin, which is pickled"):
        import_model(folder, tmp_path / "run")
    for file in ("../elsewhere.safetensors", "gone.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
        with pytest.raises(RunError, match="is not there"):
            import_model(folder, tmp_path / "run")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(RunError, match=r"model\.safetensors: cannot be read"):
        import_model(folder, tmp_path / "run")
    (folder / "config.json").unlink()
    with pytest.raises(RunError, match=r"config\.json"):
        import_model(folder, tmp_path / "run")


def test_the_command_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["meristem", *map(str, words)])
        with pytest.raises(SystemExit) as leaving:
            main()
        return int(leaving.value.code or 0), *capsys.readouterr()

    code, out, _ = command("import", llama, "--out", tmp_path / "run", "--context", "24", "--own-keys")
    assert code == 0
    assert "context 24" in out
    assert out.splitlines()[-1] == f"imported: {tmp_path / 'run'}"
    code, out, _ = command("generate", tmp_path / "run", "--prompt", "abc", "--tokens", "4", "--device", "cpu")
    assert code == 0
    assert out.startswith("abc")
    code, out, _ = command("plan", "--plan", tmp_path / "run", "--against", "uniform")
    assert code == 0
    assert "neutral: parameters, FLOPs and KV cache are exactly equal" in out
    windowed = changed(llama, tmp_path / "windowed", {"model_type": "mistral", "sliding_window": 16})
    code, _, error = command("import", windowed, "--out", tmp_path / "other")
    assert code == 2
    assert "sliding_window = 16" in error
    assert "(--context 16)" in error
