"""Runs that go on while a test looks at them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meristem.plan import Plan
from meristem.watch.runs import Watch
from meristem.watch.server import LivePage, Server
from report.page.helpers import START, born, demands, growth, hand_made, metric

PLAN = Plan.from_heads([1, 1], width=32, head_dim=8, vocabulary=50, context=16)
SECONDS = {"training_seconds": 2.0, "compilation_seconds": 0.5, "evaluation_seconds": 0.25, "saving_seconds": 0.25}
FINISHED = {"step": 100, "event": "finished"}


def begun(folder: Path, steps: int = 10) -> Path:
    """A run of 100 steps that has logged the first ones."""
    lines = [timed(step) for step in range(1, steps + 1)]
    return hand_made(folder, PLAN, {"train.steps": 100}, metrics=lines, events=[START])


def timed(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl of 3 seconds a step, and half an epoch in the whole run."""
    seconds = {name: step * part for name, part in SECONDS.items()}
    return {**metric(step, 3 - step / 100, epoch=step / 200), **seconds, **more}


def birth(step: int) -> Mapping[str, Any]:
    """A line of events.jsonl: the second layer gets its second head."""
    after, moves = born(PLAN, 1)
    facts = {**demands(after, 0.4), "moves": moves}
    return growth(step, "incrt", "birth", 1, "the demand is certain", after, **facts)


def append(run: Path, log: str, *lines: Mapping[str, Any]) -> None:
    with (run / f"{log}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def keep_lines(run: Path, log: str, count: int) -> None:
    """Cut a log to its first lines, as a return to a checkpoint does: another file takes its place."""
    path = run / f"{log}.jsonl"
    aside = path.with_name("aside")
    aside.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
    aside.replace(path)


def watch(*runs: Path) -> Watch:
    """A watch that may look again at once: by its clock a look takes no time, and much passes until the next."""
    calls = iter(range(10**9))
    return Watch(runs, clock=lambda: next(calls) // 2 * 1e6)


def dead_process() -> int:
    """The number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@contextmanager
def served(*runs: Path, port: int = 0) -> Iterator[Server]:
    """A server of the page of runs, at work in a thread."""
    with Server(LivePage(watch(*runs)), port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
