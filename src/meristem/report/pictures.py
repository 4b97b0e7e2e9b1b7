"""Pictures and text about a run, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meristem.plan import Plan
from meristem.report.heads_figure import heads_svg
from meristem.report.loops_figure import loops_svg
from meristem.report.loss_figure import loss_svg
from meristem.report.run_growth import RunGrowth
from meristem.report.structure_figure import even_distance, structure_svg
from meristem.report.together_figure import together_svg
from meristem.runs.entries import sound_metrics, whole_length
from meristem.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from meristem.evaluation.evaluate import Evaluation

MEASURED = {
    "loss": "training loss", "held_out_loss": "held-out loss", "held_out_loss_average": "of the average",
    "accuracy": "accuracy",
}  # in metrics.jsonl  # fmt: skip


def draw_loss(run: str | Path, out: Path | None = None) -> Path | None:
    """Write `loss.svg` from metrics.jsonl into the run's folder, or into `out`; None if that cannot be written."""
    folder = RunFolder.open(Path(run))
    train = folder.config.train
    entries = sound_metrics(folder.read(folder.metrics), train.steps)
    losses, held_out, average = (
        [(e["step"], math.nan if e[name] is None else e[name]) for e in entries if name in e]
        for name in ("loss", "held_out_loss", "held_out_loss_average")
    )
    title = folder.path.resolve().name
    if folder.plan.classes is not None:
        picture = loss_svg(losses, held_out, title, unit="row", average=average)
    else:
        picture = loss_svg(losses, held_out, title, train.batch_size * folder.plan.context, average=average)
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
    growth = RunGrowth(folder)
    heads, loops = growth.heads, growth.loops
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


def run_text(run: str | Path, name: str | None = None) -> str:
    """How far a run has come, and what grew, when and why, in plain lines; `name` is its folder's if not given."""
    folder = RunFolder.open(Path(run))
    growth = RunGrowth(folder)
    newest: dict[str, float | None] = {}
    for entry in growth.metrics:
        newest |= {name: entry[name] for name in ("step", *MEASURED) if name in entry}
    numbers = [f"{MEASURED[name]} {newest[name]:.4f}" for name in MEASURED if newest.get(name) is not None]
    length = whole_length(growth.metrics, growth.config.train.steps, growth.config.train.flops)
    steps = f"step {newest.get('step', 0):,} of {length:,}"
    train = growth.config.train
    branch = [] if train.branch_from is None else [f"branched off {train.branch_run} at step {train.branch_step:,}"]
    begin = ", ".join([f"{name or folder.path.resolve().name}: {steps}", *branch, *numbers])
    return "\n".join([begin, *growth.lines(), *(f"warning: {text}" for text in folder.damages())])


def evaluation_text(result: Evaluation) -> str:
    """A few lines and a small table for the terminal."""
    even = even_distance(result.plan.context)
    lines = [
        f"{result.run}, step {result.step}{', average of the weights' * result.average}: "
        f"held-out loss {result.loss:.4f}, perplexity {result.perplexity:.2f}"
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
