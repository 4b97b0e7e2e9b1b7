"""What a model says to a few tokens, which an exported one is held to, here and wherever it is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meristem.errors import RunError
from meristem.model import Transformer
from meristem.plan import PADDING
from meristem.runs.tensor_file import save_tensors

REFERENCE_FILE = "reference.safetensors"
LENGTH, ROWS = 64, 3  # of the tokens, at most
TOLERANCE = 1e-4  # of the largest logit, or of 1 if that is less: more is no rounding

Answer = Callable[[Tensor, Tensor], Tensor]  # the logits of input ids and an attention mask, (B, T) each


class Reference(NamedTuple):
    """Input ids and attention mask, (B, T) each, and the logits that the model gives them."""

    input_ids: Tensor
    attention_mask: Tensor
    logits: Tensor

    def save(self, folder: Path) -> None:
        save_tensors(folder / REFERENCE_FILE, self._asdict(), metadata={"format": "pt"})

    def difference(self, answer: Answer) -> float:
        """The largest difference between these logits and those of another model, which must be below the tolerance."""
        with torch.no_grad():
            found = (answer(self.input_ids, self.attention_mask) - self.logits).abs().max().item()
        allowed = TOLERANCE * max(1.0, self.logits.abs().max().item())
        if not found <= allowed:
            raise RunError(
                f"the exported model differs from the run's by {found:.2e} in a logit, and {allowed:.2e} is allowed; "
                "nothing was written"
            )
        return found


@torch.no_grad()
def reference_of(model: Transformer, ids: int) -> Reference:
    """The logits of some rows of random ids below `ids`; those of a classifier have different lengths."""
    length = min(LENGTH, model.plan.context)
    tokens = torch.randint(PADDING + 1, ids, (ROWS, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    if model.plan.classes is not None:
        for row in range(1, ROWS):
            mask[row, -(-length // (1 + row)) :] = 0
        tokens[mask == 0] = PADDING
    return Reference(tokens, mask, model.logits(tokens).float())
