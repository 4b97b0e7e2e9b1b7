"""Many short trainings in one process, each a line of results: for a GPU that is lent by the minute.

    python scripts/runs.py configs/uniform-124m.toml list.txt --out lines.jsonl --limit 500

Each line of the list is a name and what it changes in the configuration, such as

    full-4 --train.seed 100 --optimizer.lr 4e-3
    stack-4 --train.seed 100 --optimizer.lr 4e-3 --growth.policies stack --growth.stack.at 0.5

In a line @NAME stands for the heads, layer by layer, that the line of that name ended with. A line that is in the
results already is passed over, and none is begun that would end after the limit, as far as the slowest run so far can
tell. Run folders go to a temporary place and are removed: what is kept are losses, seconds and what grew. `meristem
compare` is the tool for verdicts; this one for what it has no words for, such as the time to a loss at several lengths.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meristem import Plan, load_config, train
from meristem.runs.log import read_log

SECONDS = ("training_seconds", "compilation_seconds", "evaluation_seconds", "saving_seconds")


def run_one(config: str, line: str, folder: Path, facts: Sequence[str] = ()) -> dict[str, Any]:
    name, *overrides = line.split()
    outcome = train(load_config(config, overrides), folder)
    metrics, events = (list(read_log(folder / file)) for file in ("metrics.jsonl", "events.jsonl"))
    steps = [entry for entry in metrics if "loss" in entry]
    last = steps[-1]
    told = [entry["heads"] for entry in events if entry.get("heads")]
    heads = told[-1] if told else list(Plan.load(folder / "plan.json").heads)
    return {
        "line": line, "name": name, "config": config, "held_out": outcome.held_out, "steps": outcome.step,
        "heads": heads, "tokens": last["tokens"], "flops": last["flops"], "peak_memory": last["peak_memory"],
        **{part: last[part] for part in SECONDS},
        "losses": [[entry["step"], entry["loss"], round(entry["training_seconds"], 3)] for entry in steps],
        "measured": [[entry["step"], entry["held_out_loss"]] for entry in metrics if "held_out_loss" in entry],
        "events": [[entry["step"], entry["event"], *(entry.get(fact) for fact in facts)] for entry in events],
        "device": next(entry["device"] for entry in events if "device" in entry), "torch": torch.__version__,
    }  # fmt: skip


class Lines:
    """The lines of a file, by what they were made of. Others are added to it, until the limit of seconds."""

    def __init__(self, config: str, out: Path, limit: float) -> None:
        self.config, self.out, self.limit = config, out, limit
        self.begin, self.longest = time.perf_counter(), 0.0
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        self.known: dict[str, dict[str, Any]] = {line["line"]: line for line in lines}

    def with_heads(self, text: str) -> str:
        """A line in which heads stand in the place of @NAME."""
        heads = {line["name"]: line.get("heads", ()) for line in self.known.values()}
        return re.sub(r"@(\S+)", lambda name: ",".join(map(str, heads[name[1]])), text)

    def train(
        self, line: str, facts: Sequence[str] = (), keep: Sequence[str] | None = None, **more: Any
    ) -> dict[str, Any] | None:
        """Train what a line says, and add it with what `more` there is to say; None if there is no time for it."""
        if (started := time.perf_counter()) - self.begin + self.longest > self.limit:
            print("no time is left for", line, flush=True)
            return None
        place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            result = run_one(self.config, line, place / "run", facts) | more
            if keep and keep[0] == result["name"]:
                shutil.move(place / "run", keep[1])
        finally:
            shutil.rmtree(place)
        self.known[line] = result
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
        self.longest = max(self.longest, time.perf_counter() - started)
        print(
            f"{time.perf_counter() - self.begin:6.0f} s  {result['name']:<28} {result['held_out']:.4f} after "
            f"{result['training_seconds']:.1f} s (compilation {result['compilation_seconds']:.1f})", flush=True
        )  # fmt: skip
        return result


def listed(path: Path) -> list[str]:
    """The lines of a list, without what is behind a #."""
    return [line for text in path.read_text().splitlines() if (line := text.partition("#")[0].strip())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("list", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--keep", nargs=2, metavar=("NAME", "FOLDER"), help="move the run of this name there")
    parser.add_argument("--facts", default="", help="what to keep of every event, such as heads,demand")
    given = parser.parse_args()
    lines = Lines(given.config, given.out, given.limit)
    facts = given.facts.split(",") if given.facts else ()
    for text in listed(given.list):
        line = lines.with_heads(text)
        if line not in lines.known and lines.train(line, facts, given.keep) is None:
            break


if __name__ == "__main__":
    main()
