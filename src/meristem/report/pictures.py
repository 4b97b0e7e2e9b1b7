"""Pictures and text about a run, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meristem.growth.wording import describe_growth, describe_structure
from meristem.plan import Plan
from meristem.report.head_history import HeadHistory
from meristem.report.heads_figure import heads_svg
from meristem.report.loop_history import History
from meristem.report.loops_figure import growth_svg
from meristem.report.loss_figure import loss_svg
from meristem.report.structure_figure import even_distance, structure_svg
from meristem.runs.entries import sound_head_growth, sound_loop_growth, sound_metrics, sound_observations
from meristem.runs.folder import RunFolder

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
    if folder.config.growth.policy == "incrt":
        heads = read_head_history(folder)
        picture = heads_svg(heads, title) if heads.decisions else None
    else:
        history = read_history(folder)
        picture = growth_svg(history, title) if history.decisions or history.observations else None
    return None if picture is None else folder.write("growth.svg", picture, out)


def read_history(folder: RunFolder) -> History:
    """How a run has grown so far."""
    config, plan = folder.config, folder.plan
    steps, growing = config.train.steps, config.growth.policy == "sgt"
    decisions = sound_loop_growth(folder.read(folder.events), plan, steps) if growing else []
    observations = sound_observations(folder.read(folder.entropy), plan, steps)
    metrics = sound_metrics(folder.read(folder.metrics), steps)
    policy = config.growth.sgt(steps) if decisions else None
    last_step = max((entry["step"] for log in (decisions, observations, metrics) for entry in log), default=0)
    return History(plan, last_step, decisions, observations, policy)


def read_head_history(folder: RunFolder) -> HeadHistory:
    """How the heads of a run have come and gone so far."""
    config, plan = folder.config, folder.plan
    decisions = sound_head_growth(folder.read(folder.events), plan, config.train.steps)
    metrics = sound_metrics(folder.read(folder.metrics), config.train.steps)
    losses = [(e["step"], math.nan if e["loss"] is None else e["loss"]) for e in metrics if "loss" in e]
    last_step = max((entry["step"] for entry in (*decisions, *metrics)), default=0)
    return HeadHistory(plan.heads, last_step, decisions, losses, config.incrt.criterion)


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
    if folder.config.growth.policy == "incrt":
        return read_head_history(folder).lines()
    structure = describe_structure(folder.newest_plan)
    decisions = read_history(folder).decisions
    return [*(f"step {entry['step']:,}: {describe_growth(dict(entry))}" for entry in decisions), structure]


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
