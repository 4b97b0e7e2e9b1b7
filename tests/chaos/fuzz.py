"""Inputs that nobody would write: configurations, options, plans, rows, prepared data, logs and checkpoints.

A command ends well, or is refused with one line. Everything else counts as a traceback: Python's own, a hang, an end by
the memory limit, several lines, or more than 2,000 characters of error.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer.main

from meristem.cli import app

from . import forks
from .runs import KEYS, ON_ROWS, ON_TEXTS, RUNS, Kind
from .verdicts import Result, Verdict
from .world import World

PATIENCE = 120.0  # seconds; a busy machine is no error
DEEP = 100_000  # levels of nesting
LONG = 100_000  # characters

# As they stand in JSON and in TOML.
NUMBERS = (
    "-1", "0", "1", "2", "3", "7", "16", "-0", "0.0", "0.5", "1.0", "-0.5", "1e-300", "1e300", "1e999", "2147483648",
    "4294967296", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1000000000000",
    "600000000000000000", "1000000000", "9" * 400, "9" * 5000, "1." + "0" * 400,
)  # fmt: skip
WORDS = (
    '""', '"x"', '"\\u0000"', '"a\\nb"', '"\\ud800"', '"../.."', '"/dev/zero"', '"cpu"', '"cuda"', '"nan"', '"sgt"',
    '"incrt"', '"uniform"', '"published"', '"random"', '"all"', '"block"', '"auto"', '"math"', '"first"', '"balanced"',
    '"12"', '"é漢😀"', '"' + "x" * LONG + '"',
)  # fmt: skip
POLICIES = ('["sgt"]', '["stack", "incrt"]', '["os:system"]', '["none.such:Policy"]')
OTHERS = ("true", "false", "[]", "[1, 2, 3]", "[-1]", '["a"]', "[[1]]", "{}", *POLICIES, "[" * DEEP + "]" * DEEP)
IN_JSON = (*NUMBERS, *WORDS, *OTHERS, "null", "NaN", "-Infinity", '{"a": 1}', '{"a":' * DEEP + "1" + "}" * DEEP, "")
IN_TOML = (
    *NUMBERS, *WORDS, *OTHERS, "nan", "-inf", "{a = 1}", "1979-05-27", "07:32:00", "0x7fffffffffffffff", "'literal'",
    "1_000", "", "[", '"', "{a = " * 500 + "1" + "}" * 500,
)  # fmt: skip
# Valid but long: such a run is refused by nobody, and we have no time for it.
PATIENT_KEYS = ("train.steps",)

Fuzz = Callable[[World, random.Random], tuple[str, list[str | Path]]]


def fuzz(world: World, number: int, draw: random.Random) -> Result:
    """One input of one sort, and a command that reads it."""
    sort = list(SORTS)[number % len(SORTS)]
    what, given = SORTS[sort](world, draw)
    ended = forks.run(*given, before=forks.memory_limit, patience=PATIENCE, cwd=world.place)
    what = f"{sort}: {what}"
    if ended.code == 0 and not ended.is_traceback:
        return Result(Verdict.SURVIVED, what)
    if ended.is_refusal:
        return Result(Verdict.REFUSED, what)
    if ended.code == -signal.SIGKILL and not ended.hung:
        what += " (killed)"
    return Result(Verdict.TRACEBACK, what, str(ended))


# --- configurations and options ---------------------------------------------------------------------------------------


def fuzz_config(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """Some settings of a configuration, or anything in its bytes; the run is as short as can be."""
    kind = draw.choice(RUNS)
    text = world.config(kind).read_text(encoding="utf-8")
    text = re.sub(r"^steps = .*$", f"steps = {fewest_steps(kind)}", text, flags=re.M)
    place = world.cleared()
    if draw.random() < 0.15:
        what, content = mangled(text.encode(), draw)
    else:
        told = []
        for key in draw.sample(KEYS, draw.randint(1, 3)):
            value = draw.choice(IN_TOML)
            if key in PATIENT_KEYS and re.fullmatch(r"[\d.e+_x]{3,}f*", value):
                continue
            section, _, name = key.rpartition(".")
            told.append(f"{key} = {shown(value)}")
            if f"[{section}]\n" not in text:
                text += f"[{section}]\n"
            text = re.sub(rf"(?ms)^(\[{re.escape(section)}\]\n(?:(?!^\[).)*?)^{name} = [^\n]*\n", r"\1", text)
            text = text.replace(f"[{section}]\n", f"[{section}]\n{name} = {value}\n")
        what, content = ", ".join(told), text.encode("utf-8", "surrogatepass")
    (place / "config.toml").write_bytes(content)
    return what, ["train", "config.toml", "--out", place / "run"]


def fewest_steps(kind: Kind) -> int:
    """Steps of a short run in which the structure can change: layers need time to grow."""
    return kind.steps if "growth__policies" in kind.settings else 1 + 2 * int(kind.settings.get("growth__start", 0))


def fuzz_override(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """Settings on the command line, some malformed."""
    place = world.cleared()
    arguments: list[str] = []
    for key in draw.sample(KEYS, draw.randint(1, 2)):
        value = draw.choice(IN_TOML).strip('"')
        if key in PATIENT_KEYS and re.fullmatch(r"[\d.e+_x]{3,}f*", value):
            value = "1"
        arguments += [f"--{key}", value] if draw.random() < 0.6 else [f"--{key}={value}"]
    if draw.random() < 0.3:
        odd = ["--", "-x", "--train", "--.", "--a.b.c=1", "train.steps", "--train.steps", "--=", "\udcff", "--é.漢=1"]
        arguments.insert(draw.randint(0, len(arguments)), draw.choice(odd))
    arguments = [argument.replace("\0", "")[:100_000] for argument in arguments]  # the system would refuse those
    if draw.random() < 0.3:
        run = world.placed(world.halfway(draw.choice((ON_TEXTS, ON_ROWS)), True))
        given: list[str | Path] = ["resume", run, *arguments]
    else:
        kind = draw.choice(RUNS)
        steps = str(fewest_steps(kind))
        given = ["train", world.config(kind), "--out", place / "run", "--train.steps", steps, *arguments]
    return shown(" ".join(arguments)), given


def fuzz_option(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """One or two options of a command that works on a run or on data."""
    run = world.placed(world.halfway(draw.choice((ON_TEXTS, ON_ROWS)), True))
    place = run.parent
    commands: dict[str, list[str | Path]] = {
        "plan": ["plan"],
        "eval": ["eval", run],
        "report": ["report", run],
        "generate": ["generate", run, "--prompt", "a"],
        "audit": ["audit", run, "--sequences", "2", "--steps", "1", "--feeds", "2", "--layers", "1"],
        "prepare": ["data", "prepare", world.texts.parent / "texts", "--out", place / "data"],
        "prepare-labelled": ["data", "prepare-labelled", world.rows.with_suffix(".tsv"), "--out", place / "data"],
        "verify": ["data", "verify", world.texts],
    }
    name = draw.choice([*commands, "plan", "plan"])
    given = commands[name]
    group: Any = typer.main.get_command(app)
    params = (group.commands["data"] if given[0] == "data" else group).commands[name].params
    options = [param.opts[0] for param in params if param.opts[0].startswith("--") and param.opts[0] != "--help"]
    arguments: list[str] = []
    for option in draw.sample(options, min(len(options), draw.randint(1, 2))):
        value = draw.choice(IN_TOML).strip('"').replace("\\u0000", "")
        flag = next(param.is_flag for param in params if option in param.opts)
        arguments += [option] if flag else [f"{option}={value[:LONG]}"]
    return shown(" ".join([name, *arguments])), [*given, *arguments]


# --- files ------------------------------------------------------------------------------------------------------------


def fuzz_plan(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """A plan given as a file, to `plan` or to a configuration, or the plan of a run."""
    kind = draw.choice(RUNS)
    run = world.placed(world.halfway(kind, True))
    what = mutate(run / "plan.json", draw)
    verb = draw.choice(["plan", "train", "report", "resume", "eval"])
    if verb == "plan":
        return what, ["plan", "--plan", run / "plan.json"]
    if verb == "train":
        settings = ["--model.plan", str(run / "plan.json"), "--train.steps", "1"]
        return what, ["train", world.config(kind), "--out", run.parent / "new", *settings]
    return what, [verb, run]


def fuzz_rows(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """Labelled rows in all formats, or documents."""
    place = world.cleared()
    rows = [("sentence", "label"), *((f"w{i} w{i % 3} x", f"class {i % 3}") for i in range(12))]
    suffix = draw.choice([".csv", ".tsv", ".jsonl", ".fasta", ".txt", ".docs.jsonl"])
    joined = {
        ".csv": "\n".join(",".join(row) for row in rows),
        ".tsv": "\n".join("\t".join(row) for row in rows),
        ".jsonl": "\n".join(json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]),
        ".fasta": "\n".join(f">id{i}|{label}\nACGTAC\nGTAAC" for i, (_, label) in enumerate(rows[1:])),
        ".txt": "\n".join(row[0] for row in rows),
        ".docs.jsonl": "\n".join(json.dumps({"text": row[0]}) for row in rows),
    }[suffix]
    if "jsonl" in suffix and draw.random() < 0.5:
        lines = joined.splitlines()
        at = draw.randrange(len(lines))
        what, lines[at] = changed_json(lines[at], draw)
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
    else:
        what, content = mangled(joined.encode(), draw)
    file = place / f"rows{suffix}"
    if draw.random() < 0.2:
        file = file.with_name(f"{file.name}.gz")
        content = gzip.compress(content)
        if draw.random() < 0.5:
            also, content = mangled(content, draw)
            what += f", compressed, {also}"
    file.write_bytes(content)
    verb = "prepare" if suffix in (".txt", ".docs.jsonl") else "prepare-labelled"
    skip = ["--on-error", "skip"] if draw.random() < 0.5 else []
    return f"{file.name} {what}", ["data", verb, file, "--out", place / "data", *skip]


def fuzz_data(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """The index, the recipe or the tokenizer of prepared data."""
    kind = draw.choice((ON_TEXTS, ON_ROWS))
    run = world.placed(world.halfway(kind, True))
    data = run.parent / "data"
    copied(world.data(kind), data)
    what = mutate(draw.choice([data / "index.json", *data.glob("index.json"), *data.glob("[rt]*.json")]), draw)
    settings = ["--data.path", str(data)]
    given: list[list[str | Path]] = [
        ["data", "verify", data],
        ["train", world.config(kind), "--out", run.parent / "new", "--train.steps", "1", *settings],
        ["resume", run, *settings],
        ["eval", run, "--data", data],
    ]
    return what, draw.choice(given)


def fuzz_tokenizer(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """A tokenizer of Hugging Face, given to a preparation."""
    file = world.cleared() / "tokenizer.json"
    file.write_text(world.tokenizer, encoding="utf-8")
    what = mutate(file, draw)
    if draw.random() < 0.5:
        return what, ["data", "prepare", world.texts.parent / "texts", "--out", file.parent / "d", "--tokenizer", file]
    rows = world.rows.with_suffix(".tsv")
    return what, ["data", "prepare-labelled", rows, "--out", file.parent / "d", "--tokens", file]


def fuzz_log(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """A line of a log, for `report`, or for a run that goes on."""
    run = world.placed(world.halfway(draw.choice(RUNS), True))
    log = draw.choice(sorted(run.glob("*.jsonl")))
    lines = log.read_text(encoding="utf-8").splitlines()
    told = []
    for at in draw.sample(range(len(lines)), min(len(lines), draw.randint(1, 3))):
        what, lines[at] = changed_json(lines[at], draw)
        told.append(f"{log.name} line {at + 1} {what}")
    log.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogatepass"))
    return ", ".join(told), [draw.choice(["report", "report", "report", "resume", "eval"]), run]


def fuzz_run_files(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """Small files of a run beside its plan: what it says of its data, its recipe and its tokenizer."""
    kind = draw.choice((ON_TEXTS, ON_ROWS))
    run = world.placed(world.halfway(kind, True))
    what = mutate(draw.choice([path for path in sorted(run.glob("*.json")) if path.name != "plan.json"]), draw)
    verbs: list[list[str | Path]] = [
        ["resume", run],
        ["eval", run],
        ["generate", run, "--prompt", "a", "--tokens", "2"],
    ]
    return what, draw.choice(verbs)


def fuzz_checkpoint(world: World, draw: random.Random) -> tuple[str, list[str | Path]]:
    """The manifest or the state of all checkpoints, or the head of a tensor file, with hashes that fit."""
    kind = draw.choice(RUNS)
    run = world.placed(world.halfway(kind, True))
    name = draw.choice(["manifest.json", "state.json", "state.json", "model.safetensors", "optimizer.safetensors"])
    state = draw.getstate()
    what = ""
    for folder in sorted((run / "checkpoints").glob("step-*")):
        draw.setstate(state)
        file = folder / name
        if name.endswith(".json"):
            what = mutate(file, draw)
        else:
            content = file.read_bytes()
            size = int.from_bytes(content[:8], "little")
            also, head = mangled(content[: 8 + size], draw)
            file.write_bytes(head + content[8 + size :])
            what = f"{name} head {also}"
        if name != "manifest.json":
            rehashed(folder, file)
    verbs: list[list[str | Path]] = [["resume", run], ["eval", run], ["plan", "--plan", run], ["report", run]]
    return f"{kind.name} {what}", draw.choice(verbs)


SORTS: dict[str, Fuzz] = {
    "configuration": fuzz_config,
    "override": fuzz_override,
    "option": fuzz_option,
    "plan": fuzz_plan,
    "rows": fuzz_rows,
    "data": fuzz_data,
    "tokenizer": fuzz_tokenizer,
    "log": fuzz_log,
    "run": fuzz_run_files,
    "checkpoint": fuzz_checkpoint,
}


# --- how things are changed -------------------------------------------------------------------------------------------


def mutate(path: Path, draw: random.Random) -> str:
    """Change a JSON file, at one place of its structure or anywhere in its bytes; in words."""
    if draw.random() < 0.25:
        what, content = mangled(path.read_bytes(), draw)
    else:
        what, text = changed_json(path.read_text(encoding="utf-8"), draw)
        content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(content)
    return f"{path.name} {what}"


def changed_json(text: str, draw: random.Random) -> tuple[str, str]:
    """The text with a value replaced, removed, or added; what was done, in words."""
    content = json.loads(text)
    path = draw.choice(list(places(content)))
    parent, key = content, path[-1]
    for step in path[:-1]:
        parent = parent[step]
    where = ".".join(map(str, path))
    how = draw.choices(["replace", "remove", "add"], [75, 15, 10])[0]
    if how == "remove":
        del parent[key]
        return f"without {where}", json.dumps(content)
    value = draw.choice(IN_JSON)
    if how == "add" and isinstance(parent, dict):
        key = draw.choice(["", "x", "loop", "\0", "format "])
    parent[key] = "here it is"
    return f"{where} = {shown(value)}", json.dumps(content).replace('"here it is"', value)


def places(content: Any) -> list[tuple[Any, ...]]:
    """The paths to all values below a value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found: list[tuple[Any, ...]] = []
    for key, value in items:
        found += [(key,), *((key, *rest) for rest in places(value))]
    return found


