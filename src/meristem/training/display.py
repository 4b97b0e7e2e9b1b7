"""What a person sees while a model trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from meristem.growth.descriptions import describe_loops, describe_structure
from meristem.plan import Plan
from meristem.wording import describe_time

if TYPE_CHECKING:
    from rich.console import Console


class Display(Protocol):
    """Shows metrics as they come, and notes in between."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *exception: Any) -> None: ...

    def step(self, step: int) -> None: ...

    def update(self, values: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def restructured(self, plan: Plan, steps: int) -> None: ...

    def status(self, text: str) -> None: ...


def describe_numbers(values: Mapping[str, Any], growing: str = "") -> dict[str, str]:
    """The numbers of a step in a few letters each, in the order in which they are shown; `growing` comes last."""
    loss = values.get("loss")
    parts = {"loss": f"loss {'not finite' if loss is None else format(loss, '.4f')}"}
    if values.get("held_out") is not None:
        parts["held_out"] = f"held-out {values['held_out']:.4f}"
    if values.get("accuracy") is not None:
        parts["accuracy"] = f"accuracy {values['accuracy']:.4f}"
    if values.get("tokens_per_second"):
        parts["speed"] = f"{values['tokens_per_second']:,.0f} tokens/s"
    if values.get("mfu") is not None:
        parts["mfu"] = f"MFU {values['mfu']:.1%}"
    if values.get("skipped"):
        parts["skipped"] = f"{values['skipped']} skipped"
    if values.get("epoch") is not None:
        parts["epoch"] = f"epoch {values['epoch']:.2f}"
    if values.get("elapsed") is not None:
        parts["elapsed"] = f"{describe_time(values['elapsed'])} elapsed"
    if values.get("left") is not None:
        parts["left"] = f"{describe_time(values['left'])} left"
    if growing:
        parts["growing"] = growing
    return parts


def _short_speed(speed: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if speed >= size:
            return f"{speed / size:.1f}{letter} tok/s"
    return f"{speed:.0f} tok/s"


def _fitting(values: dict[str, Any], width: int, growing: str = "") -> str:
    """The numbers in lines of `width` characters: in one if they fit, or else in two, the times on the second.

    Where a line is still too long, the least important go first. What has grown stands on a line of its own if it does
    not fit beside them.
    """
    parts = describe_numbers(values)
    if "speed" in parts:
        parts["speed"] = _short_speed(values["tokens_per_second"])
    times: dict[str, str] = {name: parts.pop(name) for name in ("epoch", "elapsed", "left") if name in parts}
    whole = "  ".join((*parts.values(), *times.values()))
    lines = [whole]
    if len(whole) > width:
        lines = [_shortened(parts, width, ("mfu", "skipped", "held_out", "speed", "accuracy"))]
        lines += [_shortened(times, width, ("epoch", "elapsed", "left"))] if times else []
    if growing and len(f"{lines[-1]}  {growing}") <= width:
        lines[-1] += f"  {growing}"
    elif growing:
        lines.append(growing[:width])
    return "\n".join(lines)


def _shortened(parts: dict[str, str], width: int, least: Sequence[str]) -> str:
    """Parts in one line, without the first of the `least` important ones where it would be too long."""
    for name in least:
        if len("  ".join(parts.values())) > width:
            parts.pop(name, None)
    return "  ".join(parts.values())


def step_line(values: Mapping[str, Any], steps: int, growing: str = "") -> str:
    """A step of a run in one plain line."""
    parts = "  ".join(describe_numbers(values, growing).values())
    return f"step {values['step']:>{len(str(steps))}}/{steps}  {parts}"


class Growing:
    """What has grown, in a few letters: the loops of the plan, then what a policy that measures has said last."""

    def __init__(self, plan: Plan) -> None:
        self.structure, self._loops, self._status = describe_structure(plan), describe_loops(plan), ""

    @property
    def growing(self) -> str:
        return "  ".join(filter(None, (self._loops, self._status)))

    def follow_plan(self, plan: Plan) -> None:
        self._loops = describe_loops(plan)

    def status(self, text: str) -> None:
        self._status = text


class Lines(Growing):
    """A line per logged step, but at most one a second besides the first and the last."""

    def __init__(self, plan: Plan, steps: int) -> None:
        super().__init__(plan)
        self.steps = steps
        self.printed: float | None = None

    def __enter__(self) -> Lines:
        self.note(self.structure)
        return self

    def restructured(self, plan: Plan, steps: int) -> None:
        self.follow_plan(plan)
        self.steps = steps

    def __exit__(self, *exception: Any) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def update(self, values: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.printed is not None and now - self.printed < 1.0 and values["step"] < self.steps:
            return
        self.printed = now
        print(step_line(values, self.steps, self.growing), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class Live(Growing):
    """A bar with its numbers that stays at the bottom; notes scroll above it."""

    BAR = 12

    def __init__(self, plan: Plan, steps: int, console: Console | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(plan)
        self.beside = self.BAR + 1 + len(f"{steps}/{steps}") + 1  # columns of bar and counter, which never shrink
        self.progress = Progress(
            BarColumn(self.BAR, table_column=Column(no_wrap=True, min_width=self.BAR)),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=len(f"{steps}/{steps}"))),
            TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
        )
        self.task = self.progress.add_task("training", total=steps, numbers="")

    def __enter__(self) -> Live:
        self.progress.start()
        self.note(self.structure)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def restructured(self, plan: Plan, steps: int) -> None:
        self.follow_plan(plan)
        self.progress.update(self.task, total=steps)

    def step(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def update(self, values: dict[str, Any]) -> None:
        numbers = _fitting(values, self.progress.console.width - self.beside, self.growing)
        self.progress.update(self.task, completed=values["step"], numbers=numbers)

    def note(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)


class Silent:
    """The display of processes that do not speak."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def update(self, values: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def restructured(self, plan: Plan, steps: int) -> None:
        pass

    def status(self, text: str) -> None:
        pass


class Guarded:
    """A display whose output may be lost: a pipe that nobody reads any more, a terminal that was closed.

    The first time that happens `lost` is told; from then on nothing is shown.
    """

    def __init__(self, display: Display, lost: Callable[[], None]) -> None:
        self._display, self._lost = display, lost

    def _try(self, show: Callable[[Display], Any]) -> None:
        try:
            show(self._display)
        except OSError as error:
            self._display = Silent()
            silence_output()
            if not isinstance(error, BrokenPipeError):  # whoever closed a pipe knows
                with suppress(OSError):
                    print(f"the output cannot be written ({error.strerror}): saving, then stopping", file=sys.stderr)
            self._lost()

    def __enter__(self) -> Guarded:
        self._try(lambda display: display.__enter__())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._try(lambda display: display.__exit__(*exception))

    def step(self, step: int) -> None:
        self._try(lambda display: display.step(step))

    def update(self, values: dict[str, Any]) -> None:
        self._try(lambda display: display.update(values))

    def note(self, text: str) -> None:
        self._try(lambda display: display.note(text))

    def restructured(self, plan: Plan, steps: int) -> None:
        self._try(lambda display: display.restructured(plan, steps))

    def status(self, text: str) -> None:
        self._try(lambda display: display.status(text))


def silence_output() -> None:
    """Send what else is printed nowhere, so that nobody stumbles over an output that is gone."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def make_display(plan: Plan, steps: int, *, speaks: bool, lost: Callable[[], None]) -> Display:
    """The display that suits the place: none, live, or lines; `lost` is told when its output is gone."""
    if not speaks:
        return Silent()
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Guarded(Live(plan, steps) if is_terminal else Lines(plan, steps), lost)
