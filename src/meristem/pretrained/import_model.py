"""A folder as Hugging Face's library saves models, made a run."""

from __future__ import annotations

from pathlib import Path

import torch

from meristem.config import Config, ModelConfig
from meristem.data import load_tokenizer
from meristem.errors import InputError
from meristem.files import read_json
from meristem.pretrained.families import family_of, plan_of
from meristem.pretrained.weights import SafetensorsFolder, model_tensors, with_own_keys
from meristem.runs.run_folder import RunFolder
from meristem.runs.start import write_start
from meristem.runs.tensor_file import NotFinite


def import_model(
    folder: str | Path, out: str | Path, *, context: int | None = None, own_keys: bool = False,
    tokenizer: str | Path | None = None, end_of_text: str | None = None,
) -> RunFolder:  # fmt: skip
    """Make a run of a model that Hugging Face's library has saved in `folder`; its logits are the same.

    `context` is shorter than that of the model, if it is given. With `own_keys` heads that share keys and values get
    copies of their own, so that heads can come and go. The tokenizer is that of the folder, unless another is named,
    and so is its token that ends a text.

    >>> llama = export_run("runs/first", "exported/llama", to="llama").folder
    >>> run = import_model(llama, "runs/imported")
    >>> run.plan.heads
    (4, 4)
    """
    source = Path(folder)
    config = read_json(source / "config.json")
    family, plan = family_of(config), plan_of(config, context)
    text = load_tokenizer(source if tokenizer is None else tokenizer, end_of_text)
    if text.vocabulary > plan.vocabulary:
        expected = f"token ids are more than the {plan.vocabulary} of the model; name its own tokenizer"
        raise InputError("tokenizer", text.vocabulary, expected)
    weights = SafetensorsFolder(source)
    tensors = model_tensors(plan, family, weights)
    if plan.tied and "lm_head.weight" in weights.unread:
        output = weights.read("lm_head.weight", plan.vocabulary, plan.width)
        if not torch.equal(output, weights.read("model.embed_tokens.weight", plan.vocabulary, plan.width)):
            expected = "is not the embedding, though config.json has tie_word_embeddings"
            raise InputError("lm_head.weight", "another matrix", expected)
    weights.check_all_read()
    if own_keys:
        plan, tensors = with_own_keys(plan, tensors)
    own = Config(model=ModelConfig(plan="plan.json"))
    try:
        with RunFolder.created(Path(out), own, plan, text, lambda run: write_start(run, own, plan, tensors)) as run:
            return run
    except NotFinite as error:
        raise InputError(str(error), "NaN or infinity", f"must be finite in the weights of {source}") from None
