"""The verb `bench`: speed and memory, ours beside others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meristem.arguments import integers
from meristem.errors import InputError

bench_app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True, rich_markup_mode=None)


@bench_app.command("step")
def bench_step(
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 12,
    width: Annotated[int, typer.Option(help="Width.")] = 768,
    heads: Annotated[int, typer.Option(help="Base head count.")] = 12,
    schedules: Annotated[str, typer.Option(help="Schedules to measure, separated by commas.")] = "uniform,prism",
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 50304,
    context: Annotated[int, typer.Option(help="Context length.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 32,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 30,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 5,
    rounds: Annotated[int, typer.Option(help="Times every arm is measured, in turn.")] = 1,
    attention: Annotated[str, typer.Option(help="auto, cudnn, flash, efficient, math; or several.")] = "auto",
    nanogpt: Annotated[Path | None, typer.Option(help="A checkout of karpathy/nanoGPT to measure beside.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    compile: Annotated[bool | None, typer.Option(help="torch.compile; on a GPU if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """Time of a whole training step (forward, backward, update), schedule by schedule, in one run."""
    from meristem.bench.step import compare_steps, results_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    place = choose_device(device)
    shape: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "vocabulary": vocabulary,
        "context": context,
    }
    plans = {name: Plan.scheduled(name, **shape) for name in schedules.split(",")}
    report = compare_steps(
        plans, place, attention=attention.split(","), nanogpt=nanogpt, batch=batch, steps=steps, warmup=warmup,
        rounds=rounds, compile=place.type == "cuda" if compile is None else compile,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(results_text(report))
    _write_json(report, out)


@bench_app.command("growth")
def bench_growth(
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 12,
    width: Annotated[int, typer.Option(help="Width.")] = 768,
    heads: Annotated[int, typer.Option(help="Heads of every layer.")] = 12,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 50304,
    context: Annotated[int, typer.Option(help="Context length.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 32,
    grown: Annotated[str, typer.Option(help="With sgt: layers with loops.")] = "10,7,4",
    looped: Annotated[str, typer.Option(help="With sgt: looped heads of each.")] = "3,7",
    passes: Annotated[int, typer.Option(help="With sgt: most extra passes of a layer.")] = 3,
    policy: Annotated[str, typer.Option(help="sgt: loops; or incrt: heads, from one to all in every layer.")] = "sgt",
    classes: Annotated[int | None, typer.Option(help="With incrt: a classifier of so many classes.")] = None,
    feed_every: Annotated[int, typer.Option(help="With incrt: steps between two looks at the demand.")] = 25,
    steps: Annotated[int, typer.Option(help="Timed steps of an arm in a round.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds over all arms.")] = 6,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    compile: Annotated[bool | None, typer.Option(help="torch.compile; on a GPU if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """What growth costs: step time with loops, pauses at births, what is measured; in one run."""
    from meristem.bench.heads_cost import compare_heads, heads_text
    from meristem.bench.loops_cost import compare_growth, growth_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    if policy not in ("sgt", "incrt"):
        raise InputError("policy", policy, "must be sgt or incrt")
    place = choose_device(device)
    plan = Plan.uniform(
        layers=layers, width=width, heads=heads, vocabulary=vocabulary, context=context, classes=classes
    )
    common: dict[str, Any] = {
        "batch": batch, "steps": steps, "rounds": rounds,
        "compile": place.type == "cuda" if compile is None else compile,
        "say": lambda text: print(text, file=sys.stderr, flush=True),
    }  # fmt: skip
    if policy == "incrt":
        report = compare_heads(plan, place, feed_every=feed_every, **common)
        print(heads_text(report))
    else:
        where, which = integers("grown", grown), integers("looped", looped)
        report = compare_growth(plan, place, layers=tuple(where), heads=tuple(which), passes=passes, **common)
        print(growth_text(report))
    _write_json(report, out)


@bench_app.command("save")
def bench_save(
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 12,
    width: Annotated[int, typer.Option(help="Width.")] = 768,
    heads: Annotated[int, typer.Option(help="Heads of every layer.")] = 12,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 50304,
    context: Annotated[int, typer.Option(help="Context length.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 32,
    rounds: Annotated[int, typer.Option(help="Saves of each kind.")] = 4,
    folder: Annotated[Path, typer.Option(help="Folder for the checkpoints, which are removed.")] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    compile: Annotated[bool | None, typer.Option(help="torch.compile; on a GPU if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """How long a save holds up training, in the way of the updates and beside them; in one run."""
    from meristem.bench.save import compare_saves, saves_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    place = choose_device(device)
    plan = Plan.uniform(layers=layers, width=width, heads=heads, vocabulary=vocabulary, context=context)
    report = compare_saves(
        plan, place, batch=batch, rounds=rounds, folder=folder,
        compile=place.type == "cuda" if compile is None else compile,
    )  # fmt: skip
    print(saves_text(report))
    _write_json(report, out)


@bench_app.command("start")
def bench_start(rounds: Annotated[int, typer.Option(min=1, help="Starts to measure.")] = 10) -> None:
    """How long `meristem --help` takes, from the start of Python to its end."""
    from meristem.bench.start import help_seconds, start_text

    print(start_text(help_seconds(rounds)))


def _write_json(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
