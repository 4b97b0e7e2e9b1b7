"""The lists of runs of this study: `python lists.py tune small`, `python lists.py final small deeper=5e-3 ...`.

What the arms are, and what is asked of them, stands in `prereg.md`.
"""

from __future__ import annotations

import sys

FIRST = {"small": ("9.52e11", 1), "middle": ("3.97e12", 2), "768": ("3.4e15", 2)}  # FLOPs, blocks
SECOND = {"small": ("3.97e12", 2), "middle": ("1.59e13", 3), "768": ("1.35e16", 3)}  # FLOPs, the best depth for them
ONCE = {"small": "4.922e12", "middle": "1.987e13", "768": "1.69e16"}  # FLOPs of both
COPIES = {  # blocks at the end, when they are copied (updates or a part of the run), in which order
    "small": ("deeper:2:1:stack", "deeper:2:0.1:stack"),
    "middle": ("deeper:4:1:stack", "deeper:3:1:stack"),
    "768": ("deeper:4:1:stack", "deeper:3:1:stack"),
}
RATES = {"small": ("2.5e-3", "5e-3", "1e-2"), "middle": ("2.5e-3", "5e-3", "1e-2"), "768": ("2.8e-3", "4e-3", "5.7e-3")}
FIRST_RATE = {"small": "5e-3", "middle": "5e-3", "768": "4e-3"}
WIDTH = {"small": "--model.width 128", "middle": "--model.width 128", "768": "--model.width 768"}


def seeds(seed: int, data: int) -> str:
    return f"--train.seed {seed} --data.seed {data}"


def first(size: str, seed: int) -> str:
    flops, blocks = FIRST[size]
    rest = f"--train.flops {flops} --optimizer.lr {FIRST_RATE[size]} {seeds(seed, seed)}"
    return f"first-{size}-{seed} --model.layers {blocks} {WIDTH[size]} {rest}"


def second(size: str, arm: str, seed: int, rate: str) -> str:
    """A run with the second budget, or a part of it (rate@part); its data come in another order than before."""
    flops, best = SECOND[size]
    rate, _, part = rate.partition("@")
    source = f"--model.start_from FIRST/first-{size}-{seed}"
    kind, _, option = arm.partition(":")  # such as deeper:4:1:stack, blocks, when and which order
    if kind == "deeper":
        blocks, at, order = option.split(":")
        begin = f"--growth.stack.start_layers {FIRST[size][1]}"
        grows = f"--growth.policies stack {begin} --growth.stack.layers {blocks} --growth.stack.at {at}"
        shape = f"{source} {grows} --growth.stack.order {order}"
    elif kind == "same":
        shape = source
    else:
        shape = f"--model.layers {option or best} {WIDTH[size]}"
        flops = ONCE[size] if kind == "once" else flops
    if part:
        flops = f"{float(flops) * float(part):.4g}"
    name = f"{arm.replace(':', '-')}-{size}-{rate}{part and '-part-' + part}-{seed}"
    return f"{name} {shape} --train.flops {flops} --optimizer.lr {rate} {seeds(seed, seed + 1000)}"


def main() -> None:
    stage, size, *chosen = sys.argv[1:]
    if stage == "tune":
        print(first(size, 100))
        for arm in (*COPIES[size], "same", "fresh"):
            for rate in RATES[size]:
                print(second(size, arm, 100, rate))
        return
    rates = [entry.split("=") for entry in chosen if "=" in entry]
    numbers = range(int(next(entry for entry in chosen if "=" not in entry)))
    for seed in numbers:
        print(first(size, seed))
    for seed in numbers:
        for arm, rate in rates:
            print(second(size, arm, seed, rate))


if __name__ == "__main__":
    main()
