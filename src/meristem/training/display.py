"""What a person sees while a model trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from itertools import groupby
from types import TracebackType
from typing import Any, Protocol

from meristem.plan import Plan


def describe_structure(plan: Plan) -> str:
    """Head counts over depth in a few characters, such as `heads 3x2 6x2 8x2 12x6`."""
    runs = [(heads, len(list(group))) for heads, group in groupby(plan.heads)]
    return "heads " + " ".join(f"{heads}x{count}" for heads, count in runs)


def describe_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display(Protocol):
    """Shows metrics as they come, and notes in between."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *exception: Any) -> None: ...

    def update(self, values: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


def _parts(values: dict[str, Any]) -> list[str]:
    loss = values.get("loss")
    parts = [f"loss {'not finite' if loss is None else format(loss, '.4f')}"]
    if values.get("held_out") is not None:
        parts.append(f"held-out {values['held_out']:.4f}")
    if values.get("tokens_per_second"):
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if values.get("mfu") is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    if values.get("skipped"):
        parts.append(f"{values['skipped']} skipped")
    if values.get("left") is not None:
        parts.append(f"{describe_time(values['left'])} left")
    return parts


class Lines:
    """A line per logged step."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self.structure = describe_structure(plan)
        self.steps = steps

    def __enter__(self) -> Lines:
        self.note(self.structure)
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def update(self, values: dict[str, Any]) -> None:
        print(
            f"step {values['step']:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(_parts(values)),
            flush=True,
        )

    def note(self, text: str) -> None:
        print(text, flush=True)


class Live:
    """A bar that stays at the bottom, with the structure beside it; notes scroll above it."""

    def __init__(self, plan: Plan, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn(f"[cyan]{describe_structure(plan)}"),
        )
        self.task = self.progress.add_task("training", total=steps, numbers="")

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def update(self, values: dict[str, Any]) -> None:
        self.progress.update(self.task, completed=values["step"], numbers="  ".join(_parts(values)))

    def note(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)


class Silent:
    """For the processes that do not speak."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def update(self, values: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def make_display(plan: Plan, steps: int, *, speaks: bool) -> AbstractContextManager[Display]:
    """The display that suits the place: none, live, or lines."""
    if not speaks:
        return Silent()
    return Live(plan, steps) if sys.stdout.isatty() else Lines(plan, steps)
