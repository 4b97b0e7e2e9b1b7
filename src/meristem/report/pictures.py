"""Pictures and text about a run, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from meristem.growth.descriptions import describe_structure
from meristem.growth.events import Event
from meristem.growth.policies import POLICIES
from meristem.plan import Plan
from meristem.report.head_history import HeadHistory, change_text
from meristem.report.heads_figure import heads_svg
from meristem.report.loop_history import LoopHistory
from meristem.report.loops_figure import loops_svg
from meristem.report.loss_figure import loss_svg
from meristem.report.structure_figure import even_distance, structure_svg
from meristem.report.together_figure import together_svg
from meristem.runs.depth import Depth
from meristem.runs.entries import (
    growth_events,
    other_growth,
    sound_head_growth,
    sound_loop_growth,
    sound_metrics,
    sound_observations,
)
from meristem.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from meristem.evaluation.evaluate import Evaluation

MEASURED = {"loss": "training loss", "held_out_loss": "held-out loss", "accuracy": "accuracy"}  # in metrics.jsonl


def draw_loss(run: str | Path, out: Path | None = None) -> Path | None:
    """Write `loss.svg` from metrics.jsonl into the run's folder, or into `out`; None if that cannot be written."""
    folder = RunFolder.open(Path(run))
    entries = sound_metrics(folder.read(folder.metrics), folder.config.train.steps)
    train, held_out = (
        [(e["step"], math.nan if e[name] is None else e[name]) for e in entries if name in e]
        for name in ("loss", "held_out_loss")
    )
    title = folder.path.resolve().name
    if folder.plan.classes is not None:
        picture = loss_svg(train, held_out, title, unit="row")
    else:
        picture = loss_svg(train, held_out, title, folder.config.train.batch_size * folder.plan.context)
    return folder.write("loss.svg", picture, out)


def draw_structure(
    run: str | Path, distances: Sequence[float] | None = None, plan: Plan | None = None, out: Path | None = None
) -> Path | None:
    """Write `structure.svg` from the newest plan, or the one given; None if it cannot be written.

    `distances` are the attention distances of its layers, where they were measured.
    """
    folder = RunFolder.open(Path(run))
    picture = structure_svg(plan or folder.newest_plan, distances, title=folder.path.resolve().name)
    return folder.write("structure.svg", picture, out)


def draw_growth(run: str | Path, out: Path | None = None) -> Path | None:
    """Write `growth.svg` from events.jsonl and entropy.jsonl; None if the run neither grew nor observed."""
    folder = RunFolder.open(Path(run))
    title = folder.path.resolve().name
    heads, loops = read_head_history(folder), read_history(folder)
    shows_heads = bool(heads.decisions)
    shows_loops = bool(loops.decisions or loops.observations)
    if shows_heads and shows_loops:
        picture = together_svg(heads, loops, title)
    elif shows_heads:
        picture = heads_svg(heads, title)
    elif shows_loops:
        picture = loops_svg(loops, title)
    else:
        return None
    return folder.write("growth.svg", picture, out)


def read_history(folder: RunFolder) -> LoopHistory:
    """How the loops of a run have grown so far; where heads or blocks come and go, in the structure of the end."""
    config, steps, (depth, events) = folder.config, folder.config.train.steps, _growth(folder)
    # Policies of somebody's own may do anything, and are not imported to be asked.
    varying = any(name not in POLICIES or POLICIES[name].exchanges for name in config.growth.policies)
    plan = _final(folder, depth) if varying else folder.plan
    decisions = sound_loop_growth(events, plan, varying=varying)
    observed = map(depth.lifted_observation, folder.read(folder.entropy))
    observations = sound_observations(observed, plan, steps, varying=varying)
    metrics = sound_metrics(folder.read(folder.metrics), steps)
    told = [decision.step for decision in decisions] + [entry["step"] for entry in (*observations, *metrics)]
    return LoopHistory(plan, max(told, default=0), decisions, observations, config.policy("sgt"))


