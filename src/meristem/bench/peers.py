"""Models of peers, from checkouts of their repositories."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from meristem.errors import InputError, Remedy, RunError
from meristem.plan import Plan


def nanogpt_model(folder: Path, plan: Plan) -> Any:
    """nanoGPT's model with the sizes of a plan, from a checkout of karpathy/nanoGPT."""
    source = folder / "model.py"
    if not source.is_file():
        raise RunError(f"{source}: not found; this is no checkout of karpathy/nanoGPT", Remedy(("nanogpt",)))
    if len(set(plan.heads)) > 1:
        raise InputError("plan", plan.heads, "nanoGPT takes one head count for all layers")
    spec = importlib.util.spec_from_file_location("nanogpt_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=plan.context, vocab_size=plan.vocabulary, n_layer=len(plan.layers), n_head=plan.heads[0],
        n_embd=plan.width, dropout=0.0, bias=False,
    )  # fmt: skip
    return module.GPT(config)
