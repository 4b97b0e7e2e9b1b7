"""A model that finds its number of heads on a task whose answer is known, before your eyes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from meristem.choices import DemoCriterion
from meristem.errors import InputError
from meristem.files import write_atomically
from meristem.growth import Incrt, Policy, Prune, Published
from meristem.growth.descriptions import MEASURES, describe_change
from meristem.growth.events import Event, GrowthEvent
from meristem.report.head_history import HeadHistory
from meristem.report.heads_figure import heads_svg
from meristem.synthetic.experiment import Found, grow
from meristem.synthetic.known_tasks import TASKS, KnownTask
from meristem.synthetic.live_view import Standing, make_view
from meristem.wording import counted

EVENTS, PICTURE = "events.jsonl", "growth.svg"
LOSSES = (-0.05, 1.1)  # shown: an answer of zero has 1
STEPS, MANY_HEADS, MANY_STEPS = 1000, 6, 1500  # a teacher with more heads than that needs more updates
PUBLISHED_STEPS = 3000  # in which the published rule has gone far beyond any teacher


@dataclass(frozen=True)
class Demo:
    """What is shown; `heads` are the teacher's, and `steps` 0 takes as many updates as it needs."""

    task: str = "teacher"
    heads: int = 4
    criterion: str = "demand"
    seed: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("task", self.task, TASKS),
            ("criterion", self.criterion, get_args(DemoCriterion)),
        ):
            if value not in allowed:
                raise InputError(field, value, f"must be one of {', '.join(allowed)}")
        if not 0 <= self.seed < 2**31:
            raise InputError("seed", self.seed, "must be from 0 to 2^31 - 1")
        if self.steps < 0:
            raise InputError("steps", self.steps, "must be at least 1, or 0 for as many as it takes")
        KnownTask(self.task, self.heads)  # refuses bad numbers of heads

    @property
    def teacher(self) -> KnownTask:
        return KnownTask(self.task, self.heads, seed=self.seed)

    @property
    def updates(self) -> int:
        if self.criterion == "published":
            return self.steps or PUBLISHED_STEPS
        return self.steps or (MANY_STEPS if self.teacher.answer > MANY_HEADS else STEPS)

    @property
    def policies(self) -> list[Policy]:
        if self.criterion == "demand":
            return [Incrt(seed=self.seed), Prune()]
        # It runs out of directions when it has one more head than the model is wide; more cannot come of it.
        return [Published(max_heads=self.teacher.width + 1, seed=self.seed)]

    @property
    def title(self) -> str:
        what = {
            "teacher": f"A teacher with {counted(self.heads, 'head')}, and a model that starts with 1",
            "bag": "Even pooling, which needs 1 head",
            "noise": "Noise, which nothing can learn",
        }[self.task]
        return what if self.criterion == "demand" else f"{what}; births by the published rule"


def show(demo: Demo, out: Path, say: Callable[[str], None]) -> Found:
    """Run a demo before the viewer's eyes, `say` what came of it, and write events and picture to the folder `out`."""
    _claim(out)
    name, losses = MEASURES[demo.criterion], []
    standing = Standing(demo.updates, name)
    with (out / EVENTS).open("w", encoding="utf-8") as log, make_view() as view, _one_thread():

        def record(step: int, event: str, **facts: Any) -> None:
            log.write(json.dumps({"step": step, "event": event, **facts}) + "\n")
            log.flush()

        def report(step: int, loss: float, heads: int, events: list[Event]) -> None:
            losses.append((step, loss))
            standing.move(step, loss, heads, events)
            for event in events:
                record(**event.to_dict())
                if isinstance(event, GrowthEvent):
                    view.note(f"step {event.step:,}: {describe_change(event)}")
            view.show(standing)

        record(0, "start", demo="incrt", **asdict(demo))
        view.note(f"{demo.title}.")
        outcome = grow(demo.teacher, demo.policies, steps=demo.updates, seed=demo.seed, report=report)
        record(demo.updates, "finished", heads=outcome.heads, loss=outcome.loss)
    history = HeadHistory((1,), demo.updates, outcome.events, losses, demo.criterion)
    write_atomically(out / PICTURE, heads_svg(history, demo.title, LOSSES))
    say(verdict(demo, outcome, history))
    say(f"picture: {out / PICTURE}, events: {out / EVENTS}")
    return outcome


def verdict(demo: Demo, outcome: Found, history: HeadHistory) -> str:
    """What was needed and what was found, in plain words."""
    needed, found, predicted = outcome.task.answer, outcome.heads, history.predicted[0]
    if demo.task == "noise":
        text = f"There is nothing to learn here; the model has {counted(found, 'head')}"
    else:
        text = f"The task needs {counted(needed, 'head')}; the model found {found}"
    if predicted is not None:
        text += f" (predicted from the first measurement: {predicted})"
    text += f". Loss {outcome.loss:.2g}, where an answer of zero has 1."
    if demo.criterion == "published" and found > needed:
        text += (
            "\nThe published rule looks at the heads' own weights, not at the task, and does not see that it is solved."
        )
    return text


def _claim(out: Path) -> None:
    """Make the folder, unless there are files in it that are not of such a demo and would be lost."""
    if out.exists() and not out.is_dir():
        raise InputError("out", str(out), "must be a folder")
    taken = [name for name in (PICTURE, EVENTS) if (out / name).exists()]
    if taken and not _is_ours(out / EVENTS):
        raise InputError("out", str(out), f"holds {taken[0]} of something else; take another folder")
    out.mkdir(parents=True, exist_ok=True)


def _is_ours(events: Path) -> bool:
    try:
        with events.open(encoding="utf-8") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and first.get("demo") == "incrt"


@contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are small: a second thread would be waited for longer than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
