"""What became of an attack, and the one table of all attacks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Verdict(Enum):
    """The columns of the table. The last three are what must never be."""

    SURVIVED = "survived"  # the end is that of an undisturbed run
    REFUSED = "refused clearly"  # one line that says why, and nothing changed
    SILENT = "silent"  # another result, and not a word about it
    LOST = "lost"  # what had been done is gone, or cannot be gone on with
    TRACEBACK = "traceback"  # no answer that a person can use: also hanging, and several lines of error


BAD = (Verdict.SILENT, Verdict.LOST, Verdict.TRACEBACK)


@dataclass(frozen=True)
class Result:
    """Of one attempt: what was done, what it came to, and, if that is bad, what was seen."""

    verdict: Verdict
    what: str
    seen: str = ""
    weight: int = 1  # attacks that the attempt consisted of


@dataclass(frozen=True)
class Case:
    """An attack that went wrong, with what is needed to see it again."""

    attack: str
    seed: int
    number: int
    verdict: Verdict
    what: str  # was done
    seen: str

    def __str__(self) -> str:
        again = f"(cd tests && python -m chaos {self.attack} --seed {self.seed} --only {self.number})"
        return f"--- {self.verdict.value}: {self.what}\n    again: {again}\n{self.seen}"


@dataclass
class Row:
    """The count of one kind of attack."""

    attack: str
    counts: Counter[Verdict] = field(default_factory=Counter)
    cases: list[Case] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return self.counts.total()

    @property
    def holds(self) -> bool:
        return not any(self.counts[verdict] for verdict in BAD)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    names = ["attack", "tried", *(verdict.value for verdict in Verdict), "seconds"]
    lines = [names, ["---", *("--:" for _ in names[1:])]]
    for row in rows:
        counts = [row.tried, *(row.counts[verdict] for verdict in Verdict), round(row.seconds)]
        lines.append([row.attack, *(f"{count:,}" for count in counts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_results(rows: list[Row], out: Path) -> None:
    """`out`.json for machines and `out`.md for people."""
    facts = [
        {
            "attack": row.attack, "tried": row.tried, "seconds": round(row.seconds, 1),
            **{verdict.value: row.counts[verdict] for verdict in Verdict},
            "cases": [{**vars(case), "verdict": case.verdict.value} for case in row.cases],
        }
        for row in rows
    ]  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8", errors="backslashreplace")
    cases = "\n\n".join(f"```\n{case}\n```" for row in rows for case in row.cases)
    out.with_suffix(".md").write_text(
        f"{table(rows)}\n\n{cases}\n".rstrip() + "\n", encoding="utf-8", errors="backslashreplace"
    )
