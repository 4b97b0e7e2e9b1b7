"""The verbs of `bench`: speed and memory, ours beside others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meristem.arguments import integers, positive_numbers
from meristem.choices import BenchPolicy
from meristem.cli.app import examples, group
from meristem.cli.options import Device
from meristem.errors import InputError

bench_app = group("bench", "Measure speed and memory.")

# What the benches have in common.
Layers = Annotated[int, typer.Option(help="Number of layers.")]
Width = Annotated[int, typer.Option(help="Width.")]
Heads = Annotated[int, typer.Option(help="Heads of every layer; for schedules the base count.")]
Vocabulary = Annotated[int, typer.Option(help="Vocabulary size.")]
Context = Annotated[int, typer.Option(help="Context length.")]
Batch = Annotated[int, typer.Option(help="Sequences per step.")]


def _place_of(out: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything is measured."""
    if out is not None:
        if out.is_dir():
            raise InputError("out", str(out), "must be a file, and is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
    return out


Out = Annotated[Path | None, typer.Option(help="Write the results as JSON.", callback=_place_of)]


@bench_app.command(
    "step",
    epilog=examples(
        "meristem bench step --schedules uniform,prism --out step.json",
        "meristem bench step --sizes 124m,354m,757m --nanogpt ../nanoGPT",
    ),
)
def bench_step(
    layers: Layers = 12,
    width: Width = 768,
    heads: Heads = 12,
    schedules: Annotated[str, typer.Option(help="Schedules to measure, separated by commas.")] = "uniform,prism",
    vocabulary: Vocabulary = 50304,
    context: Context = 1024,
    batch: Batch = 32,
    sizes: Annotated[
        str | None, typer.Option(help="124m, 354m, 757m or several: layers, width, heads and batch of the paper's.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 30,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 5,
    rounds: Annotated[int, typer.Option(help="Times every arm is measured, in turn.")] = 1,
    attention: Annotated[str, typer.Option(help="auto, cudnn, flash, efficient, math; or several.")] = "auto",
    nanogpt: Annotated[Path | None, typer.Option(help="A checkout of karpathy/nanoGPT to measure beside.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Also all of `meristem train`, with data and logs.")] = False,
    device: Device = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Our blocks by torch.compile.")] = False,
    out: Out = None,
) -> None:
    """Time of a whole training step (forward, backward, update), schedule by schedule, in one run."""
    from meristem.bench.step import Timing
    from meristem.bench.steps import SIZES, Size, compare_steps, results_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    place = choose_device(device)
    named = {"": Size(layers, width, heads, batch)}
    if sizes is not None:
        if unknown := [name for name in sizes.split(",") if name not in SIZES]:
            raise InputError("sizes", unknown[0], f"must be of {', '.join(SIZES)}")
        if named[""] != SIZES["124m"]:  # which is what is measured if nothing is said
            raise InputError("sizes", sizes, "says layers, width, heads and batch; leave those out")
        named = {name: SIZES[name] for name in sizes.split(",")}
    reports: dict[str, Any] = {}
    for name, size in named.items():
        shape: dict[str, Any] = {"layers": size.layers, "width": size.width, "heads": size.heads}
        reports[name] = compare_steps(
            {s: Plan.scheduled(s, **shape, vocabulary=vocabulary, context=context) for s in schedules.split(",")},
            place, attention=attention.split(","), nanogpt=nanogpt, train=train,
            timing=Timing(size.batch, steps, warmup), rounds=rounds, compile=compile,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
        print(results_text(reports[name]), flush=True)
        _write_json(reports[name] if sizes is None else {"sizes": reports}, out)


@bench_app.command(
    "growth", epilog=examples("meristem bench growth", "meristem bench growth --policy incrt --out heads.json")
)
def bench_growth(
    layers: Layers = 12,
    width: Width = 768,
    heads: Heads = 12,
    vocabulary: Vocabulary = 50304,
    context: Context = 1024,
    batch: Batch = 32,
    grown: Annotated[str, typer.Option(help="With sgt: layers with loops.")] = "10,7,4",
    looped: Annotated[str, typer.Option(help="With sgt: looped heads of each.")] = "3,7",
    passes: Annotated[int, typer.Option(help="With sgt: most extra passes of a layer.")] = 3,
    policy: Annotated[
        BenchPolicy,
        typer.Option(
            help="What grows: loops; heads, from one to all in every layer; or blocks, from half of them to all."
        ),
    ] = "sgt",
    classes: Annotated[int | None, typer.Option(help="With incrt: a classifier of so many classes.")] = None,
    feed_every: Annotated[int, typer.Option(help="With incrt: steps between two looks at the demand.")] = 25,
    steps: Annotated[int, typer.Option(help="Timed steps of an arm in a round.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds over all arms.")] = 6,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """What growth costs: step time with loops, pauses at births, what is measured; in one run."""
    from meristem.bench.heads_cost import compare_heads, heads_text
    from meristem.bench.loops_cost import compare_growth, growth_text
    from meristem.bench.stack_cost import measure_stack, stack_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    place = choose_device(device)
    plan = Plan.uniform(
        layers=layers, width=width, heads=heads, vocabulary=vocabulary, context=context, classes=classes
    )
    common: dict[str, Any] = {
        "batch": batch, "steps": steps, "rounds": rounds,
        "say": lambda text: print(text, file=sys.stderr, flush=True),
    }  # fmt: skip
    if policy == "incrt":
        report = compare_heads(plan, place, feed_every=feed_every, **common)
        print(heads_text(report))
    elif policy == "stack":
        few = {key: common[key] for key in ("batch", "steps")}
        report = measure_stack(plan, place, start_layers=layers // 2, **few)
        print(stack_text(report))
    else:
        where, which = integers("grown", grown), integers("looped", looped)
        report = compare_growth(plan, place, layers=tuple(where), heads=tuple(which), passes=passes, **common)
        print(growth_text(report))
    _write_json(report, out)


@bench_app.command(
    "recipe",
    epilog=examples(
        "meristem bench recipe --data data --nanogpt ../nanoGPT --baseline ../modded-nanogpt",
        "meristem bench recipe --config configs/prism-51m.toml --data data --steps 400",
    ),
)
def bench_recipe(
    data: Annotated[Path, typer.Option(help="A folder made by `meristem data prepare`.")],
    config: Annotated[
        Path | None, typer.Option(help="Model and optimizer of ours; those of configs/prism-124m.toml if not given.")
    ] = None,
    nanogpt: Annotated[Path | None, typer.Option(help="A checkout of karpathy/nanoGPT.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="A checkout of KellerJordan/modded-nanogpt.")] = None,
    steps: Annotated[int, typer.Option(help="Updates of a training.")] = 800,
    batch: Batch = 32,
    factors: Annotated[str, typer.Option(help="What every arm's usual rate is multiplied by, one training each.")] = (
        "0.5,1,2"
    ),
    shares: Annotated[str, typer.Option(help="Shares of the updates that ours is trained for as well.")] = "0.4",
    looks: Annotated[int, typer.Option(help="Times that held-out data is looked at.")] = 16,
    windows: Annotated[int, typer.Option(help="Held-out windows.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the trial of rates; what is compared has the next one.")] = 0,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Loss against seconds of whole trainings: nanoGPT, a public baseline and ours, each at its best rate."""
    from meristem.bench.recipe import Conditions, arms_of, compare_recipes, recipes_text
    from meristem.config import Config, ModelConfig, OptimizerConfig, load_config
    from meristem.data import TokenData, open_data
    from meristem.devices import choose_device
    from meristem.training.tasks import initial_plan

    place, found = choose_device(device), open_data(data)
    if not isinstance(found, TokenData):
        raise InputError("data", str(data), "must be of a language model, not of a classifier")
    model = ModelConfig(layers=12, width=768, heads=12, schedule="prism", context=1024, qk_norm=True)
    recipe = OptimizerConfig(kind="muon", lr=4e-3, curve="wsd", decay=0.7, final=0.0)  # that of configs/prism-124m.toml
    own = Config(model=model, optimizer=recipe) if config is None else load_config(config)
    plan = initial_plan(own, found)
    arms = arms_of(
        plan, own.optimizer, place, nanogpt=nanogpt, baseline=baseline, factors=positive_numbers("factors", factors),
    )  # fmt: skip
    report = compare_recipes(
        arms, plan, Conditions(found, plan.context, place, steps, batch, looks, windows, seed),
        shares=positive_numbers("shares", shares), say=lambda text: print(text, file=sys.stderr, flush=True),
        keep=lambda so_far: _write_json(so_far, out),
    )  # fmt: skip
    print(recipes_text(report))


@bench_app.command("save", epilog=examples("meristem bench save --rounds 8"))
def bench_save(
    layers: Layers = 12,
    width: Width = 768,
    heads: Heads = 12,
    vocabulary: Vocabulary = 50304,
    context: Context = 1024,
    batch: Batch = 32,
    rounds: Annotated[int, typer.Option(help="Saves of each kind.")] = 4,
    folder: Annotated[Path, typer.Option(help="Folder for the checkpoints, which are removed.")] = Path("runs/bench"),
    device: Device = "auto",
    out: Out = None,
) -> None:
    """How long a save holds up training, in the way of the updates and beside them; in one run."""
    from meristem.bench.save import compare_saves, saves_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    place = choose_device(device)
    plan = Plan.uniform(layers=layers, width=width, heads=heads, vocabulary=vocabulary, context=context)
    report = compare_saves(
        plan, place, batch=batch, rounds=rounds, folder=folder,
    )  # fmt: skip
    print(saves_text(report))
    _write_json(report, out)


@bench_app.command(
    "decode",
    epilog=examples(
        "meristem bench decode --out decode.json",
        "meristem bench decode --layers 6 --width 128 --heads 4 --vocabulary 320 --context 512",
    ),
)
def bench_decode(
    layers: Layers = 12,
    width: Width = 768,
    heads: Heads = 12,
    schedules: Annotated[
        str, typer.Option(help="Schedules to measure, separated by commas; uniform first.")
    ] = "uniform",
    vocabulary: Vocabulary = 50304,
    context: Context = 1024,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens to add to it.")] = 256,
    batch: Annotated[str, typer.Option(help="Texts at once; or several numbers, separated by commas.")] = "1,32",
    rounds: Annotated[int, typer.Option(help="Times every arm is measured, in turn.")] = 5,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Tokens per second of greedy generation, beside transformers (plain and static cache), in one run."""
    from meristem.bench.decode import compare_decoding, decoding_text
    from meristem.devices import choose_device
    from meristem.plan import Plan

    plans = {
        name: Plan.scheduled(name, layers=layers, width=width, heads=heads, vocabulary=vocabulary, context=context)
        for name in schedules.split(",")
    }
    report = compare_decoding(
        plans, choose_device(device), batches=integers("batch", batch), prompt=prompt, tokens=tokens, rounds=rounds,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(decoding_text(report))
    _write_json(report, out)


@bench_app.command("start", epilog=examples("meristem bench start"))
def bench_start(rounds: Annotated[int, typer.Option(min=1, help="Starts to measure.")] = 10) -> None:
    """How long `meristem --help` takes, from the start of Python to its end."""
    from meristem.bench.start import help_seconds, start_text

    print(start_text(help_seconds(rounds)))


def _write_json(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
