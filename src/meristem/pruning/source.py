"""The run that is pruned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meristem.config import Config, GrowthConfig
from meristem.data import LabelledData, TokenData, Tokenizer, load_tokenizer
from meristem.errors import InputError, Remedy
from meristem.model import Transformer, build_model
from meristem.runs.checkpoint import Checkpoint, restore_model
from meristem.runs.origin import NO_DATA
from meristem.runs.run_folder import RunFolder, open_checkpoint, settle
from meristem.training.tasks import make_task


@dataclass(frozen=True)
class Source:
    """The run that is pruned, the checkpoint that is taken, and the data to go by."""

    folder: RunFolder
    config: Config  # with the path of the data and the device that are used now, and the rows that it has held back
    checkpoint: Checkpoint
    data: TokenData | LabelledData
    kept: TokenData | LabelledData | Tokenizer  # what a pruned run has of data if it is not repaired

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def trained_steps(self) -> int:
        """Updates of the run that were on this data: all or none."""
        return self.step if self.data.index.digest == self.folder.data_digest else 0

    def model(self, device: torch.device, checkpoint: Checkpoint | None = None) -> Transformer:
        """The model of its checkpoint, or of one that was made from it."""
        found = checkpoint or self.checkpoint
        model = build_model(found.plan)
        restore_model(found, model, None)
        settle(model)
        return model.to(device).eval()


def open_source(
    run: str | Path, *, data: str | Path | None = None, step: int | str | None = None, average: bool = False,
    device: str = "auto",
) -> Source:  # fmt: skip
    """A run with the checkpoint that is to be pruned, and data that were made for it."""
    folder = RunFolder.open(Path(run))
    imported = folder.data_digest == NO_DATA
    if imported and data is None:
        expected = "was imported and has no data of its own; name some that were prepared with its tokenizer"
        raise InputError("run", str(run), expected, Remedy(("data=FOLDER",)))
    config = folder.config
    path = Path(config.data.path) if data is None else Path(data).resolve()
    opened = folder.open_alike(path)
    checkpoint = open_checkpoint(folder, step=step, average=average)
    if average:
        checkpoint = checkpoint.without_average()
    train = replace(config.train, device=device, average=0.0 if average else config.train.average)
    if opened.index.digest != folder.data_digest:  # other rows, none of which was trained on
        config = replace(config, data=replace(config.data, held_back=0), growth=GrowthConfig())
    held_back = make_task(config, checkpoint.plan, opened, fixed=False).held_back
    data_config = replace(config.data, path=str(path), held_back=held_back)
    config = replace(config, data=data_config, train=train)
    return Source(folder, config, checkpoint, opened, load_tokenizer(folder.path) if imported else opened)
