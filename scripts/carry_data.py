"""Prepared text for a machine that takes only so many MiB at a time: packed into parts here, put together there.

    python scripts/carry_data.py pack data --to carry --mib 48                              # carry/part-1, carry/part-2
    python scripts/carry_data.py pack train --held-out validation --to carry --mib 48       # of two prepared folders
    python scripts/carry_data.py unpack carry/part-1 --to /dev/shm/data                     # there, a part a call

Token ids are packed by LZMA, which Python's own library reads, to about half their size. Every part says what the whole
is. When the last one is unpacked, all files are compared with the hashes of the index, and `data.path` can name the
folder. Shards (`shard_tokens` of `meristem.data.prepare`) should be several and of equal size: they are packed and
unpacked side by side, and none is divided among parts.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from meristem.data import verify
from meristem.data.text.shards import INDEX_FILE, Index

# Ids are two bytes (or four), whose places tell them apart; a dictionary as large as a shard.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]
HELD_OUT = "held-out-00000.bin"


def packed(task: tuple[Path, Path]) -> tuple[str, int]:
    """Pack one file, unless that has been done already; its name and size."""
    source, to = task
    if not to.exists():
        partial = to.with_suffix(".partial")
        partial.write_bytes(lzma.compress(source.read_bytes(), filters=FILTERS))
        partial.rename(to)
    return to.name, to.stat().st_size


def unpacked(task: tuple[Path, Path]) -> None:
    source, to = task
    to.write_bytes(lzma.decompress(source.read_bytes()))


def pack(data: Path, held_out: Path | None, to: Path, mib: float, workers: int) -> None:
    index = Index.load(data)
    files = {shard.file: data / shard.file for split in (index.train, index.held_out) for shard in split.shards}
    if held_out is not None:  # all of the other folder is held out, none of this one
        other = Index.load(held_out)
        assert not index.held_out.shards, f"{data} has held-out text already"
        assert not other.held_out.shards, f"{held_out} is divided already"
        assert len(other.train.shards) == 1, f"{held_out} must be one shard"
        assert other.tokenizer == index.tokenizer, "the tokenizers differ"
        shard = replace(other.train.shards[0], file=HELD_OUT)
        files[HELD_OUT] = held_out / other.train.shards[0].file
        index = replace(index, held_out=replace(other.train, shards=(shard,)), source=f"{index.source}; {other.source}")
    own = to / "whole"  # what every part brings along: the index, and how texts become ids
    own.mkdir(parents=True, exist_ok=True)
    index.save(own)
    for path in (path for path in data.glob("*.json") if path.name not in (INDEX_FILE, "checked.json")):
        shutil.copyfile(path, own / path.name)
    for path in own.iterdir():
        packed((path, to / f"{path.name}.xz"))
    common = [to / f"{path.name}.xz" for path in own.iterdir()]
    with ProcessPoolExecutor(workers) as pool:
        sizes = dict(pool.map(packed, [(path, to / f"{name}.xz") for name, path in files.items()]))
    parts: list[list[str]] = []
    room, most = 0.0, mib * 2**20 - sum(path.stat().st_size for path in common)
    for name, size in sizes.items():
        if size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    for number, names in enumerate(parts, start=1):
        part = to / f"part-{number}"
        part.mkdir(exist_ok=True)
        for path in [*common, *(to / name for name in names)]:
            (part / path.name).unlink(missing_ok=True)
            os.link(path, part / path.name)
        total = sum(path.stat().st_size for path in part.iterdir())
        print(f"{part}: {len(names)} of {len(sizes)} shards, {total / 2**20:.1f} MiB")
    shutil.rmtree(own)
    for name in [*(path.name for path in common), *sizes]:
        (to / name).unlink()


def unpack(part: Path, to: Path, workers: int) -> None:
    begun = time.perf_counter()
    to.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(unpacked, [(path, to / path.stem) for path in sorted(part.glob("*.xz"))]))
    index = Index.load(to)
    shards = [shard.file for split in (index.train, index.held_out) for shard in split.shards]
    missing = [name for name in shards if not (to / name).exists()]
    if not missing:
        verify(to)
    state = f"{len(missing)} of {len(shards)} shards are missing" if missing else f"whole, {index.digest[:12]}"
    print(f"{to}: {state}; {time.perf_counter() - begun:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path, help="a prepared folder; or a part")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, help="a prepared folder, all of which is held out")
    parser.add_argument("--mib", type=float, default=48.0, help="of a part at most")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    if given.verb == "pack":
        pack(given.source, given.held_out, given.to, given.mib, given.workers)
    else:
        unpack(given.source, given.to, given.workers)


if __name__ == "__main__":
    main()
