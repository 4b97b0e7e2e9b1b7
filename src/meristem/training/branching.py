"""Branching off: a new run that begins at a checkpoint of another one, its trunk, and lets the learning rate fall.

The new run is whole from its first moment: it has a copy of the checkpoint, and of the logs until then. The trunk is
only read, may be running meanwhile, and is not needed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meristem.config import Config, check_branch
from meristem.data import LabelledData, TokenData
from meristem.errors import InputError, RunError
from meristem.files import read_bytes
from meristem.plan import Plan
from meristem.runs.checkpoint import (
    Checkpoint,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    step_of,
    write_checkpoint,
)
from meristem.runs.divergence import Rewind, write_rewinds
from meristem.runs.log import Log, log_until, positions
from meristem.runs.origin import first_difference
from meristem.runs.run_folder import PRUNE_FILE, RunFolder, binding
from meristem.runs.start import write_start
from meristem.training.distributed import Processes
from meristem.training.going_on import rewind_event
from meristem.training.optimizer import constant_part
from meristem.training.starting import Start
from meristem.wording import listed

logger = logging.getLogger(__name__)

# Events that may stand behind a checkpoint in the log of its run though they are of its step.
LATER = ("checkpoint", "finished", "rewind", "stopped", "diverged", "start", "resume", "branch")


@dataclass(frozen=True)
class Trunk:
    """A run, and the step of one of its checkpoints."""

    folder: RunFolder
    step: int

    @classmethod
    def of(cls, config: Config) -> Trunk | None:
        """What a run branches off, None if it does not; that there is no such checkpoint is said."""
        run, step = config.train.branch_run, config.train.branch_step
        if run is None or step is None:
            return None
        try:
            folder = RunFolder.open(Path(run))
        except RunError as error:
            raise InputError(
                "train.branch_from", config.train.branch_from, f"cannot be branched off: {error}"
            ) from None
        steps = [step_of(path) for path in list_checkpoints(folder.checkpoints)]
        if step not in steps:
            known = f"there are [{listed(list(map(str, steps)), 20)}]" if steps else "there is none yet"
            expected = f"has no checkpoint of step {step}; {known} (checkpoint.every and .keep say which stay)"
            raise InputError("train.branch_from", config.train.branch_from, expected)
        return cls(folder, step)

    def followed(self, config: Config, data: TokenData | LabelledData) -> Config:
        """The configuration of a branch, with the clock of the trunk's growth; what does not go together is refused."""
        trunk = self.folder.config
        if trunk.train.flops is not None:
            expected = f"ends {self.folder.path}, which so cannot be branched off: branches have train.steps"
            raise InputError("train.flops", trunk.train.flops, expected)
        check_branch(trunk, config)
        if data.index.digest != self.folder.data_digest:
            expected = f"is not the data that {self.folder.path} began with (its tokens differ)"
            raise InputError("data.path", str(data.folder), expected)
        warmup, decay = constant_part(trunk.train.steps, trunk.optimizer, trunk.train.branch_step)
        if not warmup <= self.step <= decay:
            expected = f"must be from step {warmup} to {decay}, while the learning rate of that run stays at its peak"
            if (before := trunk.train.branch_run) is not None:
                expected = f"is a branch too, whose learning rate falls from step {decay} on; branch off {before}"
            raise InputError("train.branch_from", config.train.branch_from, expected)
        if not trunk.growth.policies:
            return config
        if config.growth.steps not in (None, trunk.clock):
            expected = f"must be {trunk.clock}, the clock of {self.folder.path}, or not be given"
            raise InputError("growth.steps", config.growth.steps, expected)
        return replace(config, growth=replace(config.growth, steps=trunk.clock))

    def check_plan(self, plan: Plan) -> None:
        """Refuse a branch that would not have begun with the structure of its trunk."""
        if (field := first_difference(plan, self.folder.plan)) is not None:
            raise InputError("[model]", field, f"is not what {self.folder.path} began with (see its plan.json)")

    def load(self) -> Checkpoint:
        """The checkpoint."""
        return load_checkpoint(self.folder.checkpoints / checkpoint_name(self.step))

    def rewinds(self, known: int) -> tuple[Rewind, ...]:
        """The trunk's returns that its checkpoint knows, and those until the last one to that very checkpoint.

        What was passed over since then is no business of a branch.
        """
        rewinds = self.folder.rewinds
        returns = [number for number, rewind in enumerate(rewinds, 1) if rewind.to_step == self.step]
        return rewinds[: max([known, *returns])]

    def fill(
        self, run: RunFolder, config: Config, checkpoint: Checkpoint,
        add: Callable[[RunFolder], None] = lambda run: None,
    ) -> None:  # fmt: skip
        """Give a run that has an origin, and nothing more, all that it goes on from.

        `add` writes to its logs what happened between the trunk's checkpoint and this one, if it is another.
        """
        state = checkpoint.state
        known = positions(state)
        for log, source in zip(run.logs, self.folder.logs, strict=True):
            content = read_bytes(source) if source.is_file() else b""
            kept, wrong = log_until(content, self.step, known.get(source.name), LATER)
            if wrong:
                logger.warning("%s: is not what was recorded until step %d (%s)", source, self.step, wrong)
            if kept:
                log.write_bytes(kept)
        events, told = Log(run.events), list(run.read(run.events))
        if rewinds := self.rewinds(state.get("rewinds", 0)):
            write_rewinds(run.path, rewinds)
        for event in (rewind_event(rewind) for rewind in rewinds if rewind.to_step <= self.step):
            if event not in told:
                events.append(event)
        events.append({"step": self.step, "event": "branch", "run": str(self.folder.path)})
        add(run)
        logs = {log.name: Log(log).position.to_dict() for log in run.logs}
        own = {
            **state, **binding(run, config), "logs": logs, "rewinds": len(rewinds),
            "good": True,  # there is nothing before it to go back to
        }  # fmt: skip
        if not config.train.average:  # it would stay as it is, an average of the trunk alone
            checkpoint = checkpoint.without_average()
        write_checkpoint(run.checkpoints, checkpoint.with_state(own, run.logs))
        events.append({"step": self.step, "event": "checkpoint", "path": checkpoint_name(self.step)})


def begin_anew(
    run: RunFolder, config: Config, data: TokenData | LabelledData, peers: Processes, say: Callable[[str], None]
) -> None:
    """Put aside what a run has done; one that began with something of another run is given that again."""
    if (run.path / PRUNE_FILE).is_file():
        raise InputError("run", str(run.path), "was pruned, and has no start of its own; prune its source again")
    trunk, start = Trunk.of(config), Start.of(config)
    if trunk is not None:
        trunk.followed(config, data)
    if peers.first:
        checkpoint = None if trunk is None else trunk.load()  # before anything is touched
        weights = start.tensors(run.plan) if start is not None and trunk is None else None
        say(f"beginning from the start; what was there is kept in {run.set_aside()}")
        if trunk is not None and checkpoint is not None:
            trunk.fill(run, config, checkpoint)
        if weights is not None:
            write_start(run, config, run.plan, weights)
