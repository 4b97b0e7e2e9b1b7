"""Growth with Lightning Fabric (pip install lightning-fabric): the model of growth_pytorch.py, whose heads grow too."""

import os
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from meristem import Decoder, Grower, Plan, RandomBirths, Sgt, parameter_groups, prepared

STEPS = 120
fabric = Fabric(devices=1)
fabric.seed_everything(0)
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

plan = Plan.uniform(layers=4, width=64, heads=4, vocabulary=256, context=64)
windows = TensorDataset(text.unfold(0, plan.context + 1, plan.context))
births = RandomBirths(births=4, total_steps=STEPS, start_heads=2, warm_up=5, decide_every=5)
policies = [Sgt(total_steps=STEPS, passes=2, start=20, window=20), births]
model = Decoder(prepared(plan, policies), seed=0)
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-3)

wrapped, stepped = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(windows, batch_size=8, shuffle=True))
grower = Grower(model, optimizer, policies)  # knows model and optimizer without what Fabric puts around them

for step, (batch,) in zip(range(1, STEPS + 1), loader, strict=False):
    tokens, targets = batch[:, :-1], batch[:, 1:]
    loss = wrapped(tokens, targets=targets).loss
    fabric.backward(loss)
    stepped.step()
    stepped.zero_grad()
    with fabric.autocast():  # gauges measure in the precision of the training
        growth = grower.step(tokens, targets)
    for event in growth.events:
        if event.to_dict()["event"] == "growth":
            fabric.print(f"step {step}, loss {loss:.3f}: {event}")

fabric.print(f"loss {loss:.3f}; heads {model.plan.heads}, layers with loops: {model.plan.loops}")
