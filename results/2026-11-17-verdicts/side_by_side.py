"""What several runs side by side gain on one GPU, with and without NVIDIA's MPS: a minute, on random ids.

    python3 results/2026-11-17-verdicts/side_by_side.py carry/lm/part-1 --runs 1 3 --mps 3

Prints how many updates a second all runs make together. (MPS lets kernels of several processes run at the same time;
without it they take turns.)
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from meristem.data import load_tokenizer
from meristem.data.text.encoding import Part
from meristem.data.text.shards import Index, TokenizerFacts
from meristem.data.text.writer import SplitWriter

CONFIG = Path(__file__).with_name("base-51m.toml")


def random_data(part: Path, to: Path) -> None:
    """A prepared folder of random ids, with the tokenizer of a packed part."""
    to.mkdir()
    for path in part.glob("tokenizer*.json.xz"):
        (to / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    tokenizer = load_tokenizer(to)
    splits = []
    for name, tokens in (("train", 10_000_000), ("held-out", 600_000)):
        writer = SplitWriter(to, name, "uint16", tokens)
        ids = np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16)
        writer.add(Part(ids, 1, 4 * tokens))
        splits.append(writer.finish())
    facts = TokenizerFacts(tokenizer.kind, tokenizer.digest, tokenizer.vocabulary, tokenizer.end_of_text)
    Index(facts, "uint16", *splits, 0, "random", "random ids").save(to)


def speed(count: int, place: Path, steps: int, more: list[str], environment: dict[str, str]) -> str:
    """So many runs at a time; the updates that all make in a second, by the second half of each."""
    folders = [Path(tempfile.mkdtemp(dir=place)) / "run" for _ in range(count)]
    command = [sys.executable, "-m", "meristem", "train", str(CONFIG), "--data.path", str(place / "data"),
               "--train.steps", str(steps), "--eval.every", "0", "--log.every", "10", *more]  # fmt: skip
    begun = time.perf_counter()
    processes = [
        subprocess.Popen([*command, "--out", str(folder)], env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
        for folder in folders
    ]
    codes = [process.wait() for process in processes]
    took = time.perf_counter() - begun
    if any(codes):
        return f"{count} at a time: failed {codes}"
    together = 0.0
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        entries = [entry for entry in lines if "loss" in entry]
        middle, last = entries[len(entries) // 2], entries[-1]
        together += (last["step"] - middle["step"]) / (last["training_seconds"] - middle["training_seconds"])
        shutil.rmtree(folder)
    return f"{count} at a time: {together:.2f} updates/s together, {took:.1f} s in all for {count} x {steps} updates"


def with_mps(counts: list[int], place: Path, steps: int, more: list[str]) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(place / "mps")}
    (place / "mps").mkdir()
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **environment}, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        print("no MPS here:", error)
        return
    try:
        for count in counts:
            print("MPS,", speed(count, place, steps, more, environment), flush=True)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env={**os.environ, **environment}, timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", type=Path)
    parser.add_argument("--runs", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--mps", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=150)
    given, more = parser.parse_known_args()
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        random_data(given.part, place / "data")
        for count in given.runs:
            print(speed(count, place, given.steps, more, {}), flush=True)
        if given.mps:
            with_mps(given.mps, place, given.steps, more)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
