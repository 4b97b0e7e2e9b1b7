"""A run as a folder of Hugging Face transformers, with the code of its model inside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meristem.export.reference import Reference, reference_of
from meristem.export.slots import named_tensors, stack_config, unroll
from meristem.export.tokenizer_files import STANDALONE, SpecialTokens, write_recipe, write_tokenizer
from meristem.model import Decoder, Transformer
from meristem.plan import Plan
from meristem.runs.run_folder import LoadedRun
from meristem.runs.tensor_file import save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODE = ("configuration_meristem.py", "modeling_meristem.py")
CHECK_FILE = "check.py"


class Written(NamedTuple):
    """What was written: the class that loads it, what is to be said of it, and how far it is from the run.

    The `difference` is the largest one of a logit; None where it could not be measured, and `unchecked` says why.
    """

    architecture: str
    difference: float | None
    notes: tuple[str, ...] = ()
    unchecked: str = f"not checked: what loads it is not installed here; run its {CHECK_FILE} where it is"

    @property
    def verdict(self) -> str:
        """Whether it says what the run says, in words."""
        if self.difference is None:
            return self.unchecked
        return f"checked: the largest difference of a logit is {self.difference:.2e}"


def write_hf(loaded: LoadedRun, folder: Path) -> Written:
    """Write the model as it is: a layer for every attention pass, each of its own shape."""
    tokens = write_texts_files(loaded, folder)
    labels = () if isinstance(loaded.model, Decoder) else loaded.recipe.classes
    config, tensors = hf_config(loaded.model, tokens, labels), named_tensors(unroll(loaded.model))
    for name in CODE:
        shutil.copyfile(STANDALONE / name, folder / name)
    reference = write_model(loaded, folder, config, tensors, tokens)
    (architecture,) = config["architectures"]
    return Written(architecture, hf_difference(folder, reference, architecture), _copies(loaded.model.plan, tensors))


def _copies(plan: Plan, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """What it costs that parts which are run again have weights for every time, in words; nothing if none are."""
    if not plan.is_looped:
        return ()
    parameters = sum(map(Tensor.numel, tensors.values()))
    return (
        f"every attention pass is a layer with its own weights: {parameters:,} parameters instead of "
        f"{plan.parameters:,} ({parameters / plan.parameters:.2f} times)",
    )


def hf_config(model: Transformer, tokens: SpecialTokens, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The content of `config.json`; `labels` name what a classifier tells apart."""
    sizes = unroll(model).sizes
    shared = stack_config(model, sizes)
    different = {
        str(index): {name: value for name, value in size.fields.items() if value != shared[name]}
        for index, size in enumerate(sizes)
    }
    different = {index: fields for index, fields in different.items() if fields}
    return {
        "model_type": "meristem",
        **_classes(model, labels),
        **shared,
        **({"per_layer_config": different} if different else {}),
        "is_causal": isinstance(model, Decoder),
        "classifier_pooling": "last" if isinstance(model, Decoder) else model.plan.pooling,
        "qk_norm": model.plan.qk_norm,
        "use_cache": isinstance(model, Decoder),
        **tokens.fields,
        "plan": model.plan.to_dict(),
    }


def _classes(model: Transformer, labels: Sequence[str]) -> dict[str, Any]:
    """Which classes load the folder, and the names of what a classifier tells apart."""
    auto = {"AutoConfig": "configuration_meristem.MeristemConfig", "AutoModel": "modeling_meristem.MeristemModel"}
    sequences = {"AutoModelForSequenceClassification": "modeling_meristem.MeristemForSequenceClassification"}
    if isinstance(model, Decoder):
        causal = {"AutoModelForCausalLM": "modeling_meristem.MeristemForCausalLM"}
        return {"architectures": ["MeristemForCausalLM"], "auto_map": {**auto, **causal, **sequences}}
    return {
        "architectures": ["MeristemForSequenceClassification"],
        "auto_map": {**auto, **sequences},
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def write_texts_files(loaded: LoadedRun, folder: Path) -> SpecialTokens:
    """Write what makes ids of texts."""
    context = loaded.model.plan.context
    if isinstance(loaded.model, Decoder):
        return write_tokenizer(folder, loaded.tokenizer, context)
    return write_recipe(folder, loaded.recipe, context)


def write_model(
    loaded: LoadedRun, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], tokens: SpecialTokens
) -> Reference:
    """Write configuration, weights, the settings of `generate`, and the reference with its check; the reference."""
    _write_json(folder / "config.json", config)
    save_tensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    if isinstance(loaded.model, Decoder):
        # Ids that no text has only fill up the vocabulary; they are never drawn here either.
        unused = list(range(loaded.tokenizer.vocabulary, loaded.model.plan.vocabulary))
        _write_json(
            folder / "generation_config.json", {**tokens.fields, **({"suppress_tokens": unused} if unused else {})}
        )
    reference = reference_of(loaded.model, token_ids(loaded))
    reference.save(folder)
    shutil.copyfile(STANDALONE / CHECK_FILE, folder / CHECK_FILE)
    return reference


def token_ids(loaded: LoadedRun) -> int:
    """The number of ids that texts can have."""
    known = loaded.tokenizer.vocabulary if isinstance(loaded.model, Decoder) else loaded.recipe.ids
    return min(known, loaded.model.plan.vocabulary)


def hf_difference(folder: Path, reference: Reference, architecture: str) -> float | None:
    """How far the model that transformers makes of a folder is from the reference; None without transformers."""
    try:
        found = load_exported(folder, architecture)
    except ImportError:
        return None
    return reference.difference(lambda ids, mask: found(input_ids=ids, attention_mask=mask).logits)


def load_exported(folder: Path, architecture: str) -> PreTrainedModel:
    """The model in a folder, by our own copy of the code inside, or as a stock class of transformers."""
    own = architecture.startswith("Meristem")
    home = import_module("meristem.export.standalone.modeling_meristem" if own else "transformers")
    with _without_progress_bars():
        return getattr(home, architecture).from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
