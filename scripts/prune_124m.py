"""Pruning against its controls: one trained run, several sizes, three orders, each repaired, in one process.

    python scripts/prune_124m.py runs/uniform --out prune.json

Heads leave once in each order, and the sizes wanted are taken on the way, so that a search serves all of them. Each
size is repaired for 5 % of the run's updates, and so is the whole model, as the control that the others are held
against: `rise` is the held-out loss above that of the control. After every line the file is written anew; those that
are in it already are not made again, and none is begun that would end after the limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from meristem.devices import choose_device, describe_device
from meristem.files import write_atomically
from meristem.pruning.attempts import Attempts, held_out_numbers
from meristem.pruning.rows import pruning_rows
from meristem.pruning.search import Search
from meristem.pruning.settings import PruneSettings
from meristem.pruning.source import Source, open_source


class Study:
    """The lines that there are so far, and the place where runs are made and removed again."""

    def __init__(self, out: Path, work: Path | None, limit: float) -> None:
        self.out, self.work, self.limit, self.begin, self.longest = out, work, limit, time.perf_counter(), 0.0
        self.lines: list[dict[str, Any]] = json.loads(out.read_text())["lines"] if out.exists() else []

    def has(self, **key: Any) -> bool:
        return any(all(line.get(name) == value for name, value in key.items()) for line in self.lines)

    def in_time(self) -> bool:
        return time.perf_counter() - self.begin + self.longest < self.limit

    def add(self, line: dict[str, Any], seconds: float) -> None:
        self.lines.append({**line, "seconds": round(seconds, 2)})
        self.longest = max(self.longest, seconds)
        controls = {line["rate"]: line["held_out"] for line in self.lines if line["keep"] == 1 and line["rate"]}
        for each in self.lines:
            if each["held_out"] is not None and each["rate"] in controls:
                each["rise"] = each["held_out"] - controls[each["rate"]]
        place = describe_device(choose_device("auto"))
        content = {"device": place, "torch": torch.__version__, "lines": self.lines}
        write_atomically(self.out, json.dumps(content, indent=1) + "\n")
        print(json.dumps(self.lines[-1]), flush=True)


def repaired(study: Study, source: Source, search: Search, settings: PruneSettings, key: dict[str, Any]) -> None:
    """One size, before and after its repair."""
    begin = time.perf_counter()
    work = Path(tempfile.mkdtemp(prefix="prune-", dir=study.work))
    try:
        point = search.points[-1]
        attempts = Attempts(source, search, settings, work, search.device)
        made = attempts.make(len(search.points) - 1, repair=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sizes, first = point.sizes, search.points[0].sizes
    line = {
        **key, "heads": sizes.heads, "plan": list(made.plan.heads), "held_out": made.held_out, "loss_aside": made.loss,
        "rise_before_repair": point.loss - search.start, "rise_aside": made.loss - search.start,
        "kv_bytes": sizes.kv_bytes, "attention": sizes.attention, "parameters": sizes.parameters,
        "kv_share": sizes.kv_bytes / max(1, first.kv_bytes), "attention_share": sizes.attention / first.attention,
        "tokens_per_second": point.tokens_per_second, "repair": settings.repair,
    }  # fmt: skip
    study.add(line, time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--data", type=Path, help="the prepared data, if they are not where they were")
    parser.add_argument("--keep", default="0.8,0.7,0.6,0.5", help="shares of the heads, largest first")
    parser.add_argument("--orders", default="measured,random,norm")
    parser.add_argument("--repair", type=float, default=0.05, help="updates, as a share of the run's")
    parser.add_argument("--rates", default="0.2", help="first rates of the repair, as shares of the run's peak")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--no-fold", action="store_true")
    parser.add_argument("--limit", type=float, default=280, help="seconds after which nothing is begun")
    parser.add_argument("--work", type=Path, help="where runs are made and removed again, such as /dev/shm")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    study, device = Study(given.out, given.work, given.limit), choose_device(given.device)
    source = open_source(given.run, data=given.data, device=given.device)
    updates = max(1, round(given.repair * source.step))
    rates = [float(rate) for rate in given.rates.split(",")]
    keeps = sorted({float(keep) for keep in given.keep.split(",")}, reverse=True)
    for order in given.orders.split(","):
        shared: dict[str, Any] = {
            "tolerance": math.inf, "repair": updates, "order": order, "fold": not given.no_fold,
            "sequences": given.sequences,
        }  # fmt: skip
        settings = PruneSettings(**shared)
        begin = time.perf_counter()
        search = Search(source.model(device), pruning_rows(source, settings, device), settings, source.step, device)
        if not study.lines:
            whole = held_out_numbers(source, search.model, device).get("held_out_loss")
            study.add({"order": "", "keep": 1, "rate": 0, "held_out": whole, "loss_aside": search.start}, 0)
        searched = time.perf_counter() - begin
        for keep in [1.0, *keeps]:
            search.put(device)  # a repair has moved it away
            begin = time.perf_counter()
            wanted = PruneSettings(keep=keep, **shared)
            search.to(wanted.target(source.checkpoint.plan), math.inf)
            searched += time.perf_counter() - begin
            print(f"{order}, keep {keep}: searched {searched:.1f} s in all", file=sys.stderr, flush=True)
            for rate in rates:
                key = {"order": order if keep < 1 else "", "keep": keep, "rate": rate, "fold": shared["fold"]}
                if study.has(**{name: key[name] for name in ("order", "keep", "rate")}):
                    continue
                if not study.in_time():
                    print("out of time: call it again, with the same --out", file=sys.stderr)
                    return
                chosen = PruneSettings(keep=keep, repair_rate=rate, **shared)
                repaired(study, source, search, chosen, {**key, "search_seconds": round(searched, 2)})
        del search
        gc.collect()


if __name__ == "__main__":
    main()
