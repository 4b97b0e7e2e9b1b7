"""Pruning against its controls: one trained run, several sizes, three orders, each repaired, in one process.

    python scripts/prune_124m.py runs/uniform --out prune.json --limit 200

A line is a size, an order in which heads left, and the first rate of a repair. The whole model is repaired too, as the
control that the others are held against. What decides comes first: the control, then every order at the first share of
`--keep`, then the other shares. Heads leave once in each order, and the sizes are taken on the way.

The repair is that of `meristem prune`, without the folders. For each size the rate is taken that has the lowest loss on
the rows set aside, for the control too: `best` has these lines, with their held-out loss above that of the control.
After every line the file is written anew; those that are in it already are not made again, and none is begun that would
end after the limit. The whole model and the first size also write text, in turns; the fastest call of each counts.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meristem.bench.decode import model_rate
from meristem.decoding import release
from meristem.devices import choose_device, compute_dtype, describe_device
from meristem.files import write_atomically
from meristem.model import Decoder, Transformer, build_model
from meristem.pruning.attempts import held_out_numbers
from meristem.pruning.rows import Rows, pruning_rows
from meristem.pruning.search import Search, mean_loss
from meristem.pruning.settings import PruneSettings
from meristem.pruning.source import Source, open_source
from meristem.pruning.writing import pruned_checkpoint, pruned_config
from meristem.runs.checkpoint import Checkpoint, restore_model
from meristem.runs.divergence import batch_number
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update, learning_rate, make_optimizer
from meristem.training.tasks import make_task

ROUNDS = 2  # of writing in turns
BATCHES = (1, 32)  # texts at once


class Study:
    """The lines that there are so far, and how much time is left for others."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.limit, self.begin = out, limit, time.perf_counter()
        self.longest = {"repair": 0.0, "search": 0.0}  # seconds
        known = json.loads(out.read_text()) if out.exists() else {}
        self.lines: list[dict[str, Any]] = known.get("lines", [])
        self.speeds: list[dict[str, Any]] = known.get("speeds", [])

    def has(self, **key: Any) -> bool:
        return any(all(line[name] == value for name, value in key.items()) for line in self.lines)

    def in_time(self, *parts: str) -> bool:
        """Whether there is time for such parts, as far as the longest so far can tell."""
        return time.perf_counter() - self.begin + sum(self.longest[part] for part in parts) < self.limit

    def took(self, part: str, seconds: float) -> None:
        self.longest[part] = max(self.longest[part], seconds)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.write()
        print(f"{time.perf_counter() - self.begin:6.1f} s  {json.dumps(self.lines[-1])}", flush=True)

    def best(self) -> list[dict[str, Any]]:
        """Of each size and order the line whose rate does best on the rows set aside, beside that of the control."""
        found: dict[tuple[str, float], dict[str, Any]] = {}
        for line in self.lines:
            key = line["order"], line["keep"]
            if line["rate"] and (key not in found or line["loss_aside"] < found[key]["loss_aside"]):
                found[key] = line
        control = found.get(("", 1.0))
        names = "order", "keep", "rate", "heads", "kv_share", "attention_share", "held_out", "loss_aside"
        return [
            {name: line[name] for name in names}
            | {
                "rise": line["held_out"] - control["held_out"],
                "rise_aside": line["loss_aside"] - control["loss_aside"],
            }
            for line in found.values()
            if control is not None
        ]

    def write(self) -> None:
        place = describe_device(choose_device("auto"))
        content = {"device": place, "torch": torch.__version__, "best": self.best(), "speeds": self.speeds}
        write_atomically(self.out, json.dumps({**content, "lines": self.lines}, indent=1) + "\n")


class Pruned:
    """What leaves one run in some order, and the sizes on the way."""

    def __init__(self, source: Source, rows: Rows, settings: PruneSettings, device: torch.device) -> None:
        self.source, self.settings, self.seconds = source, settings, 0.0
        self.search = Search(source.model(device), rows, settings, source.step, device, timed=False)
        self.sizes = {1.0: self.search.points[0]}  # by share kept
        self.searched = {1.0: 0.0}  # seconds until then

    def to(self, keep: float) -> None:
        """Let heads leave until so many are left."""
        begin = time.perf_counter()
        self.search.to(replace(self.settings, keep=keep).target(self.source.checkpoint.plan), math.inf)
        self.seconds += time.perf_counter() - begin
        self.sizes[keep], self.searched[keep] = self.search.points[-1], self.seconds

    def checkpoint(self, keep: float) -> Checkpoint:
        """The run with so many heads, not repaired."""
        return pruned_checkpoint(self.source, self.search.changes[: self.sizes[keep].changes])


def repaired(source: Source, checkpoint: Checkpoint, settings: PruneSettings, device: torch.device) -> Transformer:
    """The model of a checkpoint after a repair, as `meristem prune` makes it, without a folder."""
    config = pruned_config(source, settings)
    task = make_task(config, checkpoint.plan, source.data, fixed=device.type == "cuda")
    model = build_model(checkpoint.plan).to(device)
    model.use_attention(device, compute_dtype(device), config.train.attention)
    optimizer = make_optimizer(model, config.optimizer)
    restore_model(copy.deepcopy(checkpoint), model, optimizer)  # moments are taken as they are, and then change
    gradients = Gradients(model, device=device, compile=config.train.compile, recompute=config.train.recompute)
    micro = config.train.micro_batch or config.train.batch_size
    for step in range(source.step, config.train.steps):
        arrays = task.batch(batch_number(step, source.folder.rewinds), 0, 1)
        tokens, targets = (torch.from_numpy(array).unflatten(0, (-1, micro)).to(device) for array in arrays)
        rate = learning_rate(step, config.train.steps, config.optimizer, config.train.branch_step)
        guarded_update(optimizer, rate, gradients(tokens, targets), config.optimizer.clip)
    return model.eval()


