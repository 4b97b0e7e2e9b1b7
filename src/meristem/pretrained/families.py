"""Which models of Hugging Face's library a plan can describe, and the plan of each; the rest is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from meristem.errors import InputError, Remedy
from meristem.limits import (
    MOST_CONTEXT,
    MOST_FEED_FORWARD,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_TOKEN_IDS,
    MOST_WIDTH,
    check_integer,
)
from meristem.plan import LayerPlan, Plan, Rotary

Config = Mapping[str, Any]  # the content of a config.json


class Family(NamedTuple):
    """What the models of a `model_type` have that others do not."""

    biases: bool = False  # of queries, keys and values
    head_gains: bool = False  # norms of queries and keys, with gains
    centred: bool = False  # norms subtract the mean, and have no gains
    windows: bool = False  # a `sliding_window` counts even where `use_sliding_window` is not set
    needs: tuple[str, ...] = ()  # what has a default of its own there that is not ours


FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows=True, needs=("num_key_value_heads",)),
    "qwen2": Family(biases=True, needs=("num_key_value_heads",)),
    "qwen3": Family(head_gains=True, needs=("num_key_value_heads", "head_dim")),
    "olmo": Family(centred=True),
}
OLMO_EPS = 1e-5  # is not in its config.json
# What a plan has no word for, each with the value of a model that goes without it, and what it would be.
ABSENT = {
    "quantization_config": (None, "quantised weights, which cannot be trained on"),
    "attention_bias": (False, "a bias of the attention's output as well"),
    "mlp_bias": (False, "biases in the feed-forward"),
    "clip_qkv": (None, "queries, keys and values that are clipped"),
    "partial_rotary_factor": (1.0, "heads that are rotated in part only"),
}


def family_of(config: Config) -> Family:
    """The family of a model; one that a plan cannot describe is refused with the reason."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        expected = f"must be one of {', '.join(FAMILIES)}: others have parts, such as experts, other norms or other "
        raise InputError("model_type", kind, expected + "activations, that a plan does not describe")
    for name, (usual, what) in ABSENT.items():
        if config.get(name) not in (None, usual):
            raise InputError(name, config[name], f"means {what}, which a plan does not describe")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError("hidden_act", config["hidden_act"], "must be silu, as the feed-forward of a plan is SwiGLU")
    return FAMILIES[kind]


def plan_of(config: Config, context: int | None = None) -> Plan:
    """The plan of a model, with all its context or a shorter one."""
    family = family_of(config)
    width = _size(config, "hidden_size", MOST_WIDTH)
    heads = _size(config, "num_attention_heads", MOST_HEADS)
    for name in family.needs:
        if config.get(name) is None:
            raise InputError(name, None, f"is missing in config.json, and {config['model_type']} needs it")
    kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads", MOST_HEADS)
    if config.get("head_dim") is not None:
        head_dim = _size(config, "head_dim", MOST_WIDTH)
    elif width % heads:
        raise InputError("num_attention_heads", heads, f"must divide hidden_size, {width}, if there is no head_dim")
    else:
        head_dim = width // heads
    longest = _size(config, "max_position_embeddings", MOST_CONTEXT)
    if context is not None:
        check_integer("context", context, 1, longest)
    _check_window(config, family, longest if context is None else context)
    tied = config.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise InputError("tie_word_embeddings", tied, "must be true or false")
    return Plan(
        width=width,
        vocabulary=_size(config, "vocab_size", MOST_TOKEN_IDS),
        context=longest if context is None else context,
        feed_forward=_size(config, "intermediate_size", MOST_FEED_FORWARD),
        layers=(LayerPlan(heads, head_dim, kv_heads),) * _size(config, "num_hidden_layers", MOST_LAYERS),
        qk_norm=family.head_gains,
        qk_gain=family.head_gains,
        qkv_bias=family.biases,
        tied=tied,
        norm_eps=OLMO_EPS if family.centred else _number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        rotary=rotary_of(config),
    )


def rotary_of(config: Config) -> Rotary:
    """The rotary positions of a model, as config.json has them today (`rope_parameters`) or had them before."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise InputError("rope_parameters", given, "must be an object")
    base = _number("rope_theta", given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise InputError("partial_rotary_factor", given["partial_rotary_factor"], "must be 1: heads are rotated whole")
    if kind == "default":
        return Rotary(base)
    if kind not in ("linear", "llama3"):
        raise InputError("rope_type", kind, "must be default, linear or llama3; a plan describes no other scaling")
    factor = _number("rope_parameters.factor", given.get("factor"))
    if kind == "linear":
        return Rotary(base, factor)
    low, high = (
        _number(f"rope_parameters.{end}_freq_factor", given.get(f"{end}_freq_factor")) for end in ("low", "high")
    )
    return Rotary(base, factor, (low, high), _size(given, "original_max_position_embeddings", MOST_CONTEXT))


def _check_window(config: Config, family: Family, context: int) -> None:
    """Refuse attention that does not see all of the context."""
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ()
    windowed = family.windows or config.get("use_sliding_window") or "sliding_attention" in kinds
    if windowed and window is not None and window < context:
        expected = f"is shorter than the context, {context}; a context as short as the window can be had"
        raise InputError("sliding_window", window, expected, Remedy((f"context={window}",)))
    if others := set(kinds) - {"full_attention", "sliding_attention"}:
        raise InputError("layer_types", sorted(others), "must be full_attention: a plan describes no other kind")


def _size(config: Config, name: str, most: int) -> int:
    value = config.get(name)
    if value is None:
        raise InputError(name, None, "is missing in config.json")
    check_integer(name, value, 1, most)
    return int(value)


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(name, value, "must be a number in config.json")
    return float(value)
