"""Plans as plain values for JSON, and back: a missing, unknown or mistyped field is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from meristem.errors import InputError
from meristem.limits import (
    MOST_CONTEXT,
    MOST_FEED_FORWARD,
    MOST_LAYERS,
    MOST_TOKEN_IDS,
    MOST_WIDTH,
    check_integer,
)
from meristem.plan.layers import Gates, LayerPlan, Loop, Rotary

if TYPE_CHECKING:
    from meristem.plan.plan import Plan

FORMAT = "meristem-plan/1"
SIZES = {  # of a plan, and their ceilings
    "width": MOST_WIDTH, "vocabulary": MOST_TOKEN_IDS, "context": MOST_CONTEXT, "feed_forward": MOST_FEED_FORWARD,
}  # fmt: skip
VARIANT = frozenset({"qk_norm", "qk_gain", "qkv_bias", "tied", "norm_eps", "rotary"})  # left out where it is as usual


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Plain values for JSON. What a plan without growth, or a language model, does not have is left out."""
    data = {"format": FORMAT, **_with_lists(asdict(plan))}
    if plan.gates is None:
        del data["gates"]
    if plan.classes is None:
        del data["classes"], data["pooling"]
    if not plan.target:
        del data["target"]
    for name in VARIANT - plan.variant.keys():
        del data[name]
    if "rotary" in data:
        data["rotary"] = {name: value for name, value in data["rotary"].items() if value != getattr(Rotary(), name)}
    for layer in (*data["layers"], *data.get("target", ())):
        if not layer["repeats"]:
            del layer["repeats"]
        if layer["ceiling"] is None:
            del layer["ceiling"]
        if layer["loop"] is not None and not layer["loop"]["fading"]:
            del layer["loop"]["fading"]
    return data


def _with_lists(value: Any) -> Any:
    """The value with lists, which JSON has, instead of tuples."""
    if isinstance(value, dict):
        return {name: _with_lists(part) for name, part in value.items()}
    return [_with_lists(part) for part in value] if isinstance(value, tuple) else value


def plan_fields(data: Any) -> dict[str, Any]:
    """The fields of a plan, from what `plan_to_dict` made of it."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError("format", found, f"must be {FORMAT!r}")
    rest = {k: v for k, v in data.items() if k != "format"}
    _check_fields("plan", rest, SIZES, ("layers",), ("gates", "classes", "pooling", "target", *sorted(VARIANT)))
    layers = _layers_from_list("layers", rest["layers"])
    target = _layers_from_list("target", rest["target"]) if "target" in rest else ()
    gates = rest.get("gates")
    if gates is not None:
        if not isinstance(gates, dict):
            raise InputError("gates", gates, "must be an object or null")
        _check_fields("gates", gates, ("passes", "heads"), ("trained",))
        gates = Gates(**gates)
    if "rotary" in rest:
        rest["rotary"] = _rotary_from_dict(rest["rotary"])
    return {**rest, "layers": layers, "gates": gates, "target": target}


def _rotary_from_dict(data: Any) -> Rotary:
    if not isinstance(data, dict):
        raise InputError("rotary", data, "must be an object")
    _check_fields("rotary", data, (), (), [field.name for field in fields(Rotary)])
    band = data.get("band")
    return Rotary(**{**data, "band": tuple(band) if isinstance(band, list) else band})


def _check_fields(
    name: str, data: dict[str, Any], integers: Iterable[str], others: Iterable[str], optional: Iterable[str] = ()
) -> None:
    integers, expected, known = list(integers), [*integers, *others], [*integers, *others, *optional]
    for field in data:
        if field not in known:
            raise InputError(f"{name}.{field}", data[field], f"unknown field; expected {known}")
    for field in expected:
        if field not in data:
            raise InputError(f"{name}.{field}", None, "is missing")
    for field in integers:
        check_integer(f"{name}.{field}", data[field], 1)


def _layers_from_list(name: str, data: Any) -> tuple[LayerPlan, ...]:
    if not isinstance(data, list):
        raise InputError(name, data, "must be a list")
    check_integer(name, len(data), 1, MOST_LAYERS)
    return tuple(_layer_from_dict(f"{name}[{index}]", entry) for index, entry in enumerate(data))


def _layer_from_dict(name: str, data: Any) -> LayerPlan:
    if not isinstance(data, dict):
        raise InputError(name, data, "must be an object")
    _check_fields(name, data, ("heads", "head_dim", "kv_heads"), ("loop",), ("repeats", "ceiling"))
    loop = data["loop"]
    if loop is not None:
        if not isinstance(loop, dict):
            raise InputError(f"{name}.loop", loop, "must be an object or null")
        _check_fields(f"{name}.loop", loop, ("passes",), ("heads",), ("fading",))
        heads, fading = loop["heads"], loop.get("fading", [])
        for field, value in (("heads", heads), ("fading", fading)):
            if not isinstance(value, list) or not all(type(head) is int for head in value):
                raise InputError(f"{name}.loop.{field}", value, "must be a list of integers")
        loop = Loop(tuple(heads), loop["passes"], tuple(fading))
    again, ceiling = data.get("repeats", 0), data.get("ceiling")
    return LayerPlan(data["heads"], data["head_dim"], data["kv_heads"], loop, again, ceiling)
