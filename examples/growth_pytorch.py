"""Growth in a plain PyTorch loop: a small model learns Python's own sources, and its depth grows meanwhile."""

import os
from pathlib import Path

import torch

from meristem import Decoder, Grower, Plan, Sgt, parameter_groups

STEPS = 120
torch.manual_seed(0)
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

plan = Plan.uniform(layers=4, width=64, heads=4, vocabulary=256, context=64)
policy = Sgt(total_steps=STEPS, passes=2, start=20, window=20)
model = Decoder(policy.prepare(plan), seed=0)  # with room for the strengths of the loops that will grow
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-3)  # gates and norms do not decay
grower = Grower(model, optimizer, [policy])

for step in range(1, STEPS + 1):
    starts = torch.randint(len(text) - plan.context, (8,)).tolist()
    windows = torch.stack([text[start : start + plan.context + 1] for start in starts])
    tokens, targets = windows[:, :-1], windows[:, 1:]
    loss = model(tokens, targets=targets).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for event in grower.step(tokens).events:
        print(f"step {step}, loss {loss:.3f}: {event}")

print(f"loss {loss:.3f}; layers with loops: {model.plan.loops}")