def speeds(models: dict[float, Transformer], device: torch.device) -> list[dict[str, Any]]:
    """Tokens per second of each size, for one text and for many at once; they take turns."""
    context = next(iter(models.values())).plan.context
    prompt, tokens = max(1, 3 * context // 4), max(1, context // 8)
    fastest = {(keep, batch): 0.0 for keep in models for batch in BATCHES}
    for _ in range(ROUNDS):
        for keep, batch in fastest:
            model = models[keep]
            assert isinstance(model, Decoder)
            rate = model_rate(model, device, prompt=prompt, tokens=tokens, calls=2, batch=batch)
            fastest[keep, batch] = max(fastest[keep, batch], rate)
            release(model)
    return [
        {"keep": keep, "batch": batch, "prompt": prompt, "tokens": tokens, "tokens_per_second": round(rate, 1)}
        for (keep, batch), rate in fastest.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--data", type=Path, help="the prepared data, if they are not where they were")
    parser.add_argument("--keep", default="0.7,0.8,0.6", help="shares of the heads, the one that decides first")
    parser.add_argument("--orders", default="measured,random,norm")
    parser.add_argument("--repair", type=float, default=0.05, help="updates, as a share of the run's")
    parser.add_argument("--rates", default="0.2,0.4,0.8", help="first rates of the repair, as shares of the run's peak")
    parser.add_argument("--sequences", type=int, default=256, help="rows set aside")
    parser.add_argument("--windows", type=int, default=400, help="held-out windows, if there are so many")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which nothing is begun")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    study, device = Study(given.out, given.limit), choose_device(given.device)
    source = open_source(given.run, data=given.data, device=given.device)
    config = source.config
    source = replace(source, config=replace(config, eval=replace(config.eval, windows=given.windows)))
    shared: dict[str, Any] = {
        "tolerance": math.inf, "repair": math.floor(given.repair * source.step), "sequences": given.sequences,
    }  # fmt: skip
    rows = pruning_rows(source, PruneSettings(**shared), device)
    rates, orders = [float(rate) for rate in given.rates.split(",")], given.orders.split(",")
    first, *others = [float(keep) for keep in given.keep.split(",")]
    pruned: dict[str, Pruned] = {}

    def searched(order: str, keep: float) -> Pruned:
        """The order, as far as that size; larger ones that are wanted are taken on the way."""
        begin = time.perf_counter()
        if order not in pruned:
            pruned[order] = Pruned(source, rows, PruneSettings(**{**shared, "order": order}), device)
        for share in sorted((first, *others), reverse=True):
            if keep <= share and share not in pruned[order].sizes:
                pruned[order].to(share)
        study.took("search", time.perf_counter() - begin)
        return pruned[order]

    def measured(order: str, keep: float, rate: float, own: Pruned, checkpoint: Checkpoint) -> None:
        """Add the line of a size after its repair, or as it is where the rate is 0."""
        begin = time.perf_counter()
        if rate:
            model = repaired(source, checkpoint, PruneSettings(**shared, repair_rate=rate), device)
        else:
            model = source.model(device, checkpoint)
        trained = time.perf_counter()
        sizes, whole = own.sizes[keep].sizes, own.sizes[1.0].sizes
        line = {
            "order": order, "keep": keep, "rate": rate, "repair": shared["repair"] if rate else 0, "heads": sizes.heads,
            "plan": list(checkpoint.plan.heads), "parameters": sizes.parameters,
            "kv_share": sizes.kv_bytes / max(1, whole.kv_bytes), "attention_share": sizes.attention / whole.attention,
            "held_out": held_out_numbers(source, model, device).get("held_out_loss"),
            "loss_aside": mean_loss(model, rows.aside, device), "search_seconds": round(own.searched[keep], 2),
            "repair_seconds": round(trained - begin, 2),
            "evaluation_seconds": round(time.perf_counter() - trained, 2),
        }  # fmt: skip
        study.took("repair", time.perf_counter() - begin)
        study.add(line)

    def size(order: str, keep: float) -> bool:
        """Add the lines of a size that are not there yet; whether there was time."""
        missing = [rate for rate in (0.0, *rates) if not study.has(order=order, keep=keep, rate=rate)]
        if not missing:
            return True
        if not study.in_time("search", "repair"):
            return False
        own = searched(order or orders[0], keep)
        checkpoint = own.checkpoint(keep)
        for rate in missing:
            if not study.in_time("repair"):
                return False
            measured(order, keep, rate, own, checkpoint)
            gc.collect()
        return True

    def speed() -> bool:
        """Add how fast the whole model and that of the first size write; whether there was time."""
        if study.speeds or source.checkpoint.plan.classes is not None:
            return True
        if not study.in_time("search"):
            return False
        small = searched(orders[0], first).checkpoint(first)
        study.speeds = speeds({1.0: source.model(device), first: source.model(device, small)}, device)
        study.write()
        print(json.dumps(study.speeds), flush=True)
        return True

    wanted = [("", 1.0), *((order, first) for order in orders), None]
    wanted += [(order, keep) for order in orders for keep in others]
    if not all(speed() if each is None else size(*each) for each in wanted):
        print("out of time: call it again, with the same --out", file=sys.stderr)


if __name__ == "__main__":
    main()
