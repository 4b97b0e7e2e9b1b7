"""Our models, called as Hugging Face's are: `input_ids`, `attention_mask` and `labels` in, loss and logits out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from meristem.decoding import Sampling, generate
from meristem.decoding.generate import room
from meristem.errors import InputError, RunError, missing_extra
from meristem.growth.apply import adopt
from meristem.limits import check_integer
from meristem.model import Classifier, Decoder, Regions, build_model
from meristem.model.fused import IGNORE
from meristem.model.inputs import INDICES, check_classes, check_targets, check_tokens
from meristem.plan import PADDING, Plan
from meristem.runs.tensor_file import load_tensors, save_tensors

try:
    from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
except ImportError as error:
    raise missing_extra("transformers", "hf") from error

WEIGHTS_FILE = "model.safetensors"  # as a Trainer calls it
PLAN = "plan"  # the name of the structure among the weights
RECOMPUTATION = {"use_reentrant": False, "every_n_layers": 1, "offload": False}  # what can be asked of it
Seen = Callable[[Tensor, Tensor | None], None]


class Rows(NamedTuple):
    """A batch as our models take it: padding on the right, and how many positions each row was moved to the left."""

    tokens: Tensor  # (B, T)
    real: Tensor | None  # (B, T), boolean: which of them are no padding; None if all
    moved: Tensor | None  # (B,); None if none was

    def like(self, values: Tensor) -> Tensor:
        """Values (B, T) that belong to the positions of the batch as it came, moved with it."""
        return values if self.moved is None else values.gather(1, _places(values, self.moved))

    def back(self, values: Tensor) -> Tensor:
        """Values (B, T, d) of these positions, where they were in the batch as it came."""
        if self.moved is None:
            return values
        return values.gather(1, _places(values, -self.moved)[..., None].expand_as(values))


class HfModel(nn.Module):
    """A Decoder or a Classifier that takes and gives what Hugging Face's models do.

    Labels have Hugging Face's meaning. Those of a language model stand where `input_ids` stand and are moved by one
    inside: labels equal to the inputs train it to predict the next token. -100, and what `attention_mask` leaves out,
    is not asked for. Those of a classifier are one class for each row, and its padding has the id 0. Padding may be on
    either side. With labels there are loss and logits; `logits_in_training=False` saves the memory of the latter, which
    a Trainer does not look at, in training steps.

    The structure is saved among the weights, so that `load_state_dict` can give it back: a Trainer that goes on from a
    checkpoint finds all that has grown.

        trainer = Trainer(HfModel(model), arguments, train_dataset=items)  # items of {"input_ids", "labels"}

    >>> wrapped = HfModel(model)
    >>> wrapped(input_ids=tokens, labels=tokens).loss.backward()
    >>> wrapped(input_ids=tokens).logits.shape
    torch.Size([2, 16, 100])
    """

    accepts_loss_kwargs = True  # so a Trainer says how many labels the micro-batches of an update have in all
    supports_gradient_checkpointing = True

    def __init__(self, model: Decoder | Classifier, *, logits_in_training: bool = True) -> None:
        super().__init__()
        if not isinstance(model, Decoder | Classifier):
            raise InputError("model", type(model).__name__, "must be a Decoder or a Classifier of Meristem")
        self.model = model
        self.logits_in_training = logits_in_training
        self.loss_type = "ForCausalLM" if isinstance(model, Decoder) else "ForSequenceClassification"
        self.optimizer: torch.optim.Optimizer | None = None  # follows when weights of another structure are loaded
        self.regions = Regions()  # how blocks are run: as they are, or again in the backward pass
        self.seen: Seen | None = None  # shown tokens and targets of every training step, as the model takes them
        self.register_state_dict_post_hook(_add_structure)
        self.register_load_state_dict_pre_hook(_take_structure)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        """Logits, (B, T, V) of a language model and (B, classes) of a classifier, and with labels the loss, a scalar.

        Ids and mask are (B, T); labels are (B, T) of a language model and (B,) of a classifier. `num_items_in_batch` is
        the number of labels in all micro-batches of an update, by which the loss is shared out.

        >>> mask = torch.ones_like(tokens)
        >>> HfModel(model)(input_ids=tokens, attention_mask=mask, labels=tokens).logits.shape
        torch.Size([2, 16, 100])
        """
        _refuse(others, "input_ids, attention_mask and labels")
        rows = self._rows(input_ids, attention_mask)
        targets = None if labels is None else self._targets(labels, rows)
        if self.training and self.seen is not None:
            self.seen(rows.tokens, targets)
        wanted = targets is None or self.logits_in_training or not self.training
        loss, logits = self._scores(rows, targets, wanted)
        if loss is not None and labels is not None and num_items_in_batch is not None:
            counted = labels[:, 1:] if isinstance(self.model, Decoder) else labels  # as a Trainer counts them
            loss = loss * ((counted != IGNORE).sum() / num_items_in_batch)
        output = CausalLMOutput if isinstance(self.model, Decoder) else SequenceClassifierOutput
        return output(loss=loss, logits=logits)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> Tensor:
        """The prompts (B, T), padded on the left, and what follows them: (B, T + new tokens).

        Rows that have ended, with `eos_token_id`, are filled up with `pad_token_id`, or with more of the former. Draws
        follow torch's own seed.

        >>> HfModel(model).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5).shape
        torch.Size([1, 8])
        """
        _refuse(others, "do_sample, temperature, top_k, top_p, max_new_tokens, eos_token_id and pad_token_id")
        check_integer("max_new_tokens", max_new_tokens, 1)
        for field, value in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
            if value is not None:
                check_integer(field, value, 0)
        model = self.model
        if not isinstance(model, Decoder):
            raise InputError("model", type(model).__name__, "must be a Decoder: only a language model continues a text")
        rows = self._rows(input_ids, attention_mask)
        given = cast("Tensor", input_ids)
        lengths = [given.shape[1]] * len(given) if rows.real is None else rows.real.sum(1).tolist()
        moved = [0] * len(given) if rows.moved is None else rows.moved.tolist()
        if any(before + length != given.shape[1] for before, length in zip(moved, lengths, strict=True)):
            raise InputError("attention_mask", "padding on the right", 'must have it on the left (padding_side="left")')
        prompts = [row[:length] for row, length in zip(rows.tokens.tolist(), lengths, strict=True)]
        if max_new_tokens > (most := room(model, prompts)):
            expected = f"must be at most {most}: context {model.plan.context}, prompt {max(lengths)}"
            raise InputError("max_new_tokens", max_new_tokens, expected)
        seed = int(torch.randint(1 << 62, ())) if do_sample else 0
        sampling = Sampling(temperature, top_k, top_p, seed) if do_sample else Sampling(temperature=0)
        new = generate(model, prompts, max_tokens=max_new_tokens, sampling=sampling, end_of_text=eos_token_id)
        filled = _filled(new, max_new_tokens, eos_token_id, pad_token_id)
        return torch.cat([given, torch.tensor(filled, dtype=given.dtype, device=given.device)], dim=1)

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep the inputs of blocks only and run them again in the backward pass: the same gradients, less memory.

        `TrainingArguments(gradient_checkpointing=True)` asks for it.

        >>> wrapped = HfModel(model)
        >>> wrapped.gradient_checkpointing_enable()
        >>> wrapped.is_gradient_checkpointing
        True
        >>> wrapped.gradient_checkpointing_disable()
        """
        from meristem.training.compilation import recomputed  # brings the compiler along

        asked = {**(gradient_checkpointing_kwargs or {}), "every_n_layers": every_n_layers, "offload": offload}
        for name, value in asked.items():
            if (name, value) not in RECOMPUTATION.items():
                known = ", ".join(f"{name}={value}" for name, value in RECOMPUTATION.items())
                raise InputError(f"gradient_checkpointing_kwargs.{name}", value, f"is not taken here; {known} are")
        self.regions = recomputed(Regions())

    def gradient_checkpointing_disable(self) -> None:
        """Keep what blocks compute, as they do without `gradient_checkpointing_enable`."""
        self.regions = Regions()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are run again in the backward pass."""
        return self.regions != Regions()

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(
                "an HfModel has a plan and no config of transformers: label_smoothing_factor must be 0 (a Trainer "
                "would smooth labels without moving them by one), and model cards come with `meristem export`"
            )
        return super().__getattr__(name)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and structure into a folder, as a Trainer saves them; `from_pretrained` takes them up.

        What others can load is made by `meristem export`, from a run.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(path / WEIGHTS_FILE, self.state_dict(), metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> HfModel:
        """The model that `save_pretrained` or a Trainer has saved in a folder, such as `output_dir/checkpoint-500`.

        >>> HfModel(model).save_pretrained("saved")
        >>> HfModel.from_pretrained("saved").model.plan == plan
        True
        """
        path = Path(folder) / WEIGHTS_FILE
        tensors = load_tensors(path)
        if PLAN not in tensors:
            raise RunError(f"{path}: has no {PLAN!r}: it was not saved from an HfModel")
        model = cls(cast("Decoder | Classifier", build_model(_plan(tensors[PLAN]))))
        model.load_state_dict(tensors)
        return model

    # --- from Hugging Face's meaning to ours ------------------------------------------------------------------------

    def _rows(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Rows:
        """The batch with its padding on the right. To look at the mask is to wait for the device, once a call."""
        if input_ids is None:
            raise InputError("input_ids", None, "must be given: token ids, (B, T); has the dataset such a column?")
        check_tokens(input_ids, self.model.plan.vocabulary, "input_ids")
        classifies = isinstance(self.model, Classifier)
        if attention_mask is None:
            if not classifies:
                return Rows(input_ids, None, None)
            attention_mask = input_ids != PADDING
        elif not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
            shape = getattr(attention_mask, "shape", None)
            found = type(attention_mask).__name__ if shape is None else tuple(shape)
            raise InputError("attention_mask", found, f"must be {tuple(input_ids.shape)}, as input_ids are")
        real = attention_mask != 0
        begins = real & ~real.roll(1, 1)
        begins[:, 0] = real[:, 0]
        before, runs = (real.cumsum(1) == 0).sum(1), begins.sum(1)
        clash = (real & (input_ids == PADDING)).any() if classifies else torch.zeros_like(real[0, 0])
        least, most, first, padded, zeros = torch.stack(
            [runs.min(), runs.max(), before.max(), (~real).any().long(), clash.long()]
        ).tolist()
        if least != 1 or most != 1:
            text = "a row without a one" if least < 1 else "zeros between ones"
            raise InputError("attention_mask", text, "must be ones in every row with zeros before or after them only")
        if zeros:
            raise InputError("input_ids", PADDING, "is padding to a classifier, and must be so in attention_mask")
        if not padded:
            return Rows(input_ids, None, None)
        rows = Rows(input_ids, real, before if first else None)
        real, tokens = rows.like(real), rows.like(input_ids)
        return Rows(tokens.masked_fill(~real, PADDING) if classifies else tokens, real, rows.moved)

    def _targets(self, labels: Tensor, rows: Rows) -> Tensor:
        """What the model is asked for: of a language model the token after each position, of a classifier the class."""
        if isinstance(self.model, Classifier):
            check_targets(labels, (len(rows.tokens),), "the class of each row", (torch.int64, torch.uint8), "labels")
            check_classes(labels, self.model.classes.out_features)
            return labels
        check_targets(labels, tuple(rows.tokens.shape), "the tokens, -100 where none is asked for", INDICES, "labels")
        own = rows.like(labels)
        if rows.real is not None:
            own = own.masked_fill(~rows.real, IGNORE)
        return torch.cat([own[:, 1:], torch.full_like(own[:, :1], IGNORE)], dim=1)

    def _scores(self, rows: Rows, targets: Tensor | None, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        """The loss if there are targets, and the logits if they are wanted."""
        model = self.model
        if targets is not None and not wanted:
            return model.loss(rows.tokens, targets, self.regions), None
        if isinstance(model, Classifier):
            logits = model.logits(rows.tokens, self.regions)
            return None if targets is None else model.loss_of(logits, targets), logits
        normed = model.normed(rows.tokens, regions=self.regions)
        loss = None if targets is None else model.loss_of(normed, targets)
        return loss, model.unembed(rows.back(model.norm.gained(normed)))


def _places(values: Tensor, moved: Tensor) -> Tensor:
    """The positions (B, T) that those of rows moved to the left had before."""
    length = values.shape[1]
    return (torch.arange(length, device=values.device) + moved[:, None]) % length


def _filled(new: list[list[int]], most: int, eos_token_id: int | None, pad_token_id: int | None) -> list[list[int]]:
    """Continuations of one length: each that has ended gets its end, and padding after that."""
    if eos_token_id is None:
        return new
    ended = [row if len(row) == most else [*row, eos_token_id] for row in new]
    fill = eos_token_id if pad_token_id is None else pad_token_id
    length = max(map(len, ended))
    return [row + [fill] * (length - len(row)) for row in ended]


def _refuse(others: dict[str, Any], known: str) -> None:
    for name, value in others.items():
        shown = tuple(value.shape) if isinstance(value, Tensor) else value
        raise InputError(name, shown, f"is not taken here; {known} are")


def _add_structure(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The plan goes with the weights, as the bytes of its JSON text: files of tensors hold nothing else."""
    text = cast("HfModel", module).model.plan.to_json()
    state[prefix + PLAN] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _take_structure(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Give the model the structure that weights to be loaded belong to."""
    stored = state.pop(prefix + PLAN, None)
    if stored is None:
        return
    wrapper, own = cast("HfModel", module), f"{prefix}model."
    plan = _plan(stored)
    if plan != wrapper.model.plan:
        tensors = {name.removeprefix(own): tensor for name, tensor in state.items() if name.startswith(own)}
        adopt(wrapper.model, wrapper.optimizer, plan, tensors, {})


def _plan(stored: Tensor) -> Plan:
    return Plan.from_json(bytes(stored.tolist()).decode(errors="replace"))
