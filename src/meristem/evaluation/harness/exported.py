"""An exported model through the harness's own class for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers.utils import logging

from meristem.errors import InputError, RunError, shortened


class ExportedLM(HFLM):  # type: ignore[misc]  # has no types
    """The harness's own model, which says what it refuses: a continuation that is longer than the context."""

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            expected = f"tokens are too many for its context of {self.max_length}; the run itself can be measured"
            raise InputError("continuation", longest, expected)
        return super()._loglikelihood_tokens(requests, **options)


def load_lm(folder: Path, device: torch.device, batch: int) -> ExportedLM:
    """The model in a folder, in float32. Code in the folder is not run: our models are known to transformers here."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of long texts, which the harness cuts
    try:
        return ExportedLM(
            pretrained=str(folder), backend="causal", dtype="float32", device=str(device), batch_size=batch
        )
    except (OSError, ValueError) as error:
        reason = shortened(str(error).strip().partition("\n")[0])
        raise RunError(f"{folder}: transformers cannot load a language model from it ({reason})") from error
