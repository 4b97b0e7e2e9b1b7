"""Growth with Accelerate (pip install 'meristem[hf]'): the model of growth_pytorch.py, in the loop of its users.

`torchrun --nproc-per-node=2 examples/growth_accelerate.py` runs it in two processes.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from meristem import Decoder, Grower, Plan, Sgt, parameter_groups

STEPS = 120
set_seed(0)
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

plan = Plan.uniform(layers=4, width=64, heads=4, vocabulary=256, context=64)
windows = TensorDataset(text.unfold(0, plan.context + 1, plan.context))
policy = Sgt(total_steps=STEPS, passes=2, start=20, window=20)
model = Decoder(policy.prepare(plan), seed=0)
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-3)
grower = Grower(model, optimizer, [policy])  # knows model and optimizer without what Accelerate puts around them

accelerator = Accelerator()
wrapped, stepped, loader = accelerator.prepare(model, optimizer, DataLoader(windows, batch_size=8, shuffle=True))

for step, (batch,) in zip(range(1, STEPS + 1), loader, strict=False):
    tokens, targets = batch[:, :-1], batch[:, 1:]
    loss = wrapped(tokens, targets=targets).loss
    accelerator.backward(loss)
    stepped.step()
    stepped.zero_grad()
    with accelerator.autocast():  # entropy is measured in the precision of the training
        growth = grower.step(tokens, targets)
    for event in growth.events:
        accelerator.print(f"step {step}, loss {loss:.3f}: {event}")

accelerator.print(f"loss {loss:.3f}; layers with loops: {model.plan.loops}")
