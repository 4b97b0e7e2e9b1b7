"""Inputs made to take all memory or time, and surroundings that no command expects, under a limit on memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from . import forks
from .runs import ON_ROWS, ON_TEXTS
from .verdicts import Result, Verdict
from .world import World

PATIENCE = 120.0  # seconds; a busy machine is no error
LARGE = 2 << 30  # bytes of one line
HUGE = "9" * 400


@dataclass(frozen=True)
class Bomb:
    """A command, what is done in its process before it, and where it is given."""

    command: list[str | Path]
    before: Callable[[], None] = lambda: None
    cwd: Path | None = None
    makes: tuple[str, ...] = field(default=())  # what may lie in the place afterwards, besides what was there


def explode(world: World, number: int, draw: random.Random) -> Result:
    """One of the bombs, in turn."""
    name = random.Random(0).sample(list(BOMBS), len(BOMBS))[number % len(BOMBS)]  # so that a few are of all sorts
    for kind in (ON_TEXTS, ON_ROWS):
        world.halfway(kind, True)  # made before the place is used
    place = world.cleared()
    bomb = BOMBS[name](world, place)
    was = {path.name for path in place.iterdir()}

    def before() -> None:
        forks.memory_limit()
        bomb.before()

    ended = forks.run(*bomb.command, before=before, cwd=bomb.cwd or place, patience=PATIENCE)
    if ended.code == 0 and not ended.is_traceback:
        verdict, allowed = Verdict.SURVIVED, {*was, *bomb.makes}
    elif ended.is_refusal:
        verdict, allowed = Verdict.REFUSED, was
    else:
        return Result(Verdict.TRACEBACK, name, str(ended))
    remains = sorted({path.name for path in place.iterdir()} - allowed)
    return Result(Verdict.LOST, name, f"left behind: {remains}\n{ended}") if remains else Result(verdict, name)


# --- commands that use something --------------------------------------------------------------------------------------


def training(key: str, value: str) -> Callable[[World, Path], Bomb]:
    """A run with one absurd setting, given in the file, where no system limits its length."""

    def make(world: World, place: Path) -> Bomb:
        section, name = key.split(".")
        lines = world.config(ON_TEXTS).read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith(f"{name} = ")]
        kept.insert(kept.index(f"[{section}]") + 1, f"{name} = {value}")
        (place / "config.toml").write_text("\n".join(kept), encoding="utf-8")
        return Bomb(["train", "config.toml", "--out", "run"], makes=("run",))

    return make


def planning(*options: str) -> Callable[[World, Path], Bomb]:
    return lambda world, place: Bomb(["plan", *options])


def preparing(write: Callable[[Path], Path], verb: str = "prepare", *options: str) -> Callable[[World, Path], Bomb]:
    """Data from a file that `write` makes."""
    return lambda world, place: Bomb(["data", verb, write(place), "--out", "data", *options], makes=("data",))


def going_to(out: str, *makes: str) -> Callable[[World, Path], Bomb]:
    """A run in a folder with an odd name."""
    return lambda world, place: Bomb(["train", world.config(ON_TEXTS), "--out", out, "--train.steps", "1"], makes=makes)


def preparing_to(out: str, *makes: str) -> Callable[[World, Path], Bomb]:
    return lambda world, place: Bomb(["data", "prepare", world.texts.parent / "texts", "--out", out], makes=makes)


def in_surroundings(before: Callable[[], None], *command: str) -> Callable[[World, Path], Bomb]:
    """A command in an odd process; `RUN` stands for a run, and without a command one is begun."""

    def make(world: World, place: Path) -> Bomb:
        if not command:
            return Bomb(["train", world.config(ON_TEXTS), "--out", "rün", "--train.steps", "1"], before, makes=("rün",))
        shutil.copytree(world.halfway(ON_TEXTS, True), place / "rün")
        return Bomb([place / "rün" if part == "RUN" else part for part in command], before)

    return make


# --- files ------------------------------------------------------------------------------------------------------------


def zst_line(name: str, head: bytes, place: Path) -> Path:
    """A small file that holds one line of two billion bytes."""
    import zstandard

    path = place / name
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as stream:
        stream.write(head)
        for _ in range(LARGE >> 20):
            stream.write(b"x" * (1 << 20))
    return path


def gz_line(name: str, head: bytes, place: Path) -> Path:
    """The same, of members that are all alike."""
    path = place / name
    member = gzip.compress(b"x" * (1 << 24), compresslevel=1)
    path.write_bytes(gzip.compress(head) + member * (LARGE >> 24))
    return path


def pipe(name: str, place: Path) -> Path:
    """A FIFO that nobody writes to."""
    os.mkfifo(place / name)
    return place / name


def sparse(name: str, place: Path) -> Path:
    """A file of ten billion bytes that takes no room."""
    with (place / name).open("wb") as file:
        file.truncate(10_000_000_000)
    return place / name


def tokenizer_with_id(place: Path) -> Path:
    path = place / "tokenizer.json"
    special = {"id": 4_000_000_000, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}  # fmt: skip
    model = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 4_000_000_000}, "unk_token": "a"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [special], "model": model}), encoding="utf-8")
    return path


def large_id(world: World, place: Path) -> Bomb:
    texts = world.texts.parent / "texts"
    return Bomb(["data", "prepare", texts, "--out", "data", "--tokenizer", tokenizer_with_id(place)], makes=("data",))


def given_pipe(*command: str, name: str = "fifo") -> Callable[[World, Path], Bomb]:
    """A FIFO in the place of a file; `FIFO` and `DATA` stand for it and for texts."""

    def make(world: World, place: Path) -> Bomb:
        stands = {"FIFO": pipe(name, place), "DATA": world.texts.parent / "texts"}
        return Bomb([stands.get(part, part) for part in command])

    return make


def nul_in_shard(world: World, place: Path) -> Bomb:
    data = Path(shutil.copytree(world.texts, place / "data"))
    index = json.loads((data / "index.json").read_text(encoding="utf-8"))
    index["splits"]["train"]["shards"][0]["file"] = "train\0.bin"
    (data / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return Bomb(["data", "verify", data])


def deep(name: str, content: str) -> Callable[[World, Path], Bomb]:
    """A file of a run or of its data that is nested deeply."""

    def make(world: World, place: Path) -> Bomb:
        run = Path(shutil.copytree(world.halfway(ON_ROWS if "recipe" in name else ON_TEXTS, True), place / "run"))
        for path in run.glob(name):
            path.write_text(content, encoding="utf-8")
        return Bomb(["eval" if "recipe" in name else "resume", run], makes=("run",))

    return make


def vanished(world: World, place: Path) -> Bomb:
    """The folder that the command is given in is gone."""
    (place / "here").mkdir()

    def remove() -> None:
        os.chdir(place / "here")
        (place / "here").rmdir()

    return Bomb(["train", world.config(ON_TEXTS), "--out", "run"], remove)


def looping_link(world: World, place: Path) -> Bomb:
    (place / "texts").mkdir()
    (place / "texts" / "again").symlink_to(place / "texts")
    (place / "texts" / "self.txt").symlink_to(place / "texts" / "self.txt")
    (place / "texts" / "a.txt").write_text("A text.\n" * 20, encoding="utf-8")
    return Bomb(["data", "prepare", "texts", "--out", "data"], makes=("data",))


# --- surroundings -----------------------------------------------------------------------------------------------------


def close_output() -> None:
    os.close(1)
    sys.stdout = None  # what Python itself has then


def close_errors() -> None:
    os.close(2)
    sys.stderr = None


def ascii_output() -> None:
    sys.stdout, sys.stderr = forks.output(1, "ascii"), forks.output(2, "ascii")


def environment(**changes: str) -> Callable[[], None]:
    return partial(os.environ.update, changes)


NESTED = "[" * 100_000 + "]" * 100_000
OBJECTS = '{"a":' * 100_000 + "1" + "}" * 100_000
BOMBS: dict[str, Callable[[World, Path], Bomb]] = {
    "layers = 10^9": training("model.layers", "1000000000"),
    "width = 10^9": training("model.width", "1000000000"),
    "batch_size = 10^12": training("train.batch_size", "1000000000000"),
    "context = 10^12": training("model.context", "1000000000000"),
    "feed_forward = 10^12": training("model.feed_forward", "1000000000000"),
    "heads = 10^12": training("model.heads", "1000000000000"),
    "eval.batch = 10^15": training("eval.batch", "1000000000000000"),
    "eval.windows = 10^15": training("eval.windows", "1000000000000000"),
    "steps of 400 digits": training("train.steps", HUGE),
    "width of 400 digits": training("model.width", HUGE),
    "lr of 400 digits": training("optimizer.lr", HUGE),
    "a layer of 400 digits": training("growth.excluded", f"[{HUGE}]"),
    "a dim of 400 digits": training("model.dims", f"[{HUGE}]"),
    "deep list in the configuration": training("model.dims", NESTED),
    "deep table in the configuration": training("model.dims", "{a = " * 10_000 + "1" + "}" * 10_000),
    "plan, a million layers": planning("--layers", "1000000"),
    "plan, a billion layers": planning("--layers", "1000000000"),
    "plan, width 6 * 10^17": planning("--width", "600000000000000000"),
    "plan, width a large prime": planning("--width", "1000000000000000003"),
    "plan, context 10^18": planning("--context", "1000000000000000000"),
    "plan, vocabulary 10^18": planning("--vocabulary", "1000000000000000000"),
    "plan, heads 10^18": planning("--heads", "1000000000000000000"),
    "plan, layers of 400 digits": planning("--layers", HUGE),
    "plan, width of 400 digits": planning("--width", HUGE),
    "plan, 20,000 dims": planning("--dims", ",".join(["64"] * 20_000)),
    "plan, batch tokens of 400 digits": planning("--batch-tokens", HUGE),
    "plan, uniform, a million layers": planning("--layers", "1000000", "--schedule", "uniform"),
    "a tokenizer with the id 4 * 10^9": large_id,
    "2 GB in one line, .txt.zst": preparing(partial(zst_line, "a.txt.zst", b"")),
    "2 GB in one line, .jsonl.zst": preparing(partial(zst_line, "a.jsonl.zst", b'{"text": "')),
    "2 GB in one line, .csv.zst": preparing(partial(zst_line, "a.csv.zst", b"text,label\n"), "prepare-labelled"),
    "2 GB in one line, .txt.gz": preparing(partial(gz_line, "a.txt.gz", b"")),
    "2 GB in one line, .fasta.gz": preparing(partial(gz_line, "a.fasta.gz", b">a|b\n"), "prepare-labelled"),
    "2 GB in one line, skipped": preparing(partial(gz_line, "a.jsonl.gz", b"{"), "prepare", "--on-error", "skip"),
    "a configuration of 10 GB": lambda world, place: Bomb(["train", sparse("c.toml", place), "--out", "run"]),
    "a plan of 10 GB": lambda world, place: Bomb(["plan", "--plan", sparse("plan.json", place)]),
    "a FIFO as text": given_pipe("data", "prepare", "FIFO", "--out", "data", name="a.txt"),
    "a FIFO as rows": given_pipe("data", "prepare-labelled", "FIFO", "--out", "data", name="a.tsv"),
    "a FIFO as tokenizer": given_pipe("data", "prepare", "DATA", "--tokenizer", "FIFO", "--out", "data"),
    "a FIFO as configuration": given_pipe("train", "FIFO", "--out", "run"),
    "a FIFO as plan": given_pipe("plan", "--plan", "FIFO"),
    "/dev/zero as configuration": lambda world, place: Bomb(["train", "/dev/zero", "--out", "run"]),
    "/dev/zero as plan": planning("--plan", "/dev/zero"),
    "/dev/zero as text": lambda world, place: Bomb(["data", "prepare", "/dev/zero", "--out", "data"]),
    "deep plan": deep("plan.json", OBJECTS),
    "deep data.json": deep("*a*.json", NESTED),
    "deep recipe": deep("recipe.json", OBJECTS),
    "deep manifests": deep("checkpoints/*/manifest.json", NESTED),
    "deep metrics": deep("metrics.jsonl", NESTED),
    "deep events": deep("events.jsonl", OBJECTS),
    "a NUL in a shard's name": nul_in_shard,
    "train --out .": going_to("."),
    "train --out /": going_to("/"),
    "train --out ''": going_to(""),
    "train --out missing/../r6": going_to("missing/../r6", "r6", "missing"),
    "train --out no UTF-8": going_to("r\udcff", "r\udcff"),
    "train --out a long name": going_to("r" * 300),
    "prepare --out .": preparing_to("."),
    "prepare --out ''": preparing_to(""),
    "prepare --out missing/../r6": preparing_to("missing/../r6", "r6", "missing"),
    "prepare --out no UTF-8": preparing_to("r\udcff", "r\udcff"),
    "the folder is gone": vanished,
    "links that loop": looping_link,
    "WORLD_SIZE=abc": in_surroundings(environment(WORLD_SIZE="abc")),
    "WORLD_SIZE=-1": in_surroundings(environment(WORLD_SIZE="-1")),
    "WORLD_SIZE=2 alone": in_surroundings(environment(WORLD_SIZE="2")),
    "RANK=abc": in_surroundings(environment(RANK="abc")),
    "training with closed output": in_surroundings(close_output),
    "training with closed errors": in_surroundings(close_errors),
    "training with ASCII output": in_surroundings(ascii_output),
    "eval with closed output": in_surroundings(close_output, "eval", "RUN"),
    "report with closed output": in_surroundings(close_output, "report", "RUN"),
    "eval with ASCII output": in_surroundings(ascii_output, "eval", "RUN"),
    "report with ASCII output": in_surroundings(ascii_output, "report", "RUN"),
    "generate with ASCII output": in_surroundings(ascii_output, "generate", "RUN", "--prompt", "é", "--tokens", "2"),
    "an error with ASCII output": in_surroundings(ascii_output, "report", "nö"),
}
