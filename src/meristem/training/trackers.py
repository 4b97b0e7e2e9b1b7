"""Copies of the metrics for people who watch them elsewhere. The run's own metrics.jsonl is always written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from meristem.errors import missing_extra


class Tracker(Protocol):
    """Somewhere to send numbers."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder, under tensorboard/."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("tensorboard", "track") from error
        self.writer = SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """wandb, or trackio, which has the same calls; one project, named after the run folder."""

    def __init__(self, package: str, run: Path, config: dict[str, Any]) -> None:
        try:
            module = __import__(package)
        except ImportError as error:
            raise missing_extra(package, "track") from error
        self.module = module
        module.init(project="meristem", name=run.name, config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


TRACKERS = ("tensorboard", "trackio", "wandb")


def make_trackers(names: tuple[str, ...], run: Path, config: dict[str, Any]) -> list[Tracker]:
    """The trackers of a run; a missing package is an error that names the extra."""
    return [TensorBoard(run, config) if name == "tensorboard" else WandbLike(name, run, config) for name in names]
