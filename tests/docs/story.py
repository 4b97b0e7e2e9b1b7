"""A page of the documents as a story: its blocks are run from top to bottom in one folder, small and in this process.

Everything up to the work itself is as it is written: commands are read by our own command line, configurations are
those that are shown. Only then the work is made small, by words that are put behind a command (`smaller`), and time
passes a hundred times as fast: where a page says step 1000, this is step 10.
"""

from __future__ import annotations

import io
import math
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meristem
from commands import Call, Said
from meristem.config import Config, load_config
from meristem.training.train import train
from meristem.watch.server import Server

from .blocks import SHELL, Block, lines_of, words_of
from .props import Props

ROOT = Path(__file__).resolve().parents[2]
FASTER = 100
HARNESS = find_spec("lm_eval") is not None  # the extra eval, which `make test` does without

# What is put behind the words of a command so that it costs less; of two values of an option the last one counts.
TINY_BENCH = "--layers 2 --width 32 --heads 2 --vocabulary 64 --context 16 --device cpu"
CHEAPER = {
    "demo incrt": "--steps 60",
    "audit": "--sequences 8 --steps 2 --feeds 2 --layers 1",
    "generate": "--tokens 4",
    "bench step": f"{TINY_BENCH} --width 128 --batch 1 --steps 2 --warmup 1",
    "bench growth": f"{TINY_BENCH} --batch 1 --steps 2 --rounds 2 --grown 1 --looped 1 --passes 1 --feed-every 2",
    "bench decode": f"{TINY_BENCH} --batch 1 --prompt 4 --tokens 4 --rounds 1",
    "bench start": "--rounds 1",
    "bench save": f"{TINY_BENCH} --batch 1 --rounds 1",
    "compare": "--preset tiny --train.steps 8 --train.batch_size 2 --eval.every 4 --eval.windows 4 --log.every 1 "
    "--model.layers 2 --model.width 32 --model.heads 4 --model.context 16 --model.feed_forward 32 --growth.sgt.start 2 "
    "--growth.sgt.window 2 --train.device cpu",
}
# What makes a policy of a configuration decide within a few updates.
SOONER: dict[str, dict[str, Any]] = {
    "sgt": {"start": 2, "window": 2},
    "incrt": {
        "feed_every": 1, "decide_every": 2, "calibration": 2, "cool_down": 2, "warm_up": 1, "hits": 1, "feeds": 1,
    },
    "prune": {"decide_every": 2, "cool_down": 1, "grace": 2, "sequences": 8},
}  # fmt: skip


class Untold(Exception):
    """A block or command that nothing here can run."""


