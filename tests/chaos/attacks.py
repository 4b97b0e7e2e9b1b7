"""All kinds of attack, and how often each is tried."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from .bombs import BOMBS, explode
from .damages import damage_data, damage_run
from .full_disk import fill_disk
from .fuzz import fuzz
from .kills import kill_preparation, kill_training
from .races import race
from .signals import send_signal
from .verdicts import BAD, Case, Result, Row
from .world import World

Attempt = Callable[[World, int, random.Random], Result]


class Attack(NamedTuple):
    """One attempt of a kind of attack, and how many there are of it in a short, a usual and a full run."""

    attempt: Attempt
    short: int
    usual: int
    full: int


ATTACKS = {
    "kills": Attack(kill_training, 14, 90, 1000),
    "kills-in-preparation": Attack(kill_preparation, 4, 40, 200),
    "damages-of-runs": Attack(damage_run, 8, 150, 1000),
    "damages-of-data": Attack(damage_data, 6, 60, 300),
    "full-disk": Attack(fill_disk, 6, 60, 300),
    "fuzz": Attack(fuzz, 40, 800, 5000),
    "races": Attack(race, 6, 36, 180),
    "bombs": Attack(explode, 8, len(BOMBS), len(BOMBS)),
    "signals": Attack(send_signal, 8, 24, 72),
}


def attacked(name: str, world: World, seed: int, count: int, only: int | None) -> Row:
    """All attempts of a kind, each with random numbers of its own so that it can be made again alone."""
    row, started = Row(name), time.monotonic()
    told = started
    number = 0 if only is None else only
    while row.tried < count and (only is None or number == only):
        result = ATTACKS[name].attempt(world, number, random.Random(f"{name} {seed} {number}"))
        row.counts[result.verdict] += result.weight
        if result.verdict in BAD:
            row.cases.append(Case(name, seed, number, result.verdict, result.what, result.seen))
            print(f"{name} {number}: {result.verdict.value}: {result.what}", flush=True)
        if only is not None:
            print(f"{result.verdict.value}: {result.what}\n{result.seen}")
        number += 1
        if time.monotonic() > told + 10:
            told = time.monotonic()
            print(f"{name}: {row.tried:,} of {count:,}, {len(row.cases)} bad", flush=True)
    row.seconds = time.monotonic() - started
    return row
