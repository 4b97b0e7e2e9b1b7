"""Growth inside a `transformers.Trainer`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from meristem.errors import InputError, RunError, missing_extra
from meristem.files import read_json, write_atomically
from meristem.growth import Grower
from meristem.runs.former_state import state_of_today
from meristem.runs.tensor_file import load_tensors, save_tensors

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing_extra("transformers", "hf") from error

GROWER_FILE = "grower.json"
TENSORS_FILE = "grower.safetensors"  # only where gauges remember something large
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class GrowthCallback(TrainerCallback):  # type: ignore[misc]  # has no types
    """Lets `grower` measure and grow after every update of a Trainer.

    `events` and `observations` collect what the grower says, each with its step; the Trainer's own log history has a
    line for every event. The grower looks at the tokens and targets of the last forward pass before an update. Its
    state is saved in every checkpoint, with what its gauges remember, and taken from there when training is resumed.
    """

    def __init__(self, grower: Grower) -> None:
        for name, policy in grower.policies.items():
            if policy.exchanges:
                expected = "exchanges parameters, which a Trainer would not follow; use meristem.train or your own loop"
                raise InputError("policy", name, expected)
        self.grower = grower
        self.events: list[dict[str, Any]] = []
        self.observations: list[dict[str, Any]] = []
        self._batch: tuple[Tensor, Tensor | None] | None = None
        self._hook: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step > 0:
            self._load(_checkpoint(args, state))
        self._release()  # a run that ended with an error left its hook behind
        self._hook = cast("torch.nn.Module", self.grower.model).register_forward_pre_hook(
            self._remember, with_kwargs=True
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self._batch is not None
        tokens, targets = self._batch
        with _autocast(args, tokens.device):
            growth = self.grower.step(tokens, targets)
        self._batch = None
        for event in growth.events:
            entry = {**event.to_dict(), "step": state.global_step}
            self.events.append(entry)
            state.log_history.append({"step": state.global_step, "growth": str(event)})
        if growth.observation is not None:
            self.observations.append({"step": state.global_step, **growth.observation})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not args.should_save:  # one process writes
            return
        folder = _checkpoint(args, state)
        if tensors := self.grower.tensors():
            save_tensors(folder / TENSORS_FILE, tensors)
        write_atomically(folder / GROWER_FILE, json.dumps(self.grower.state_dict()) + "\n")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._release()

    def _remember(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if model.training:  # evaluations in between are not what the update was made on
            given = dict(zip(("tokens", "targets"), inputs, strict=False)) | named
            self._batch = given["tokens"], given.get("targets")

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._batch = None

    def _load(self, folder: Path) -> None:
        """Go on from the grower's state in a checkpoint."""
        path, large = folder / GROWER_FILE, folder / TENSORS_FILE
        if not path.is_file():
            raise RunError(f"{path}: not found; growth can only be resumed from checkpoints of this output_dir")
        try:
            tensors = load_tensors(large) if large.is_file() else {}
            self.grower.load_state_dict(state_of_today(read_json(path), tensors, self.grower), tensors)
        except InputError as error:
            raise RunError(f"{folder}: does not fit this grower ({error})") from error


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the Trainer's checkpoint of the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _autocast(args: TrainingArguments, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the training steps. The Trainer puts it around `forward`, which a grower does not call."""
    dtype = MIXED.get(args.mixed_precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
