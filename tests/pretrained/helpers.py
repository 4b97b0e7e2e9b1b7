"""Checkpoints of the Llama family with random weights, as transformers saves them, and what it makes of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meristem.data import ByteTokenizer

transformers = pytest.importorskip("transformers")

VOCABULARY, CONTEXT = 320, 48
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

# By name: the class of transformers, and what its configuration has besides the sizes.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama with groups, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with another head dim": ("Llama", {"head_dim": 12, "rope_parameters": {**PLAIN, "rope_theta": 500.0}}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama with linear scaling": ("Llama", {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral whose window is all": ("Mistral", {"sliding_window": CONTEXT}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with one key, tied": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "olmo, tied": ("Olmo", {"tie_word_embeddings": True}),
}  # fmt: skip


def random_model(family: str, seed: int = 0, **settings: Any) -> Any:
    """A model of transformers whose weights, biases and gains are all random, and far from small."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """The folder of a model, with a tokenizer that reads bytes."""
    model.save_pretrained(folder, **options)
    ByteTokenizer().save(folder)
    return folder


def their_logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits
