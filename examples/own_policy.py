"""A policy of one's own: every so often the layer whose heads look around most widely is given another head.

Here it grows a model in a plain loop. For the command line its name is module:Class, with its settings in a table:

    cd examples; meristem train ../configs/demo.toml --out ../runs/own --data.path ../runs/demo-data \
        --growth.policies own_policy:WidestLayer --growth.widestlayer.every 50
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from meristem import Decoder, Grower, Plan, parameter_groups
from meristem.gauges import EntropyGauge, Gauge
from meristem.growth import AddHead, Change, Decision, Policy, newborn_head


@dataclass(frozen=True)
class WidestLayer(Policy):
    every: int = 20  # updates between two births
    most: int = 4  # births in all

    def begin(self, plan: Plan) -> int:
        return 0  # the state: births so far; it is kept in checkpoints

    def needs(self, state: int, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return (EntropyGauge(),) if step % self.every == 0 and state < self.most else None

    def decide(self, state: int, step: int, plan: Plan, readings: Any) -> Decision:
        entropies = [fmean(heads) for heads in readings[EntropyGauge()].entropy]
        layer = entropies.index(max(entropies))
        head = newborn_head(plan.layers[layer], plan.width, None, seed=step)  # it writes nothing yet: nothing jumps
        facts = {"layer_entropy": entropies}
        change = Change("birth", "its heads look around most widely", (AddHead(layer, head),), layer, facts)
        return Decision(state + 1, (change,))


if __name__ == "__main__":  # not where the policy is imported
    torch.manual_seed(0)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
    plan = Plan.uniform(layers=3, width=64, heads=1, head_dim=16, vocabulary=256, context=64)
    model = Decoder(plan, seed=0)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-3)
    grower = Grower(model, optimizer, [WidestLayer()])
    for step in range(1, 101):
        starts = torch.randint(len(text) - plan.context, (8,)).tolist()
        windows = torch.stack([text[start : start + plan.context + 1] for start in starts])
        loss = model(windows[:, :-1], targets=windows[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for event in grower.step(windows[:, :-1]).events:
            print(f"step {step}, loss {loss:.3f}: {event}")
    print(f"loss {loss:.3f}; heads {model.plan.heads}")
