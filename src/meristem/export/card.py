"""The model card of an exported folder: what it is, what it costs, how it was trained, and how it is loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from meristem import __version__
from meristem.data import LabelledIndex, open_data
from meristem.errors import InputError, RunError
from meristem.export.hf import CHECK_FILE, Written
from meristem.model import Decoder
from meristem.report.structure_figure import looped, structure_svg
from meristem.runs.entries import sound_metrics, whole_length
from meristem.runs.origin import NO_DATA
from meristem.runs.run_folder import LoadedRun
from meristem.wording import counted

CARD_FILE, PICTURE_FILE = "README.md", "structure.svg"


def write_card(folder: Path, loaded: LoadedRun, to: str, written: Written, *, average: bool) -> None:
    """Write `README.md` and the picture in it."""
    name = loaded.folder.path.resolve().name
    (folder / PICTURE_FILE).write_text(structure_svg(loaded.model.plan, title=name), encoding="utf-8")
    sections = [
        _header(loaded, to),
        f"# {name}",
        _introduction(loaded, written),
        f"![The structure of the model: heads of every layer]({PICTURE_FILE})",
        "## How to load it",
        _loading(loaded, to, written),
        *(["## What this format costs", "\n".join(f"- {note}" for note in written.notes)] if written.notes else []),
        "## Costs",
        _table(_costs(loaded)),
        "## Training",
        _table(_training(loaded, average=average)),
        "## Before you rely on it",
        _caveats(loaded, to, written),
    ]
    (folder / CARD_FILE).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _header(loaded: LoadedRun, to: str) -> str:
    """What the Hub reads. The license is the owner's to choose."""
    task = "text-generation" if isinstance(loaded.model, Decoder) else "text-classification"
    library = {"hf": "transformers", "llama": "transformers", "onnx": "onnx", "gguf": "gguf"}[to]
    tags = "\n".join(f"- {tag}" for tag in ("meristem", *_methods(loaded)))
    return f"---\nlibrary_name: {library}\npipeline_tag: {task}\n# license: yours to choose\ntags:\n{tags}\n---"


def _methods(loaded: LoadedRun) -> list[str]:
    """The ways of growing that the run was configured with; to observe is none."""
    return sorted(set(loaded.config.growth.policies) - {"observe"})


def _introduction(loaded: LoadedRun, written: Written) -> str:
    plan = loaded.model.plan
    kind = "A language model" if plan.classes is None else f"A classifier ({counted(plan.classes, 'class', 'es')})"
    again = [
        f"layer {index}: {looped(layer)}" for index, layer in enumerate(plan.layers) if layer.loop or layer.repeats
    ]
    text = (
        f"{kind} with {plan.parameters:,} parameters in {counted(len(plan.layers), 'layer')} of width {plan.width}, "
        f"trained and exported with Meristem {__version__} as "
        f"`{written.architecture}`."
    )
    return text + (f" Some layers run parts of themselves again ({'; '.join(again)})." if again else "")


def _loading(loaded: LoadedRun, to: str, written: Written) -> str:
    if to == "gguf":
        return 'With llama.cpp:\n\n    llama-cli -m model.gguf -p "Once upon a time"'
    if to == "onnx":
        files = "`model.onnx` takes `input_ids` and `attention_mask` (batch, length) and gives `logits`."
        if isinstance(loaded.model, Decoder):
            files += (
                " `model_with_past.onnx` also takes and gives the keys and values of each layer, "
                "`past_key_values.N.key` and so on, (batch, heads, length, head dim)."
            )
        return f'{files} With onnxruntime:\n\n    onnxruntime.InferenceSession("model.onnx").run(None, inputs)'
    trust = ", trust_remote_code=True" if written.architecture.startswith("Meristem") else ""
    flag = "Without the flag it loads after `import meristem`.\n\n" if trust else ""
    if isinstance(loaded.model, Decoder):
        auto, use = (
            "AutoModelForCausalLM",
            (
                'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
                "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"
            ),
        )
    else:
        auto, use = (
            "AutoModelForSequenceClassification",
            (
                'inputs = tokenizer(["a text"], truncation=True, padding=True, return_tensors="pt")\n'
                "print(model.config.id2label[int(model(**inputs).logits[0].argmax())])"
            ),
        )
    return (
        f"```python\nfrom transformers import {auto}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("this/folder"{trust})\n'
        f'model = {auto}.from_pretrained("this/folder"{trust})\n{use}\n```\n\n{flag}'
        f"`python {CHECK_FILE}` compares the model, as your machine loads it, with logits from where it was exported."
    )


