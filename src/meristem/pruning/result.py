"""What pruning came to, as a value, a table, a picture and a few lines."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meristem.plan import Plan
from meristem.pruning.search import Point
from meristem.pruning.settings import PruneSettings
from meristem.records import finite
from meristem.report.prune_figure import Smaller, prune_svg
from meristem.wording import counted

FORMAT = "meristem-prune/1"
ROWS = 8  # of the table on the screen


@dataclass(frozen=True)
class PruneResult:
    """The run that pruning made, and the way there.

    `curve` has the model at the start and after every removal; the new run is its point number `kept`. `loss` is that
    of the new run on the rows set aside, after its repair if it was `repaired`; `held_out` are the losses on held-out
    data before and after, by which nothing was decided.
    """

    folder: Path
    source: Path
    step: int
    settings: PruneSettings
    plan: Plan
    curve: tuple[Point, ...]
    kept: int
    loss: float
    held_out: tuple[float | None, float | None]
    repaired: bool
    ended: str
    notes: tuple[str, ...] = ()

    @property
    def before(self) -> Point:
        return self.curve[0]

    @property
    def after(self) -> Point:
        """The new run, before its repair."""
        return self.curve[self.kept]

    @property
    def rise(self) -> float:
        """By how much the loss on the rows set aside is above that of the model as it was."""
        return self.loss - self.before.loss

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN: None stands for a number that is not finite."""
        return {
            "format": FORMAT, "source": str(self.source), "step": self.step, "changed": self.settings.changed,
            "settings": self.settings.to_dict(),
            "before": flat(self.before), "after": {**flat(self.after), "loss": finite(self.loss)},
            "rise": finite(self.rise), "held_out": {"before": self.held_out[0], "after": self.held_out[1]},
            "repaired": self.repaired, "kept": self.kept, "ended": self.ended, "notes": list(self.notes),
            "curve": [flat(point) for point in self.curve], "plan": self.plan.to_dict(),
        }  # fmt: skip

    def to_csv(self) -> str:
        """The curve as a table, a line for each size."""
        text, lines = io.StringIO(), [flat(point) for point in self.curve]
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()

    def to_svg(self) -> str:
        """The curve as a picture."""
        first = self.before.sizes
        points = [
            Smaller(
                point.sizes.heads, point.loss - self.before.loss, point.sizes.kv_bytes / max(1, first.kv_bytes),
                point.sizes.attention / first.attention, point.tokens_per_second,
            )
            for point in self.curve
        ]  # fmt: skip
        tolerance = self.settings.tolerance if math.isfinite(self.settings.tolerance) else None
        return prune_svg(
            points, self.kept, self.source.resolve().name, tolerance=tolerance,
            repaired=self.rise if self.repaired else None,
        )  # fmt: skip

    def __str__(self) -> str:
        first, last = self.before.sizes, self.after.sizes
        lines = [
            f"{self.source}, step {self.step:,}: {counted(first.heads, 'head')} became {last.heads} ({self.ended})",
            "heads of every layer: " + " ".join(map(str, self.plan.heads)),
            "heads    KV bytes/token    attention parameters    tokens/s      loss      rise",
            *(_row(point, self.before) for point in self._shown()),
        ]
        if self.repaired:
            updates = counted(self.settings.repair, "update")
            lines.append(f"after a repair of {updates}: loss {self.loss:.4f}, rise {self.rise:+.4f}")
        lines.append("Losses are of training rows set aside for it.")
        if None not in self.held_out:
            lines.append("held-out loss: {:.4f} before, {:.4f} after".format(*self.held_out))
        return "\n".join([*lines, *self.notes, f"run: {self.folder}"])

    def _shown(self) -> list[Point]:
        """Some points of the curve up to the new run, its own the last."""
        stretch = max(1, math.ceil(self.kept / (ROWS - 1)))
        return [self.curve[number] for number in sorted({*range(0, self.kept, stretch), self.kept})]


def flat(point: Point) -> dict[str, Any]:
    """A point as plain values; None where a number is not finite or was not measured."""
    return {**asdict(point.sizes), "loss": finite(point.loss), "tokens_per_second": point.tokens_per_second}


def _row(point: Point, first: Point) -> str:
    sizes, before = point.sizes, first.sizes
    cache = f"{sizes.kv_bytes:,} ({_change(sizes.kv_bytes, before.kv_bytes)})" if before.kv_bytes else "-"
    attention = f"{sizes.attention:,} ({_change(sizes.attention, before.attention)})"
    speed = "" if point.tokens_per_second is None else f"{point.tokens_per_second:,.0f}"
    losses = f"{point.loss:8.4f}  {point.loss - first.loss:+8.4f}"
    return f"{sizes.heads:>5}  {cache:>16}  {attention:>22}  {speed:>10}  {losses}"


def _change(size: int, before: int) -> str:
    return f"{size / before - 1:+.0%}"