def mangled(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Bytes with something done to them, and what that was."""
    at = draw.randrange(len(content) + 1)
    ways: dict[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        f"cut at {at}": lambda: content[:at],
        f"random byte at {at}": lambda: content[:at] + draw.randbytes(1) + content[at + 1 :],
        f"random bytes at {at}": lambda: content[:at] + draw.randbytes(20) + content[at:],
        f"a NUL at {at}": lambda: content[:at] + b"\0" + content[at:],
        f"no UTF-8 at {at}": lambda: content[:at] + b"\xff\xfe" + content[at:],
        f"deep lists at {at}": lambda: content[:at] + b"[" * DEEP + content[at:],
        f"deep objects at {at}": lambda: content[:at] + b'{"a":' * DEEP + content[at:],
        "only deep lists": lambda: b"[" * DEEP + b"]" * DEEP,
        "a mark at the start": lambda: b"\xef\xbb\xbf" + content,
        "two times": lambda: content + content,
        f"a quote at {at}": lambda: content[:at] + b'"' + content[at:],
        f"a long word at {at}": lambda: content[:at] + b"x" * LONG + content[at:],
        f"a long number at {at}": lambda: content[:at] + b"9" * 5000 + content[at:],
        "Windows lines": lambda: content.replace(b"\n", b"\r\n"),
        "random bytes only": lambda: draw.randbytes(200),
    }
    what = draw.choice(list(ways))
    return what, ways[what]()


def rehashed(folder: Path, file: Path) -> None:
    """Let the manifest of a checkpoint tell the truth about a changed file."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content = file.read_bytes()
    manifest["files"][file.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def copied(folder: Path, to: Path) -> None:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())


def shown(text: str) -> str:
    """A text of a length that can be printed."""
    return text if len(text) <= 60 else f"{text[:30]}... ({len(text):,} characters)"
