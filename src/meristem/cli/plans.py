"""The verb `plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meristem.arguments import integers
from meristem.choices import OptimizerKind, Parallel, Pooling, Schedule
from meristem.cli.app import app, examples
from meristem.cli.options import AsJson
from meristem.errors import InputError, RunError

if TYPE_CHECKING:
    import torch

    from meristem.bench.plan_cost import PlanCost
    from meristem.plan import Plan, Shape
    from meristem.plan.costs import TrainingOptions


@app.command(
    "plan",
    epilog=examples(
        "meristem plan --layers 12 --width 768 --heads 12 --against uniform",
        "meristem plan --heads 3,3,6,6,12,12 --out my-plan.json",
        "meristem plan --layers 32 --width 4096 --heads 32 --schedule uniform --world 8 --parallel fsdp",
        "meristem plan --layers 12 --width 768 --heads 12 --measure",
    ),
)
def plan_command(
    layers: Annotated[int | None, typer.Option(help="Number of layers; 12.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream; 768.")] = None,
    heads: Annotated[str | None, typer.Option(help="Base head count; 12. Or a list: 3,3,6,6,12,12.")] = None,
    schedule: Annotated[
        Schedule | None, typer.Option(help="Head counts over depth; prism unless --heads is a list.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--plan", help="A plan file, or a run for its present plan.")] = None,
    dims: Annotated[str, typer.Option(help="Allowed head dims.")] = "256,128,96,64",
    ramp: Annotated[int | None, typer.Option(help="Layers before the base count is reached.")] = None,
    seed: Annotated[int, typer.Option(help="Which shuffle.")] = 0,
    kv_group: Annotated[int, typer.Option(help="Query heads per key/value head, in every layer.")] = 1,
    mqa: Annotated[bool, typer.Option("--mqa", help="One key/value head in every layer; needs --force.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept falling head counts, and --mqa.")] = False,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 50304,
    context: Annotated[int, typer.Option(help="Context length.")] = 1024,
    feed_forward: Annotated[int | None, typer.Option(help="Feed-forward size; 8/3 of the width.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dim; width / heads. For uniform and lists.")] = None,
    classes: Annotated[int | None, typer.Option(help="Plan a classifier that tells so many classes apart.")] = None,
    pooling: Annotated[Pooling, typer.Option(help="What a classifier's answer is read from.")] = "mean",
    qk_norm: Annotated[bool, typer.Option("--qk-norm", help="RMS-norm every query and key, head by head.")] = False,
    tensor_parallel: Annotated[int, typer.Option(help="Warn unless this size divides all head counts.")] = 1,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per forward pass, for the memory estimate.")] = 32768,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Estimate memory with blocks recomputed (train.recompute).")
    ] = False,
    optimizer: Annotated[OptimizerKind, typer.Option(help="Whose moments are kept, for the same.")] = "adamw",
    average: Annotated[
        bool, typer.Option("--average", help="With an average of the weights (train.average), for the same.")
    ] = False,
    world: Annotated[int, typer.Option(help="Processes that train together, for the same.")] = 1,
    parallel: Annotated[
        Parallel | None, typer.Option(help="Whether each of them has the whole model, ddp, or its part of it, fsdp.")
    ] = None,
    against: Annotated[Schedule | None, typer.Option(help="Schedule to set beside this one.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Train and write for a moment, and tell time and memory.")
    ] = False,
    device: Annotated[str, typer.Option(help="With --measure: auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan to a file.")] = None,
) -> None:
    """Print a plan: its structure, what it costs, and what will be slow."""
    from meristem.files import write_atomically
    from meristem.plan import Plan
    from meristem.plan.view import plan_facts, plan_text, side_by_side

    shape: Shape = {
        "vocabulary": vocabulary, "context": context, "feed_forward": feed_forward, "kv_group": kv_group,
        "force_multi_query": mqa, "head_dim": head_dim, "classes": classes, "pooling": pooling,
        "qk_norm": qk_norm,
    }  # fmt: skip
    solver: dict[str, Any] = {"dims": integers("dims", dims), "ramp": ramp, "seed": seed}
    options: TrainingOptions = {
        "optimizer": optimizer,
        "parallel": parallel or "ddp",
        "world": world,
        "average": average,
        "recompute": recompute,
    }
    if file is not None:
        given = {
            "layers": layers, "width": width, "heads": heads, "schedule": schedule, "mqa": mqa or None,
            "head_dim": head_dim, "classes": classes, "qk_norm": qk_norm or None,
        }  # fmt: skip
        for field, value in given.items():
            if value is not None:
                raise InputError(field, value, f"cannot be given together with --plan {file}")
        name, plan = file.name, _load_plan(file)
    elif heads is not None and "," in heads:
        if schedule is not None:
            raise InputError("schedule", schedule, "cannot be given together with a list of head counts")
        name, plan = "list", _listed_plan(integers("heads", heads), layers, width, shape, force=force)
    else:
        name, base = schedule or "prism", integers("heads", "12" if heads is None else heads)[0]
        size: dict[str, Any] = {"layers": 12 if layers is None else layers, "width": 768 if width is None else width}
        plan = Plan.scheduled(name, heads=base, **size, **solver, **shape)
    if parallel is not None and world == 1:
        raise InputError("parallel", parallel, "is of several processes: say how many with --world")
    if device != "auto" and not measure:
        raise InputError("device", device, "is where to measure: say that with --measure")
    if measure and world > 1:
        raise InputError("world", world, "must be 1 with --measure: one process is measured")
    if mqa and not force:
        _refuse_mqa(plan)
    place = _chosen_device(device) if measure else None
    facts = plan_facts(plan, batch_tokens, tensor_parallel, **options)
    if against is None:
        text = plan_text(plan, batch_tokens, tensor_parallel, **options)
    else:
        other = _other_plan(plan, against, solver)
        facts["against"] = plan_facts(other, batch_tokens, tensor_parallel, **options)
        text = side_by_side(plan, other, name, against, batch_tokens, **options)
    if out is not None:  # only now, when all that was asked for has been found right
        _check_replaceable(out)
        write_atomically(out, plan.to_json())
    if as_json:
        measured = {} if place is None else {"measured": asdict(_measured(plan, batch_tokens, place, options))}
        print(json.dumps(facts | measured, indent=1))
        return
    print(text, flush=True)  # to be read while it is measured
    if place is not None:
        from meristem.bench.plan_cost import plan_cost_text

        cost = _measured(plan, batch_tokens, place, options)
        print(plan_cost_text(plan, cost, plan.memory(cost.batch * plan.context, **options).total))


def _listed_plan(counts: list[int], layers: int | None, width: int | None, shape: Shape, *, force: bool) -> Plan:
    """The plan of a list of head counts, which must not fall unless that is forced."""
    from meristem.plan import Plan
    from meristem.schedules import check_rising

    if layers not in (None, len(counts)):
        raise InputError("layers", layers, f"must equal the {len(counts)} head counts given, or be left out")
    if not force:
        check_rising(counts)
    return Plan.from_heads(counts, width=768 if width is None else width, **shape)


def _check_replaceable(path: Path) -> None:
    """Refuse to write over what is not a plan, or is that of a run."""
    from meristem.plan import Plan

    if not path.is_file():
        return
    if path.name == "plan.json" and (path.parent / "config.toml").exists():
        raise InputError("out", str(path), "is the plan of the run in that folder; must be a file elsewhere")
    try:
        Plan.load(path)
    except (InputError, RunError, OSError):
        raise InputError("out", str(path), "is there already, and is not a plan; must be another file") from None


def _other_plan(plan: Plan, schedule: Schedule, solver: dict[str, Any]) -> Plan:
    """A plan like another one, whose head counts follow a schedule."""
    from meristem.plan import Plan

    ratios = {layer.heads // layer.kv_heads for layer in plan.layers}
    other = Plan.scheduled(
        schedule, layers=len(plan.layers), width=plan.width, heads=max(plan.heads), **solver,
        vocabulary=plan.vocabulary, context=plan.context, feed_forward=plan.feed_forward,
        kv_group=ratios.pop() if len(ratios) == 1 else 1, classes=plan.classes, pooling=plan.pooling,
    )  # fmt: skip
    return replace(other, **plan.variant)


def _chosen_device(name: str) -> torch.device:
    from meristem.devices import choose_device  # imports torch, which takes a while

    return choose_device(name)


def _measured(plan: Plan, batch_tokens: int, place: torch.device, options: TrainingOptions) -> PlanCost:
    from meristem.bench.plan_cost import measure_plan

    print(f"measuring on {place}, steps of about {batch_tokens:,} tokens (--batch-tokens)", file=sys.stderr, flush=True)
    return measure_plan(
        plan, place, batch_tokens, optimizer=options["optimizer"], average=options["average"],
        recompute=options["recompute"],
    )  # fmt: skip


def _load_plan(path: Path) -> Plan:
    from meristem.plan import Plan

    if not path.is_dir():
        return Plan.load(path)
    from meristem.runs.run_folder import RunFolder

    return RunFolder.open(path).newest_plan


def _refuse_mqa(plan: Plan) -> None:
    from meristem.plan import Plan

    twin = Plan.from_heads(
        plan.heads, width=plan.width, vocabulary=plan.vocabulary, context=plan.context, feed_forward=plan.feed_forward
    )
    cost, other = plan.cost, twin.cost
    raise InputError(
        "mqa", True,
        f"is not neutral: parameters {cost.parameters:,} against {other.parameters:,}, KV cache "
        f"{cost.kv_bytes_per_token:,} against {other.kv_bytes_per_token:,} bytes/token, and the widths of keys and "
        "values differ between layers; use --kv-group, or add --force",
    )  # fmt: skip