class Story:
    """Runs blocks in the present folder, in which their page has it all."""

    def __init__(self, props: Props, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        self._props, self._call, self._monkeypatch = props, call, monkeypatch
        self._names: dict[str, Any] = {name: getattr(meristem, name) for name in meristem.__all__}
        self._names |= {"meristem": meristem, "torch": torch}
        self._comparison: dict[str, Any] = {}
        shutil.copytree(ROOT / "configs", "configs")
        shutil.copy(ROOT / "examples/own_policy.py", "own_policy.py")
        monkeypatch.setattr("meristem.data.stdlib_files", lambda: props.library)
        monkeypatch.setattr(Server, "serve_forever", _served_once)
        processes = SimpleNamespace(Popen=self._process, DEVNULL=None)
        monkeypatch.setattr("meristem.comparison.processes.subprocess", processes)

    def run(self, block: Block, left_out: Callable[[str], bool]) -> None:
        """Run a block, without the commands that are `left_out`."""
        if block.language == "python":
            self._python(block)
        elif block.language == "toml":
            self._toml(block)
        elif block.language == "yaml":
            self._task(block)
        elif block.language in SHELL:
            for number, line in lines_of(block):
                if not left_out(line):
                    self._line(f"{block.page}:{number}", line)
        else:
            raise Untold(f"{block.place}: nothing runs a block of {block.language}")

    # --- commands

    def _line(self, place: str, line: str) -> None:
        for pipe in words_of(line):
            said = None
            for words in pipe:
                said = self._command(f"{place}: {line}", words, said)

    def _command(self, place: str, words: list[str], before: Said | None) -> Said:
        if words[0] == "echo":
            return Said(0, " ".join(words[1:]) + "\n", "")
        if words[0] == "torchrun" or words[:2] == ["PYTHONPATH=src", "python"]:  # this process in place of others
            words = words[words.index("-m") + 1 :]
        if words[0] != "meristem":
            raise Untold(f"{place}: nothing here runs {words[0]}")
        if before is not None:
            self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(before.out.encode())))
        said = self._meristem(words[1:])
        expected = 128 + signal.SIGINT if words[1] == "watch" and "--text" not in words else 0
        assert said.code == expected, f"{place}\n{said.out}{said.err}"
        return said

    def _meristem(self, words: list[str]) -> Said:
        if "--tasks" in words and not HARNESS:
            return Said(0, "", "")  # as in the tests of these tasks
        out = words[words.index("--out") + 1] if "--out" in words else ""
        for word in words:
            if word != out:
                self._props.provide(word.rstrip("/"))
        if words[0] == "train" and out == "RUN":  # a name for any run: another one each time
            shutil.rmtree(out, ignore_errors=True)
        if words[0] == "data":
            self._props.take_back(out)
        return self._call(*words, *self._smaller(words))

    def _smaller(self, words: list[str]) -> list[str]:
        if words[0] == "train":
            return self._smaller_training(words[1], words[2:])
        more = next((text.split() for verb, text in CHEAPER.items() if " ".join(words).startswith(verb)), [])
        if words[0] == "compare":
            return [*more, "--data.path", self._data_of_comparison(words)]
        if words[0] == "watch" and "--text" not in words:
            more = ["--port", "0"]
        if "--step" in words and (step := words[words.index("--step") + 1]).isdigit():  # else the best
            more = [*more, "--step", str(_sooner(int(step)))]
        return more

    def _smaller_training(self, path: str, rest: list[str]) -> list[str]:
        place = rest.index("--out")
        config = load_config(path, [word for word in (*rest[:place], *rest[place + 2 :]) if word != "--continue"])
        assert config.model.build(50304).layers
        self._props.provide(config.data.path)
        small = small_settings(config)
        return [word for key, value in small.items() for word in (f"--{key}", str(value))]

    def _data_of_comparison(self, words: list[str]) -> str:
        """The data of a comparison as it is shown, which stay though the rest of it is that of a preset."""
        from meristem.comparison.file import load_comparison

        given = dict(pairwise(words))
        data = given.get("--data.path") or load_comparison(Path(words[1]), given.get("--preset")).values["data.path"]
        self._props.provide(data)
        return str(data)

    def _process(self, command: list[str], **options: Any) -> Any:
        """In place of a process that trains a run of a comparison: the same, here and at once."""
        given = dict(pairwise(command))
        train(load_config(given["train"]), given["--out"])
        return SimpleNamespace(poll=lambda: 0)

    # --- other languages

    def _python(self, block: Block) -> None:
        self._props.provide_names(self._names, block.text)
        for name in re.findall(r'(?<!out=)"([\w/.-]+)"', block.text):  # not what it makes itself
            self._props.provide(name)
        exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), self._names)

    def _toml(self, block: Block) -> None:
        """A comparison, or what is added to one, or a part of a configuration."""
        from meristem.comparison.file import read_comparison

        tables = tomllib.loads(block.text)
        if {"arms", "search"}.isdisjoint(tables):
            Path("shown.toml").write_text(block.text, encoding="utf-8")
            assert load_config("shown.toml").build_policies() or "growth" not in tables
            return
        if "search" in tables:  # in place of the rates
            kept = {key: value for key, value in self._comparison.items() if not key.startswith("rate")}
            self._comparison = {**kept, **tables}
        else:
            self._comparison = tables
        for preset in (None, *self._comparison.get("preset", {})):
            assert read_comparison(self._comparison, Path("configs/compare/shown.toml"), preset).arms

    def _task(self, block: Block) -> None:
        """A task of lm-evaluation-harness, with rows that have the fields it names."""
        if not HARNESS:
            return
        (name,) = re.findall(r"^task: (\w+)$", block.text, re.MULTILINE)
        Path("tasks").mkdir()
        Path(f"tasks/{name}.yaml").write_text(block.text, encoding="utf-8")
        row = '{"country": "Peru", "cities": ["Lima", "Rome"], "right": 0}\n'
        Path(f"{name}.jsonl").write_text(row * 3, encoding="utf-8")
        said = self._meristem(["eval", "RUN", "--tasks", name, "--task-folder", "tasks"])
        assert said.code == 0, f"{block.place}\n{said.err}"


def small_settings(config: Config) -> dict[str, Any]:
    """The settings that make a small run of a configuration, whatever it is."""
    steps, imported = _sooner(config.train.steps), config.model.start_from is not None
    every = config.checkpoint.every
    small: dict[str, Any] = {
        "train.steps": steps, "train.batch_size": 1 if imported else 2, "train.device": "cpu", "eval.every": steps,
        "eval.windows": 4, "eval.batch": 4, "log.every": 1, "checkpoint.every": _sooner(every) if every else 0,
    }  # fmt: skip
    if config.train.micro_batch is not None:
        small["train.micro_batch"] = 1
    if config.train.flops is not None:
        small["train.flops"] = 1e9
    if config.train.branch_from is not None:
        trunk, _, step = config.train.branch_from.partition("@")
        small["train.branch_from"] = f"{trunk}@{_sooner(int(step))}"
    for policy in filter(config.growth.has, SOONER):
        small |= {f"growth.{policy}.{name}": value for name, value in SOONER[policy].items()}
    if not imported:
        small |= {"model.layers": 2, "model.width": 32, "model.context": 32, "model.feed_forward": 32}
        if config.model.head_dim is None:
            small |= {"model.heads": 4, "model.dims": 16}
    return small


def _sooner(step: int) -> int:
    return math.ceil(step / FASTER)


def _served_once(server: Server) -> None:
    """In place of serving for ever: the page is made, and somebody interrupts."""
    assert "<html" in server.page.document()
    raise KeyboardInterrupt
