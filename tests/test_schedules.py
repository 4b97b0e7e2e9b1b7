"""Schedules against the published ones and against vectors worked out by hand (prism.md 2.1, 2.4, 2.5)."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meristem.errors import InputError
from meristem.schedules import (
    CURVES,
    PREFERRED_DIMS,
    SCHEDULES,
    check_prism,
    check_rising,
    default_ramp,
    divisors,
    head_schedule,
    ladder,
    short_phases,
)

EXTENDED_DIMS = (256, 192, 128, 96, 64, 32)

SMALL = (3, 3, 6, 6, 8, 8, *[12] * 6)
MEDIUM = (*[4] * 3, *[8] * 3, *[16] * 18)
LARGE = (*[6] * 3, *[12] * 3, *[16] * 18)

P, F = PREFERRED_DIMS, EXTENDED_DIMS
GOLDEN: list[tuple[int, int, int, str, tuple[int, ...], tuple[int, ...]]] = [
    (768, 12, 12, "prism", P, SMALL),
    (1024, 24, 16, "prism", P, MEDIUM),
    (1536, 24, 16, "prism", P, LARGE),
    (768, 12, 12, "linear", P, (3, 6, 6, 8, 8, 12, *[12] * 6)),
    (768, 12, 12, "linear", F, (3, 4, 6, 8, 8, 12, *[12] * 6)),
    (768, 12, 12, "geometric", P, SMALL),
    (768, 12, 12, "geometric", F, (3, 4, 4, 6, 8, 8, *[12] * 6)),
    (768, 12, 12, "cosine", P, (3, 3, 6, 8, 8, 12, *[12] * 6)),
    (768, 12, 12, "cosine", F, (3, 4, 6, 8, 8, 12, *[12] * 6)),
    (1024, 24, 16, "linear", P, (4, 8, 8, 8, *[16] * 20)),
    (1024, 24, 16, "geometric", P, (4, 4, 8, 8, 8, *[16] * 19)),
    (1024, 24, 16, "cosine", P, (4, 4, 8, 8, *[16] * 20)),
    (1536, 24, 16, "linear", P, (6, 6, 12, 12, 12, *[16] * 19)),
    (1536, 24, 16, "geometric", P, LARGE),
    (1536, 24, 16, "cosine", P, (6, 6, 12, 12, 12, *[16] * 19)),
    (512, 8, 8, "prism", P, (2, 2, 4, 4, 8, 8, 8, 8)),
    (384, 6, 6, "prism", P, (3, 3, 4, 6, 6, 6)),
    (256, 6, 4, "prism", P, (1, 1, 2, 4, 4, 4)),
    (256, 8, 8, "prism", F, (1, 1, 2, 4, 8, 8, 8, 8)),
    (2048, 32, 16, "prism", P, (*[8] * 8, *[16] * 24)),
    (4096, 32, 64, "prism", P, (*[16] * 4, *[32] * 4, *[64] * 24)),
]


@pytest.mark.parametrize(("width", "layers", "heads", "family", "dims", "expected"), GOLDEN)
def test_oracle_3_golden_vectors(
    width: int, layers: int, heads: int, family: str, dims: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = head_schedule(family, layers=layers, width=width, heads=heads, dims=dims)
    assert found == expected
    assert all(h * (width // h) == width for h in found)
    check_prism(found, width)


@pytest.mark.parametrize(("schedule", "total"), [(SMALL, 106), (MEDIUM, 324), (LARGE, 342)])
def test_total_heads_are_the_published_ones(schedule: tuple[int, ...], total: int) -> None:
    assert sum(schedule) == total


@pytest.mark.parametrize(
    ("schedule", "short"),
    [(SMALL, []), ((3, 3, 4, 6, 6, 6), [(4, 1)]), ((1, 1, 2, 4, 8, 8, 8, 8), [(2, 1), (4, 1)])],
)
def test_short_phases(schedule: tuple[int, ...], short: list[tuple[int, int]]) -> None:
    assert short_phases(schedule) == short


@pytest.mark.parametrize(("layers", "ramp"), [(1, 0), (6, 3), (8, 4), (12, 6), (24, 6), (32, 8)])
def test_default_ramp(layers: int, ramp: int) -> None:
    assert default_ramp(layers) == ramp


def test_ramp_sets_the_number_of_layers_before_the_base() -> None:
    assert head_schedule("prism", layers=12, width=768, heads=12, ramp=3) == (3, 6, 8, *[12] * 9)
    assert head_schedule("prism", layers=12, width=768, heads=12, ramp=0) == (12,) * 12


# --- controls ---------------------------------------------------------------------------------------------


def small(name: str, seed: int = 0) -> tuple[int, ...]:
    return head_schedule(name, layers=12, width=768, heads=12, seed=seed)


def test_uniform_control() -> None:
    assert small("uniform") == (12,) * 12
    assert head_schedule("uniform", layers=4, width=768, heads=2) == (2,) * 4  # a wide base needs no ladder


def test_reverse_control() -> None:
    assert small("reverse") == (*[12] * 6, 8, 8, 6, 6, 3, 3)


def test_bump_control() -> None:
    assert small("bump") == (12, 12, 12, 3, 3, 6, 6, 8, 8, 12, 12, 12)


def test_shuffle_control_is_three_fixed_permutations() -> None:
    shuffles = [small("shuffle", seed) for seed in range(3)]
    assert len({SMALL, *shuffles}) == 4
    assert all(Counter(found) == Counter(SMALL) for found in shuffles)
    assert shuffles == [small("shuffle", seed) for seed in range(3)]
    # Written down once: runs of different machines must train the same control.
    assert shuffles[0] == (6, 8, 12, 3, 12, 12, 6, 12, 3, 8, 12, 12)


# --- properties -------------------------------------------------------------------------------------------

shapes = st.tuples(
    st.integers(1, 48), st.integers(1, 128).map(lambda n: 32 * n), st.sampled_from([16, 32, 48, 64, 96, 128])
)


@given(name=st.sampled_from(SCHEDULES), shape=shapes, extended=st.booleans(), seed=st.integers(0, 9))
def test_schedules_keep_their_rules(name: str, shape: tuple[int, int, int], extended: bool, seed: int) -> None:
    layers, width, dim = shape
    assume(width % dim == 0)
    heads, dims = width // dim, EXTENDED_DIMS if extended else PREFERRED_DIMS
    assume(len(ladder(width, heads, dims)) > 1)
    found = head_schedule(name, layers=layers, width=width, heads=heads, dims=dims, seed=seed)
    assert len(found) == layers
    assert all(width % h == 0 for h in found)
    assert {width // h for h in found} <= {*dims, dim}
    assert 2 * sum(h == heads for h in found) >= layers
    if name in ("prism", *CURVES):
        assert all(a <= b for a, b in pairwise(found))
        assert found[-1] == heads
        assert layers == 1 or width // found[0] == max(d for d in dims if width % d == 0)
        check_prism(found, width)
    elif name != "uniform":
        prism = head_schedule("prism", layers=layers, width=width, heads=heads, dims=dims)
        assert Counter(found) == Counter(prism)


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "width", "words"),
    [
        ((5, 12), 768, ["heads[0]", "5", "768", "1, 2, 3, 4, 6, 8, 12"]),
        ((6, 3, 12, 12, 12, 12), 768, ["heads[1]", "3", "at least 6"]),
        ((2, 12), 768, ["heads[0]", "384", "256"]),
        ((2, 2), 90, ["heads[0]", "45", "even"]),
        ((3, 6, 12), 768, ["1 of 3 layers"]),
        ((), 768, ["layers", "at least 1"]),
    ],
    ids=["non-divisor", "falls", "too wide", "odd", "too few base layers", "empty"],
)
def test_oracle_3_invalid_schedules_are_refused(schedule: tuple[int, ...], width: int, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_prism(schedule, width)
    assert all(word in str(caught.value) for word in words), caught.value


def test_base_layers_are_counted_in_strict_mode_only() -> None:
    check_prism((3, 6, 12), 768, strict=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "prisma"}, ["schedule", "'prisma'", *SCHEDULES]),
        ({"layers": 0}, ["layers", "0", "at least 1"]),
        ({"width": 1}, ["width", "1", "at least 2"]),
        ({"heads": 5}, ["heads", "5", "768", "[1, 2, 3, 4, 6, 8, 12,"]),
        ({"heads": 256}, ["heads", "256", "even"]),
        ({"heads": 3}, ["heads", "3", "256", "no wider head"]),
        ({"ramp": 7}, ["ramp", "7", "0..6"]),
        ({"dims": (512,)}, ["dims", "512", "256"]),
        ({"dims": (100,)}, ["dims", "100", "multiples of 8"]),
        ({"dims": ("64",)}, ["dims", "'64'", "multiples of 8"]),
        ({"layers": 10**6}, ["layers", "1000000", "at most 16,384"]),
        ({"layers": True}, ["layers", "True", "an integer"]),
        ({"width": 600_000_000_000_000_000}, ["width", "at most 1,048,576"]),
        ({"width": 2**19, "heads": 3}, ["heads", "3", "524288", "one of [1, 2, 4"]),
        ({"heads": 10**400}, ["heads", "1000", "at most"]),
        ({"heads": "12"}, ["heads", "'12'", "an integer"]),
        ({"ramp": 10**400}, ["ramp", "1000"]),
        ({"name": "shuffle", "seed": 10**5000}, ["seed", "bits"]),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(change: dict[str, object], words: list[str]) -> None:
    arguments: dict[str, object] = {"name": "prism", "layers": 12, "width": 768, "heads": 12, **change}
    with pytest.raises(InputError) as caught:
        head_schedule(**arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_divisors_are_found_quickly() -> None:
    for n in range(1, 300):
        assert divisors(n) == [x for x in range(1, n + 1) if n % x == 0]
    prime = 2**31 - 1
    assert divisors(prime) == [1, prime]
    assert len(divisors(963_761_198_400)) == 6720  # as many as below 10**12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_deepest_schedules_can_be_made(schedule: str) -> None:
    assert len(head_schedule(schedule, layers=2**14, width=768, heads=12)) == 2**14


def test_messages_are_short() -> None:
    for change in ({"width": 720720, "heads": 17}, {"heads": 3, "dims": (256, 128, 64) * 1000}):
        arguments: dict[str, object] = {"layers": 12, "width": 768, "heads": 12, **change}
        with pytest.raises(InputError) as caught:
            head_schedule("prism", **arguments)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 400
    with pytest.raises(InputError) as caught:
        check_rising((10**5000, 1))
    assert len(str(caught.value)) < 200
