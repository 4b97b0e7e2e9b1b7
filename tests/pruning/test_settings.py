"""Budgets: what users write, what it means for a plan, and what cannot be."""

from dataclasses import replace

import pytest

from meristem.errors import InputError
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.pruning.settings import Budget, PruneSettings, Sizes, smallest

PLAN = Plan.uniform(layers=3, width=32, heads=4, vocabulary=64, context=16)


def test_sizes_are_those_of_a_model() -> None:
    for plan in (PLAN, replace(PLAN, qkv_bias=True), Plan.from_heads((2, 4), width=32, vocabulary=64, context=16)):
        model = Decoder(plan)
        matrices = [p for block in model.stack for p in (block.attention.qkv.weight, block.attention.out.weight)]
        biases = [block.attention.bias for block in model.stack if block.attention.bias is not None]
        sizes = Sizes.of(plan)
        assert sizes.attention == sum(p.numel() for p in [*matrices, *biases])
        assert sizes.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("text", "size", "most"),
    [
        ("heads=7", "heads", 7), ("heads=0.5", "heads", 6.0), ("kv=0.75", "kv_bytes", 288.0),
        ("kv=200", "kv_bytes", 200), ("kv=2e2", "kv_bytes", 200), ("parameters=3.5E4", "parameters", 35_000),
        ("heads=.7e+1", "heads", 7),
    ],
)  # fmt: skip
def test_a_point_makes_a_share_of_it(text: str, size: str, most: float) -> None:
    assert Budget.read(text, PLAN) == Budget(size, most)


@pytest.mark.parametrize(
    "text",
    [
        "heads", "heads=", "layers=3", "kv=70%", "kv=1.5", "kv=0.0", "heads=-1", "heads=2", "kv=0.1", "heads=nan",
        "heads=e1", "heads=7e", "kv=7e-1", "kv=1e999", "heads=.",
    ],
)  # fmt: skip
def test_budgets_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        Budget.read(text, PLAN)


def test_a_classifier_has_no_cache_to_save() -> None:
    with pytest.raises(InputError, match="keeps no keys and values"):
        Budget.read("kv=0.7", replace(PLAN, classes=3))


def test_heads_that_share_one_key_cannot_shrink_the_cache() -> None:
    shared = Plan.uniform(layers=3, width=32, heads=4, vocabulary=64, context=16, kv_group=4)
    assert smallest(shared).heads == (2, 2, 2)
    with pytest.raises(InputError, match="share one pair of keys and values"):
        Budget.read("kv=0.7", shared)


def test_keep_is_a_share_of_the_heads_and_at_most_that() -> None:
    target = PruneSettings(keep=0.7).target(PLAN)
    assert target == Budget("heads", 8)
    with pytest.raises(InputError, match="leaves 2 heads, and 3 have to stay"):
        PruneSettings(keep=0.2).target(PLAN)
    assert PruneSettings().target(PLAN) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0.5, "budget": "kv=0.7"}, {"keep": 0.0}, {"keep": 1.1}, {"keep": 10**400}, {"tolerance": -0.1},
        {"tolerance": float("nan")}, {"repair": -1}, {"repair_rate": 0.0}, {"order": "best"}, {"sequences": 1},
        {"repair_rate": 0.4}, {"seed": 1}, {"seed": 1, "order": "norm"}, {"seed": True, "order": "random"},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        PruneSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"keep": "half"}, "float"), ({"budget": 0.7}, "str"), ({"tolerance": "x"}, "float"), ({"repair": 1.5}, "int"),
        ({"repair_rate": None}, "float"), ({"fold": 1}, "bool"), ({"sequences": "16"}, "int"), ({"seed": None}, "int"),
    ],
)  # fmt: skip
def test_a_setting_of_another_type_is_refused_by_its_name(wrong: dict[str, object], kind: str) -> None:
    ((field, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{field} = {value!r}: must be of type {kind}"):
        PruneSettings(**wrong)  # type: ignore[arg-type]


def test_settings_of_a_repair_and_of_the_random_order_are_taken_with_them() -> None:
    settings = PruneSettings(keep=1, repair=5, repair_rate=0.4, order="random", seed=3)
    assert isinstance(settings.keep, float)
    assert settings.without_repair() == PruneSettings(keep=1, order="random", seed=3)
