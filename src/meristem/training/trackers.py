"""Copies of the metrics for people who watch them elsewhere. The run's own metrics.jsonl is always written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, get_args
from uuid import uuid4

from meristem.choices import TrackerName
from meristem.errors import InputError, missing_extra

TRACKERS: tuple[str, ...] = get_args(TrackerName)


class Tracker(Protocol):
    """Somewhere to send numbers."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder, under tensorboard/. Points after the step that a run goes on from are dropped."""

    def __init__(self, run: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("tensorboard", "track") from error
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """wandb, or trackio, which has the same calls; one project, named after the run folder.

    A run that is resumed goes on where it was: wandb knows it by its id, trackio by its name. Both keep the points that
    they were sent before; wandb passes over steps that come again, trackio shows them twice.
    """

    def __init__(self, package: str, run: Path, config: dict[str, Any]) -> None:
        try:
            module = __import__(package)
        except ImportError as error:
            raise missing_extra(package, "track") from error
        self.module = module
        name, identity = run.resolve().name, _identity(run)
        if package == "wandb":
            module.init(project="meristem", name=name, id=identity, resume="allow", config=config)
        else:  # with the id in it, as other folders may be called the same
            module.init(project="meristem", name=f"{name}-{identity}", resume="allow", config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


def _identity(run: Path) -> str:
    """A short random name that stays with the folder, also when it is moved."""
    file = run / "tracker-id"
    if not file.is_file():
        file.write_text(uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse unknown trackers, and those whose package is not installed, before anything is written."""
    for name in names:
        if name not in TRACKERS:
            raise InputError("log.trackers", name, f"must be one of {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise missing_extra(name, "track")


def make_trackers(names: tuple[str, ...], run: Path, config: dict[str, Any], first_step: int) -> list[Tracker]:
    """The trackers of a run that goes on from `first_step`; a missing package is an error that names the extra."""
    return [TensorBoard(run, first_step) if name == "tensorboard" else WandbLike(name, run, config) for name in names]
