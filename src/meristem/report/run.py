"""Pictures and text about a run, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meristem.plan import Plan
from meristem.report.figures import even_distance, loss_svg, structure_svg
from meristem.report.growth import growth_svg
from meristem.report.history import History
from meristem.training.checkpoint import write_atomically
from meristem.training.run import RunFolder

if TYPE_CHECKING:
    from meristem.evaluation.evaluate import Evaluation


def draw_loss(run: str | Path) -> Path:
    """Write `loss.svg` from metrics.jsonl."""
    folder = RunFolder.open(Path(run))
    entries = list(folder.read(folder.metrics))
    train, held_out = (
        [(e["step"], math.nan if e[name] is None else e[name]) for e in entries if name in e]
        for name in ("loss", "held_out_loss")
    )
    tokens = folder.config.train.batch_size * folder.plan.context
    path = folder.path / "loss.svg"
    write_atomically(path, loss_svg(train, held_out, title=folder.path.name, tokens_per_step=tokens))
    return path


def draw_structure(run: str | Path, distances: Sequence[float] | None = None, plan: Plan | None = None) -> Path:
    """Write `structure.svg` from the newest plan, or the one given.

    `distances` are the attention distances of its layers, where they were measured.
    """
    folder = RunFolder.open(Path(run))
    path = folder.path / "structure.svg"
    write_atomically(path, structure_svg(plan or folder.newest_plan, distances, title=folder.path.name))
    return path


def draw_growth(run: str | Path) -> Path | None:
    """Write `growth.svg` from events.jsonl and entropy.jsonl; None if the run neither grew nor observed."""
    folder = RunFolder.open(Path(run))
    history = read_history(folder)
    if not history.decisions and not history.observations:
        return None
    path = folder.path / "growth.svg"
    write_atomically(path, growth_svg(history, title=folder.path.name))
    return path


def read_history(folder: RunFolder) -> History:
    """How a run has grown so far."""
    config, logs = folder.config, [list(folder.read(log)) for log in (folder.events, folder.entropy, folder.metrics)]
    events, observations, _ = logs
    decisions = [entry for entry in events if entry.get("event") == "growth"]
    policy = config.growth.sgt(config.train.steps) if decisions else None
    last_step = max((entry["step"] for log in logs for entry in log), default=0)
    return History(folder.plan, last_step, decisions, observations, policy)


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
