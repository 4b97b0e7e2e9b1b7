"""Keys of before policies had tables: what they stand for today, and that none of them is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from meristem.config import Config, build_config, override
from meristem.errors import InputError


def built(**values: Any) -> Config:
    return build_config({key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.parametrize(
    ("values", "policies", "tables"),
    [
        ({"growth__policy": "sgt", "growth__passes": 2}, ("sgt",), {"sgt": {"passes": 2}}),
        (
            {"growth__policy": "sgt", "growth__unit": "block", "growth__layers": [1], "growth__passes": 3},
            ("block_loop",),
            {"block_loop": {"layers": (1,), "times": 3}},
        ),
        (
            {"growth__policy": "sgt", "growth__layers": [1], "growth__heads": "all", "growth__start": 0.05},
            ("static_loops",),
            {"static_loops": {"layers": (1,), "heads": "all"}},  # what is as ever goes without saying
        ),
        (
            {"growth__policy": "sgt", "growth__layers": [1], "growth__heads": "all", "growth__start": 7},
            ("static_loops",),
            {"static_loops": {"layers": (1,), "heads": "all"}, "sgt": {"start": 7.0}},  # of no use, and kept to say so
        ),
        (
            {"growth__policy": "none", "growth__observe": True, "growth__rows": 4},
            ("observe",),
            {"observe": {"rows": 4}},
        ),
        (
            {"growth__policy": "sgt", "growth__observe": True, "growth__rows": 4},
            ("observe", "sgt"),
            {"observe": {"rows": 4}, "sgt": {"rows": 4}},
        ),
        ({"growth__policy": "none", "growth__window": 9}, (), {"sgt": {"window": 9.0}}),
        (
            {"growth__policy": "incrt", "incrt__cool_down": 30, "incrt__births": 0, "incrt__grace": 0},
            ("incrt", "prune"),
            {"incrt": {"cool_down": 30}, "prune": {"cool_down": 30}},
        ),
        (
            {"growth__policy": "incrt", "incrt__cool_down": 30, "incrt__prune": False, "incrt__redundant": 0.1},
            ("incrt",),
            {"incrt": {"cool_down": 30}, "prune": {"redundant": 0.1}},
        ),
        (
            {"growth__policy": "incrt", "incrt__criterion": "random", "incrt__births": 2, "incrt__hits": 3},
            ("random_births",),
            {"random_births": {"births": 2}, "incrt": {"hits": 3}},
        ),
        (
            {"growth__policy": "incrt", "incrt__criterion": "published", "incrt__numerics": "repaired"},
            ("published",),
            {"published": {"numerics": "repaired"}},
        ),
    ],
)
def test_what_former_keys_stand_for(
    values: dict[str, Any], policies: tuple[str, ...], tables: dict[str, dict[str, Any]]
) -> None:
    growth = built(**values).growth
    assert growth.policies == policies
    assert {name: dict(table) for name, table in growth.tables.items()} == tables


def test_former_keys_as_overrides_leave_other_policies_alone() -> None:
    config = built(growth__policies=["incrt", "sgt"])
    assert override(config, ["--growth.observe", "true"]).growth.policies == ("observe", "incrt", "sgt")
    observed = override(config, ["--growth.observe", "true", "--growth.observe_every", "3"])
    assert observed["growth.observe.every"] == 3
    assert override(observed, ["--growth.observe", "false"]).growth.policies == ("incrt", "sgt")
    assert override(observed, ["--growth.policy", "sgt"]).growth.policies == ("observe", "sgt")
    assert override(config, ["--growth.passes", "2"])["growth.sgt.passes"] == 2
    assert override(config, ["--growth.passes", "2"]).growth.policies == ("incrt", "sgt")


@pytest.mark.parametrize(
    ("key", "value"), [("growth.unit", "block"), ("incrt.criterion", "random"), ("incrt.prune", "false")]
)
def test_a_former_word_for_a_policy_is_not_passed_over(key: str, value: str) -> None:
    config = built(growth__policies=["incrt", "prune"])
    with pytest.raises(InputError, match=rf"{key} = .*: chooses a policy: name it in growth\.policies instead"):
        override(config, [f"--{key}", value])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"growth__policy": "tgs"}, r"growth\.policy = 'tgs': must be one of none, sgt, incrt"),
        ({"growth__unit": "layer"}, r"growth\.unit = 'layer': must be one of head, block"),
        ({"incrt__criterion": "energy"}, r"incrt\.criterion = 'energy': must be one of demand, published, random"),
        ({"growth__policy": "none", "growth__beta": 1.0}, r"growth\.sgt\.beta = 1\.0: must be from 0 to below 1"),
        ({"growth__policy": "sgt", "incrt__share": 0.0}, r"growth\.incrt\.share = 0\.0: must be above 0"),
        ({"growth__policy": "sgt", "incrt__seed": -1}, r"growth\.incrt\.seed = -1: must be at least 0"),
    ],
)
def test_a_bad_value_is_refused_though_nothing_uses_it(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        built(**values)
