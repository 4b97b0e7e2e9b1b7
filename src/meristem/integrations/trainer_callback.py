"""Growth inside a `transformers.Trainer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from meristem.errors import InputError, RunError, missing_extra
from meristem.files import read_json, write_atomically
from meristem.growth import Grower
from meristem.growth.policy import ENDLESS
from meristem.integrations.hf_model import HfModel
from meristem.model import Decoder
from meristem.model.fused import IGNORE
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
    """Lets `grower` measure and grow after every update of a Trainer, and the Trainer's optimizer follow.

    The Trainer is given the grower's model in an `HfModel`, or, where no policy puts new parameters in the place of old
    ones, the model itself. `events` and `observations` collect what the grower says, each with its step; the Trainer's
    own log history has a line for every event. The grower looks at the tokens and targets of the last forward pass
    before an update. Its state is saved in every checkpoint, with what its gauges remember, and taken from there when
    training is resumed. Weight decay leaves the gates of loops alone, whichever group of the optimizer they are in.

        growth = GrowthCallback(Grower(model, policies=[policy]))
        trainer = Trainer(HfModel(model), arguments, train_dataset=items, callbacks=[growth])

    >>> growth = GrowthCallback(Grower(model, policies=[Observe(every=1)]))
    >>> growth.events, growth.observations
    ([], [])
    """

    def __init__(self, grower: Grower) -> None:
        if not isinstance(grower, Grower):
            raise InputError("grower", type(grower).__name__, "must be a Grower, such as Grower(model, policies=[...])")
        self.grower = grower
        self.events: list[dict[str, Any]] = []
        self.observations: list[dict[str, Any]] = []
        self._batch: tuple[Tensor, Tensor | None] | None = None
        self._looked = False  # whether the targets of a first batch have been looked at
        self._undo: list[Callable[[], None]] = []  # what is to be taken off again when training ends

    # --- what a Trainer calls ---------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs["model"]
        self._check_model(model)
        if isinstance(model, HfModel):  # a checkpoint is loaded before `on_train_begin`
            model.optimizer = kwargs.get("optimizer")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._release()  # a run that ended with an error left its hooks behind
        model, optimizer = kwargs["model"], _bare(kwargs["optimizer"])
        self._check_model(model)
        self._check_run(args, state)
        if self.grower.optimizer is not None and self.grower.optimizer is not optimizer:
            expected = "must be the Trainer's, as in Trainer(optimizers=(optimizer, None)), or left to it"
            raise InputError("grower.optimizer", type(self.grower.optimizer).__name__, expected)
        self.grower.attach(optimizer)
        if state.global_step > 0:
            self._load(_checkpoint(args, state))
        if self.grower.done != state.global_step:
            expected = f"must be {state.global_step}, as of the Trainer: take a new grower, or resume from a checkpoint"
            raise InputError("grower.done", self.grower.done, expected)
        self._hold(model, optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._batch is None:
            raise RunError("the Trainer has made an update without the grower's model: nothing to measure on")
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

    # --- what must be right -----------------------------------------------------------------------------------------

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a Trainer's model that is not the grower's, or that its checkpoints would not bring back."""
        own: object = model.model if isinstance(model, HfModel) else model
        if own is not self.grower.model:
            grown = type(self.grower.model).__name__
            expected = f"must be the {grown} that the grower grows, as it is or as HfModel(model)"
            raise InputError("Trainer.model", type(own).__name__, expected)
        if not isinstance(model, HfModel):
            for name in self._exchanging():
                expected = f"must be HfModel(model): {name} puts new parameters in the place of old ones"
                raise InputError("Trainer.model", type(model).__name__, expected)

    def _check_run(self, args: TrainingArguments, state: TrainerState) -> None:
        """Refuse policies that were made for a run of another length, or that several processes cannot follow."""
        for name, policy in self.grower.policies.items():
            steps = getattr(policy, "total_steps", ENDLESS)
            if steps not in (ENDLESS, state.max_steps):
                raise InputError(f"{name}.total_steps", steps, f"must be {state.max_steps}, the updates of the Trainer")
            policy.check_length()
        if args.world_size > 1 or args.n_gpu > 1:
            for name in self._exchanging():
                expected = (
                    "puts new parameters in the place of old ones, which a Trainer with several processes or GPUs does "
                    "not follow; use one, or meristem train"
                )
                raise InputError("policy", name, expected)

    def _exchanging(self) -> Iterator[str]:
        return (name for name, policy in self.grower.policies.items() if policy.exchanges)

    def _check_batch(self, tokens: Tensor, targets: Tensor) -> None:
        """Refuse targets that a language model could copy, or that are a token too far ahead. Looked at once."""
        self._looked = True
        if not isinstance(self.grower.model, Decoder) or targets.shape != tokens.shape:
            return
        if _ahead(tokens, targets, 0) and not _ahead(tokens, targets, 1):
            expected = "are equal to the tokens: the model would learn to copy; targets are tokens moved by one"
            raise InputError("targets", tuple(targets.shape), f"{expected}, or use HfModel, which moves its labels")
        if _ahead(tokens, targets, 2) and not _ahead(tokens, targets, 1):
            expected = "are moved by one already, which HfModel does itself: they must equal input_ids"
            raise InputError("labels", tuple(targets.shape), expected)

    # --- what is tied to a run --------------------------------------------------------------------------------------

    def _hold(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See what the model is trained on, and keep its gates from decay, until `_release`."""
        if isinstance(model, HfModel):
            model.seen, model.optimizer = self._see, optimizer
            self._undo.append(lambda: setattr(model, "seen", None))
        else:
            self._undo.append(model.register_forward_pre_hook(self._remember, with_kwargs=True).remove)
        self._undo += _without_decay(optimizer, lambda: getattr(self.grower.model, "gate_delta", None))

    def _release(self) -> None:
        for undo in self._undo:
            undo()
        self._undo, self._batch, self._looked = [], None, False

    def _remember(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """See the call of a model that is not in an HfModel."""
        if not model.training:  # evaluations in between are not what the update was made on
            return
        given = dict(zip(("tokens", "targets"), inputs, strict=False)) | named
        if "tokens" not in given or given.get("targets") is None:
            expected = (
                f"must be tokens and targets for a {type(model).__name__}; HfModel(model) takes input_ids and labels "
                "(TrainingArguments(remove_unused_columns=True) drops what a model does not take)"
            )
            raise InputError("columns", sorted(given), expected)
        self._see(given["tokens"], given["targets"])

    def _see(self, tokens: Tensor, targets: Tensor | None) -> None:
        if targets is None:
            expected = (
                "must be given to train: of a language model they equal input_ids, as DataCollatorForLanguageModeling("
                "tokenizer, mlm=False) makes them; of a classifier they are a class for each row"
            )
            raise InputError("labels", None, expected)
        if not self._looked:
            self._check_batch(tokens, targets)
        self._batch = tokens, targets

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


def _ahead(tokens: Tensor, targets: Tensor, count: int) -> bool:
    """Whether all targets are the tokens so many positions on; those that have none there do not count."""
    wanted, found = targets[:, : targets.shape[1] - count], tokens[:, count:]
    return bool(((wanted == found) | (wanted == IGNORE)).all())


def _without_decay(optimizer: torch.optim.Optimizer, gates: Callable[[], Tensor | None]) -> list[Callable[[], None]]:
    """Keep the weight decay of a step from the gates; returns how that is undone.

    They are in a group of their own while the optimizer steps, and then back where they were: a Trainer makes its
    groups anew when it is resumed, and they must be those that it saved.
    """
    homes: list[tuple[dict[str, Any], list[Any]]] = []

    def part(*call: Any) -> None:
        join()  # where a step has failed
        parameter = gates()
        for group in list(optimizer.param_groups):
            if group.get("weight_decay") and any(p is parameter for p in group["params"]):
                homes.append((group, group["params"]))
                group["params"] = [p for p in group["params"] if p is not parameter]
                optimizer.param_groups.append({**group, "params": [parameter], "weight_decay": 0.0})

    def join(*call: Any) -> None:
        while homes:
            group, parameters = homes.pop()
            group["params"] = parameters
            optimizer.param_groups.pop()

    return [optimizer.register_step_pre_hook(part).remove, optimizer.register_step_post_hook(join).remove, join]


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch within what accelerate, which every Trainer works with, has put around it."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return cast("torch.optim.Optimizer", optimizer)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the Trainer's checkpoint of the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _autocast(args: TrainingArguments, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the training steps. The Trainer puts it around `forward`, which a grower does not call."""
    dtype = MIXED.get(args.mixed_precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
