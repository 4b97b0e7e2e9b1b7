"""A folder of local copies with a few rows, tiny models, and what the harness asks of them."""

from __future__ import annotations

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from meristem.model import Decoder
from meristem.plan import Plan

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval (make test-eval)")

HELLASWAG = [
    {
        "activity_label": "Roof removal", "ctx_a": "A man sits on a roof.", "ctx_b": "he", "ctx": "unused",
        "endings": ["[step] wraps skis.", "rips tiles off.", "holds a cube.", "starts pulling."], "label": "3",
    },
    {
        "activity_label": "Baking", "ctx_a": "[header] How to bake [title] Warm up. [step] Wait.", "ctx_b": "",
        "ctx": "unused", "endings": ["Eat.", "Mix  it.", "Run.", "Go."], "label": "1",
    },
]  # fmt: skip
PIQA = [{"goal": "Open a jar", "sol1": "turn the lid", "sol2": "turn the jar", "label": 0}] * 3
ARC = [
    {"question": "What is hot?", "choices": ["ice", "fire", "snow"], "labels": ["A", "B", "C"], "answerKey": "B"},
    {"question": "What flies?", "choices": ["a bird", "a stone"], "labels": ["1", "2"], "answerKey": "1"},
]
WINOGRANDE = [{"sentence": "Ann beat Bo so _ was glad.", "option1": "Ann", "option2": "Bo", "answer": "1"}] * 2
LAMBADA = [{"id": 0, "text": "I do not care about\u2028 signs"}, {"id": 1, "text": "Give it to Shane"}]
WIKITEXT = (
    " \n = One = \n \n A man @-@ made thing , of 1 @,@ 000 . \n = = Part = = \n \n It is . \n = Two = \n \n More . \n"
)


def blimp_parts() -> list[str]:
    """The names of BLiMP's parts, as the harness has them."""
    import lm_eval.tasks

    files = (Path(lm_eval.tasks.__file__).parent / "blimp").glob("*.yaml")
    return sorted(path.stem for path in files if path.stem != "_blimp")


def write_copies(folder: Path, uids: list[str]) -> Path:
    """The folder, with a file for each of the tasks; BLiMP has pairs for these of its parts."""
    pairs = [
        {"sentence_good": f"Cats sleep {n}.", "sentence_bad": f"Cats sleeps {n}.", "UID": uid}
        for uid in uids
        for n in range(2)
    ]
    files: dict[str, list[dict[str, Any]]] = {
        "hellaswag_val": HELLASWAG, "piqa_valid": PIQA, "arc_easy_test": ARC, "winogrande_dev": WINOGRANDE,
        "lambada_openai_test": LAMBADA, "blimp": pairs,
    }  # fmt: skip
    (folder / "zeroshot").mkdir(parents=True)
    (folder / "wikitext2").mkdir()
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / "zeroshot" / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "wikitext2" / "wiki.test.raw.gz").write_bytes(gzip.compress(WIKITEXT.encode()))
    return folder


def tiny(vocabulary: int = 320, context: int = 24, seed: int = 0) -> Decoder:
    """A model whose logits differ: its weights are larger than those of a new one."""
    plan = Plan.uniform(layers=2, width=32, heads=4, vocabulary=vocabulary, context=context)
    model = Decoder(plan, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


def zero(vocabulary: int = 320, context: int = 24) -> Decoder:
    """A model to which every token is as likely as any other."""
    model = tiny(vocabulary, context)
    with torch.no_grad():
        model.embedding.weight.zero_()
    return model
