"""Files that change behind the software's back: flipped bits, truncation, deletion.

What is promised of a command that meets a damaged file:

- Either it ends as if nothing had been damaged: the damage is repaired, or does not matter (the line of a log is
  trained again; an older checkpoint is taken); or it is refused with one line, and nothing else is changed.
- A difference that is said counts as survived: what is printed must name the file (of a configuration, a key will do).
- Logs cannot be repaired. If a log is not what was written up to the newest checkpoint, `resume` must say so, or the
  `report` after it, which is given then. Lines after that checkpoint are nobody's yet: a run that goes on writes them
  again. A `report` cannot notice one that is gone or has become another entry, and a last one that is cut off is what
  any kill leaves; but any other that is no entry it can.
- To start over at step 0 where there was a checkpoint is a loss, even if training would end in the same place.
- `data verify` says that a folder is what was written; it must not say so of one that is not.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from . import forks
from .runs import KEYS, ON_ROWS, ON_TEXTS, REMEMBERED, RUNS, answer, command, contents, differences
from .verdicts import Result, Verdict
from .world import World

LOGS = ("metrics.jsonl", "events.jsonl", "entropy.jsonl")


def damage_run(world: World, number: int, draw: random.Random) -> Result:
    """Damage a file of a run of which half is done, or the same file in all its checkpoints, and use the run."""
    kind, stopped = RUNS[number % len(RUNS)], draw.random() < 0.5
    verbs = ["resume", "resume", "resume", "eval", "report", *(["generate"] if kind.data == "texts" else [])]
    verb = draw.choice(verbs)
    expected = world.answer(kind, stopped, verb)
    undamaged = world.halfway(kind, stopped)
    run = world.placed(undamaged)
    file = draw.choice(damageable(run))
    files = [file]
    if "checkpoints" in file.parts and draw.random() < 0.2:
        files = [
            folder / file.name for folder in sorted(file.parent.parent.glob("step-*")) if (folder / file.name).is_file()
        ]
    done = [damage(path, draw) for path in files]
    what = f"{kind.name}, {'stopped' if stopped else 'killed'}, {verb}: {', '.join(done)}"
    before = contents(run)
    ended = forks.run(*command(verb, run))
    if ended.code != 0:
        return refused(what, ended, differences(contents(run), before))
    differing = differences(answer(verb, run, ended.out), expected)
    if verb == "resume" and began_again(run):
        return Result(Verdict.LOST, what, f"it began again at step 0, although there were checkpoints\n{ended}")
    if not differing:
        return Result(Verdict.SURVIVED, what)
    if verb == "report" and file.name in LOGS and is_unnoticeable(file, before.get(file.name, b""), undamaged):
        return Result(Verdict.SURVIVED, what)
    said = ended.said + (forks.run("report", run).said if file.name in LOGS else "")
    if any(is_named(path, said) for path in files):
        return Result(Verdict.SURVIVED, what)
    return Result(Verdict.SILENT, what, f"different, without a word: {', '.join(differing)}\n{ended}")


def damage_data(world: World, number: int, draw: random.Random) -> Result:
    """Damage a file of prepared data, and check it, train on it, or go on with a run on it."""
    kind = (ON_TEXTS, ON_ROWS)[number % 2]
    folder, verb = world.data(kind), draw.choice(["verify", "train", "resume", "eval"])
    expected = world.answer(kind, True, verb)
    run = world.placed(world.halfway(kind, True)) if verb in ("resume", "eval") else world.cleared() / "run"
    with world.restored(folder):
        file = draw.choice(damageable(folder))
        what = f"{kind.data}, {verb}: {damage(file, draw)}"
        before = contents(world.place)
        data_before = contents(folder)
        ended = forks.run(*(command(verb, run) if run.exists() else world.begin(kind, verb)))
        changed = [*differences(contents(world.place), before), *differences(contents(folder), data_before)]
    if ended.code != 0:
        return refused(what, ended, changed)
    if verb == "verify":  # which reads everything, whatever is remembered
        differing = [] if file.name == REMEMBERED else ["the data, which is called whole"]
    else:
        differing = differences(answer(verb, run, ended.out), expected)
    if not differing or is_named(file, ended.said.replace(f"{folder}: whole", "")):
        return Result(Verdict.SURVIVED, what)
    return Result(Verdict.SILENT, what, f"different, without a word: {', '.join(differing)}\n{ended}")


def damageable(folder: Path) -> list[Path]:
    """The files of a folder that something is read from again."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock" and path.suffix != ".svg")
    return sorted(path for path in found if not any(part.startswith(".partial") for part in path.parts))


def damage(path: Path, draw: random.Random) -> str:
    """Flip a bit of a file, cut it, empty it or delete it; in words."""
    content = bytearray(path.read_bytes())
    how = draw.choices(["flip", "cut", "empty", "delete"], [60, 20, 8, 12])[0]
    name = "/".join(path.parts[-2:])
    if how == "delete" or not content:
        path.unlink()
        return f"{name} deleted"
    if how == "flip":
        byte, bit = draw.randrange(len(content)), draw.randrange(8)
        content[byte] ^= 1 << bit
        path.write_bytes(content)
        return f"{name} bit {bit} of byte {byte:,} of {len(content):,} flipped"
    size = 0 if how == "empty" else draw.randrange(len(content))
    path.write_bytes(content[:size])
    return f"{name} cut from {len(content):,} to {size:,} bytes"


def refused(what: str, ended: forks.Ended, changed: list[str]) -> Result:
    """The verdict on a command that did not end well."""
    if not ended.is_refusal:
        return Result(Verdict.TRACEBACK, what, str(ended))
    if changed:
        return Result(Verdict.LOST, what, f"refused, but it has changed {', '.join(changed)}\n{ended}")
    return Result(Verdict.REFUSED, what)


def began_again(run: Path) -> bool:
    """Whether the last process on a run began it: its events say `start`, not `resume`."""
    events = run / "events.jsonl"
    lines = events.read_bytes().splitlines() if events.is_file() else []
    begun = [line for line in lines if b'"event": "start"' in line or b'"event": "resume"' in line]
    return bool(begun) and b'"start"' in begun[-1]


def is_named(path: Path, text: str) -> bool:
    """Whether a text names a file: by its name, of a checkpoint by its folder's, of a configuration by a key."""
    if path.name == "config.toml" and any(key in text for key in KEYS):
        return True
    return (path.parent.name if path.parent.name.startswith("step-") else path.name) in text


def is_unnoticeable(log: Path, damaged: bytes, run: Path) -> bool:
    """Whether all that differs in a log stands after the newest checkpoint, and is entries, if it is there at all."""
    newest = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    promised = []
    for line in (run / log.name).read_bytes().splitlines():
        entry = json.loads(line)
        after = entry["step"] == newest and entry.get("event") in ("checkpoint", "stopped", "finished")
        if entry["step"] > newest or after:
            break
        promised.append(line)
    *found, _ = damaged.split(b"\n")
    return found[: len(promised)] == promised and all(is_entry(line) for line in found[len(promised) :])


def is_entry(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and isinstance(entry.get("step"), int)
