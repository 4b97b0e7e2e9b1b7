"""The tables of a comparison as rows of cells, and as Markdown. The page shows the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meristem.comparison import numbers
from meristem.comparison.analysis import Analysis, ArmRow, ContrastLine
from meristem.comparison.file import Comparison, Contrast
from meristem.comparison.paired import PairedDifference
from meristem.comparison.verdicts import Verdict
from meristem.settings import flat

MEASURES = {"held_out_loss": "held-out loss", "accuracy": "accuracy", "macro_f1": "macro-F1"}

NOTHING = "There is no difference yet: it needs two seeds that two arms have both ended with."


@dataclass(frozen=True)
class Table:
    """A table with its title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        """As Markdown, with columns that are straight in a terminal too."""
        cells = [[cell.replace("|", "\\|") for cell in line] for line in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [cells[0], ["-" * width for width in widths], *cells[1:]]
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def tables(comparison: Comparison, analysis: Analysis) -> list[Table]:
    """All tables: results, contrasts, cost, where the time went, and what the arms are."""
    return [_scores(comparison, analysis), _contrasts(comparison, analysis), _costs(comparison, analysis),
            _spent(analysis), _times(analysis), _arms(comparison)]  # fmt: skip


def markdown(comparison: Comparison, analysis: Analysis) -> str:
    """The whole comparison as Markdown."""
    parts = [f"# {comparison.name}"]
    for table in tables(comparison, analysis):
        if table.title == "Contrasts":
            parts.append(f"## {table.title}\n\n{table if table.rows else NOTHING}")
            parts.append("\n".join(f"- {note}" for note in (*analysis.cautions, *analysis.notes)))
        elif table.rows:
            parts.append(f"## {table.title}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _scores(comparison: Comparison, analysis: Analysis) -> Table:
    baseline = comparison.primary[0].baseline if len(comparison.primary) == 1 else "the baseline"
    columns = ("arm", "seeds", f"{MEASURES[comparison.measure]}, mean", "s.d.", f"minus {baseline}, 95 % interval",
               "rate", "updates", "final structure")  # fmt: skip

    def row(arm: ArmRow) -> tuple[str, ...]:
        difference = "-" if arm.against is None else numbers.interval(arm.against)
        return (arm.arm, str(arm.seeds), numbers.score(arm.mean), numbers.score(arm.deviation), difference,
                f"{arm.rate:g}", f"{arm.steps:,.0f}", numbers.structures(arm))  # fmt: skip

    return Table("Results", columns, [row(arm) for arm in analysis.arms])


def _contrasts(comparison: Comparison, analysis: Analysis) -> Table:
    corrected = len(comparison.primary) > 1
    rows = []
    for line in analysis.contrasts:
        kind = "primary" if line.primary and not corrected else "Holm"
        rows.append(
            (name(line.contrast), kind, numbers.interval(line.difference), *_tests(line),
             f"**{word(line.verdict)}**", numbers.score(line.detectable))
        )  # fmt: skip
    within = "" if comparison.margin is None else f" within {comparison.margin:g}"
    columns = ("contrast", "tested", "difference, 95 % interval", "p", f"p of equality{within}", "result",
               "could have shown (80 %)")  # fmt: skip
    return Table("Contrasts", columns, rows)


def _tests(line: ContrastLine) -> tuple[str, str]:
    """The p values of a difference and of equality; dashes where there was no such test."""
    if not line.difference.has_spread:
        return "-", "-"
    equal = line.verdict.p_equal
    return numbers.p_value(line.verdict.p), "-" if equal is None else numbers.p_value(equal)


def _costs(comparison: Comparison, analysis: Analysis) -> Table:
    goal, counted = comparison.target_loss, any(arm.off_budget for arm in analysis.arms)
    more = (("off its budget",) if counted else ()) + ((f"seconds to loss {goal:g}",) if goal is not None else ())
    columns = ("arm", "parameters", "FLOPs", "tokens", "tokens/s", "peak memory", *more)
    rows = [
        (arm.arm, numbers.short(arm.parameters), numbers.short(arm.flops, 4), numbers.short(arm.tokens),
         f"{arm.tokens_per_second:,.0f}", numbers.gibibytes(arm.peak_memory),
         *((numbers.parts(arm.off_budget),) if counted else ()),
         *((numbers.target(arm),) if goal is not None else ()))
        for arm in analysis.arms
    ]  # fmt: skip
    return Table("Cost", columns, rows)


def _spent(analysis: Analysis) -> Table:
    columns = ("arm", "steps, gauges and edits", "compilation", "evaluation", "saving")
    rows = [
        (arm.arm, *map(numbers.seconds, (arm.training_seconds, arm.compilation_seconds, arm.evaluation_seconds,
                                         arm.saving_seconds)))
        for arm in analysis.arms
    ]  # fmt: skip
    return Table("Where the time went", columns, rows)


def _times(analysis: Analysis) -> Table:
    columns = ("contrast", "seconds without compilation", "result", "seconds with compilation", "result")
    rows = [
        (name(line.contrast), _seconds(line.without), _time_word(line.without_verdict),
         _seconds(line.compiled), _time_word(line.compiled_verdict))
        for line in analysis.times
    ]  # fmt: skip
    return Table("Time", columns, rows)


def _arms(comparison: Comparison) -> Table:
    rows = []
    for arm in comparison.arms.values():
        own = flat({key: value for key, value in arm.facts.items() if value is not None})
        changes = ", ".join(f"{key} = {value}" for key, value in {**arm.changes, **own}.items())
        rows.append((arm.name, changes or "nothing"))
    return Table("Arms", ("arm", "what it changes"), rows)


def summary(analysis: Analysis) -> list[str]:
    """The primary contrasts, a line each."""
    lines = (line for line in analysis.contrasts if line.primary)
    return [f"{name(line.contrast)}: {word(line.verdict)}, {numbers.interval(line.difference)}" for line in lines]


def name(contrast: Contrast) -> str:
    return f"{contrast.arm} minus {contrast.baseline}"


def word(verdict: Verdict) -> str:
    small = verdict.is_small and verdict.word in ("better", "worse")
    return f"{verdict.word}, by less than the margin" if small else verdict.word


def _seconds(difference: PairedDifference) -> str:
    if not difference.has_spread:
        return f"{difference.mean:+.2f} in all {difference.pairs} pairs"
    return f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def _time_word(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not judged"
    return {"better": "faster", "worse": "slower"}.get(verdict.word, verdict.word)
