"""Logits before and after a birth, bit for bit, over sizes: python births.py OUT [threads]. A line per size."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from meristem import AddHead, Decoder, Plan
from meristem.growth import newborn_head
from meristem.growth.apply import apply_edit
from meristem.plan import LayerPlan

WIDTHS, DIMS = (32, 64, 128, 192, 256, 384, 512), (4, 8, 16, 24, 32, 64, 128)
HEADS, TOKENS = (1, 2, 3, 4, 6, 8, 12), (1, 7, 64, 256)

torch.set_num_threads(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
lines = []
for width, dim, heads, tokens in itertools.product(WIDTHS, DIMS, HEADS, TOKENS):
    if heads * dim > 2 * width:
        continue
    plan = Plan.uniform(layers=1, width=width, heads=1, vocabulary=32, context=256, feed_forward=32)
    plan = replace(plan, layers=(LayerPlan(heads, dim, heads),))
    model = Decoder(plan, seed=0)
    batch = torch.randint(32, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(batch).logits
        newborn = newborn_head(plan.layers[0], width, None, seed=3)
        apply_edit(model, torch.optim.AdamW(model.parameters()), AddHead(0, newborn))
        equal = torch.equal(before, model(batch).logits)
    lines.append({"width": width, "dim": dim, "heads": heads, "tokens": tokens, "equal": equal})
Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
print(sum(line["equal"] for line in lines), "of", len(lines))
