"""Plans of every kind that decoding has to know, and the plain path, which it is held to."""

from __future__ import annotations

from dataclasses import replace

import torch

from meristem.growth.edits import RepeatBlock
from meristem.model import Decoder
from meristem.plan import Gates, LayerPlan, Plan, Rotary
from model.helpers import lively, looped, small_plan

PROMPTS = [[5, 17, 3, 60], [44], [9, 9, 2, 31, 7, 8, 50], [1, 2]]
LOOPS = {1: ((3, 0), 1), 2: ((2, 3), 2), 4: ((5, 4, 11), 3)}

# Heads as they are after growth: each layer has its own number, and all together are not as wide as the stream.
GROWN = replace(
    small_plan("uniform"), layers=tuple(LayerPlan(heads, 16, kv_heads) for heads, kv_heads in ((1, 1), (6, 3), (3, 3)))
)
KINDS: dict[str, Plan] = {
    "uniform": small_plan("uniform"),
    "prism": small_plan("prism"),
    "shared keys": small_plan("prism", kv_group=2),
    "loops": looped(small_plan("prism", kv_group=2), LOOPS),
    "gated loops": looped(small_plan("prism"), LOOPS, Gates(passes=3, heads=4)),
    "normed heads": looped(small_plan("prism", kv_group=2, qk_norm=True), LOOPS),
    "biases": replace(looped(small_plan("prism", kv_group=2), LOOPS), qkv_bias=True, tied=False, norm_eps=1e-3),
    "gains": replace(looped(small_plan("prism", kv_group=2, qk_norm=True), LOOPS), qk_gain=True, rotary=Rotary(500.0)),
    "repeats": RepeatBlock(3, 2).apply(small_plan("prism")),
    "grown heads": GROWN,
    "odd dims": replace(small_plan("uniform"), layers=(LayerPlan(2, 10, 1), LayerPlan(3, 22, 3), LayerPlan(1, 96, 1))),
}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model of a kind with lively weights, and gates that differ from head to head and from pass to pass."""
    model = lively(KINDS[kind], dtype)
    if model.gate_ramp is not None:
        with torch.no_grad():
            model.gate_ramp.copy_(torch.rand(model.gate_ramp.shape, generator=torch.Generator().manual_seed(5)))
    return model


@torch.no_grad()
def repeated_argmax(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the plain path: the whole text anew for every token, without a cache."""
    tokens, device = list(prompt), model.embedding.weight.device
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens], device=device)).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
