"""Starting from another run: a new one that begins with its structure and its weights, and with nothing else of it.

The new run has a copy of the weights as its checkpoint of step 0. The other one is only read, and is not needed again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meristem.config import Config
from meristem.data import LabelledData, TokenData
from meristem.errors import InputError, RunError
from meristem.growth.edits import GATES
from meristem.model import build_model
from meristem.plan import Plan
from meristem.runs.checkpoint import load_newest
from meristem.runs.run_folder import RunFolder
from meristem.wording import listed

logger = logging.getLogger(__name__)

FIELD = "model.start_from"


@dataclass(frozen=True)
class Start:
    """The run whose newest checkpoint another one begins with."""

    folder: RunFolder

    @classmethod
    def of(cls, config: Config) -> Start | None:
        """What a run starts from, None if it begins with weights of its own; that there is no such run is said."""
        if config.model.start_from is None:
            return None
        if config.model.plan is not None:
            raise InputError(FIELD, config.model.start_from, "has a plan, so model.plan cannot be given besides")
        try:
            folder = RunFolder.open(Path(config.model.start_from))
        except RunError as error:
            raise InputError(FIELD, config.model.start_from, f"cannot be started from: {error}") from None
        if folder.newest_state is None:
            raise InputError(FIELD, config.model.start_from, "cannot be started from: it has no checkpoint yet")
        return cls(folder)

    def plan(self, data: TokenData | LabelledData) -> Plan:
        """Its newest plan; data that was not made with its tokenizer, or its classes, is refused."""
        self.folder.check_alike(data, "data.path")
        return self.folder.newest_plan

    def check_order(self, config: Config, data: TokenData | LabelledData) -> None:
        """Say so where what the other run learnt from would come again, in the same order."""
        seed = config.data.seed
        if seed == self.folder.config.data.seed and data.index.digest == self.folder.data_digest:
            text = "data.seed = %d: the same data come in the same order as in %s; another number gives another order"
            logger.warning(text, seed, self.folder.path)

    def tensors(self, plan: Plan) -> dict[str, Tensor]:
        """Its weights, with gates as at the start where `plan` has some; a plan that they do not fit is refused."""
        checkpoint = load_newest(self.folder.checkpoints, logger.warning)
        assert checkpoint is not None
        fresh: dict[str, Tensor] = dict(build_model(plan).state_dict())
        tensors = {name: fresh[name] for name in GATES if name in fresh} | checkpoint.model
        shapes, found = ({name: tensor.shape for name, tensor in each.items()} for each in (fresh, tensors))
        if shapes != found:
            wrong = [name for name in sorted(shapes | found) if shapes.get(name) != found.get(name)]
            text = (
                f"has other weights than this run begins with ({listed(wrong, 4)}); growth must begin with all it has"
            )
            raise InputError(FIELD, str(self.folder.path), text)
        return tensors