def read_head_history(folder: RunFolder) -> HeadHistory:
    """How the heads of a run have come and gone so far."""
    config, (depth, events) = folder.config, _growth(folder)
    start = depth.start_heads(folder.plan)
    decisions = sound_head_growth(events, start)
    metrics = sound_metrics(folder.read(folder.metrics), config.train.steps)
    losses = [(e["step"], math.nan if e["loss"] is None else e["loss"]) for e in metrics if "loss" in e]
    told = [decision.step for decision in decisions] + [entry["step"] for entry in metrics]
    criterion = "published" if config.growth.has("published") else "demand"
    return HeadHistory(start, max(told, default=0), decisions, losses, criterion)


def _growth(folder: RunFolder) -> tuple[Depth, list[Event]]:
    """The layers that a run has had, and its events of growth as of those at the end."""
    events = growth_events(folder.read(folder.events), folder.config.train.steps)
    depth = Depth(len(folder.plan.layers), events)
    return depth, list(depth.lifted(events))


def _final(folder: RunFolder, depth: Depth) -> Plan:
    """The structure at the end without its loops; layers that are newer than the newest checkpoint as they will be."""
    newest = folder.newest_plan.bare
    known = newest.layers if len(newest.layers) >= depth.layers or not newest.target else newest.target
    layers = tuple(known[min(layer, len(known) - 1)] for layer in range(depth.layers))
    return replace(newest, layers=layers, target=())


def run_text(run: str | Path) -> str:
    """How far a run has come, and what grew, when and why, in plain lines."""
    folder = RunFolder.open(Path(run))
    newest: dict[str, float | None] = {}
    for entry in sound_metrics(folder.read(folder.metrics), folder.config.train.steps):
        newest |= {name: entry[name] for name in ("step", *MEASURED) if name in entry}
    numbers = [f"{MEASURED[name]} {newest[name]:.4f}" for name in MEASURED if newest.get(name) is not None]
    steps = f"step {newest.get('step', 0):,} of {folder.config.train.steps:,}"
    begin = ", ".join([f"{folder.path.resolve().name}: {steps}", *numbers])
    return "\n".join([begin, *_growth_lines(folder), *(f"warning: {text}" for text in folder.damages())])


def _growth_lines(folder: RunFolder) -> list[str]:
    heads, loops, (depth, events) = read_head_history(folder), read_history(folder).decisions, _growth(folder)
    others = [(event.step, f"step {event.step:,}: {event}") for event in (*loops, *other_growth(events, depth.layers))]
    told = [*((event.step, change_text(event, heads.criterion)) for event in heads.growth), *others]
    lines = [text for _, text in sorted(told, key=itemgetter(0))]
    if heads.decisions:
        lines += heads.summary()
    return lines if heads.decisions and not loops else [*lines, describe_structure(folder.newest_plan)]


def evaluation_text(result: Evaluation) -> str:
    """A few lines and a small table for the terminal."""
    even = even_distance(result.plan.context)
    lines = [
        f"{result.run}, step {result.step}: held-out loss {result.loss:.4f}, perplexity {result.perplexity:.2f}"
        + ("" if result.bits_per_byte is None else f", {result.bits_per_byte:.3f} bits per byte")
        + f" over {result.tokens:,} tokens",
        f"attention distance in tokens (even attention: {even:.1f}):",
        "layer  heads x dim  distance" + ("  run again" if result.plan.is_looped else ""),
    ]
    for index, (layer, distance) in enumerate(zip(result.plan.layers, result.attention_distance, strict=True)):
        # A context of one token has nowhere to look; a broken model may look nowhere in particular.
        bar = "#" * round(30 * distance / (2 * even)) if even and math.isfinite(distance) else ""
        again = f"  {layer.run_again:<9}" if result.plan.is_looped else ""
        lines.append(f"{index:>5}  {f'{layer.heads} x {layer.head_dim}':>11}  {distance:8.1f}{again}  {bar}")
    return "\n".join(lines)