def _costs(loaded: LoadedRun) -> dict[str, str]:
    plan = loaded.model.plan
    cost = plan.cost
    rows = {
        "parameters": f"{cost.parameters:,}",
        "FLOPs per token, forward (causal)": f"{cost.forward.causal:,}",
        "heads per layer": " ".join(map(str, plan.heads)),
        "head dims": " ".join(map(str, plan.head_dims)),
        "key/value heads": " ".join(map(str, plan.kv_heads)),
        "context": counted(plan.context, "token"),
    }
    if plan.classes is None:
        rows["KV cache per token, in 16 bits"] = counted(cost.kv_bytes_per_token, "byte")
    return rows


def _training(loaded: LoadedRun, *, average: bool) -> dict[str, str]:
    """What the files of the run say about its training up to the step."""
    folder, train = loaded.folder, loaded.config.train
    plan = {"plan (digest)": f"`{loaded.model.plan.digest}`"}
    if folder.data_digest == NO_DATA:
        return {"data": "none: the model was imported", **plan}
    entries = [e for e in sound_metrics(folder.read(folder.metrics), train.steps) if e["step"] <= loaded.step]
    newest: dict[str, Any] = {}
    for entry in entries:
        newest |= {name: value for name, value in entry.items() if value is not None}
    rows = {"steps": f"{loaded.step:,} of {whole_length(entries, train.steps, train.flops):,}"}
    if average:
        rows["weights"] = f"average over the training (train.average = {train.average})"
    if isinstance(newest.get("tokens"), int):
        rows["tokens"] = f"{newest['tokens']:,}"
    for label, key in {
        "training loss": "loss",
        "held-out loss": "held_out_loss_average" if average else "held_out_loss",
        "held-out accuracy": "accuracy",
    }.items():
        value = newest.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            rows[label] = f"{value:.4f}"
    if isinstance(newest.get("epoch"), int | float):
        rows["epochs"] = f"{newest['epoch']:.3g}"
    optimizer = loaded.config.optimizer
    rows["optimizer"] = f"{optimizer.kind}, rate {optimizer.lr:g}, {counted(train.batch_size, 'row')} an update"
    rows["growth"] = ", ".join(_methods(loaded)) or "none"
    if (start := loaded.config.model.start_from) is not None:
        rows["began with the weights of"] = Path(start).name
    return {**rows, **_data(loaded), "data (digest)": f"`{folder.data_digest}`", **plan}


def _data(loaded: LoadedRun) -> dict[str, str]:
    """How much data there was, where it still is."""
    try:
        data = open_data(loaded.config.data.path, check=False)
        loaded.folder.check_data(data)
    except (InputError, RunError):
        return {}
    index = data.index
    if isinstance(index, LabelledIndex):
        return {"data": f"{counted(index.train.rows, 'training row')}, {index.held_out.rows:,} held out"}
    documents = counted(index.train.documents, "document")
    return {"data": f"{index.train.tokens:,} training tokens in {documents}, {index.held_out.tokens:,} held out"}


def _caveats(loaded: LoadedRun, to: str, written: Written) -> str:
    lines = ["- What data the model saw is for its owner to describe; nothing of it is in this folder."]
    if loaded.model.plan.is_looped:
        lines.append(
            "- Every attention pass is a layer of its own here, with its own copy of the weights: parts that are run "
            "again were one weight in training, and drift apart when you fine-tune this folder. "
            "Train the run itself (`meristem`) to keep them tied."
        )
    if isinstance(loaded.model, Decoder) and to in ("hf", "llama"):
        lines.append("- Texts get no special tokens, as in training. Prompts are padded on the left.")
    said = "not measured" if written.difference is None else f"{written.difference:.1e}"
    lines.append(f"- Largest difference of a logit from the run's own, in float32, when it was exported: {said}.")
    return "\n".join(lines)


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
