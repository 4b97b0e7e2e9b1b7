"""The command line, from text files to generated text, and what it says to mistakes."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import meristem
from commands import Call, Said
from meristem import __version__
from meristem.cli import main
from meristem.cli.messages import paced
from meristem.config import all_settings, build_config, load_config
from meristem.gauges import entropy
from meristem.gauges.entropy import EntropyGauge, HeadReadings, read_heads
from meristem.growth import LoopHeads, RepeatBlock
from meristem.growth.policies import POLICIES
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.runs.checkpoint import list_checkpoints
from meristem.runs.lock import run_lock
from meristem.runs.run_folder import RunFolder, load_run
from training.helpers import TINY, assert_equal_runs, copy_run, write_texts


def refused(said: Said, *parts: str) -> None:
    """One line on stderr that holds all parts, exit status 2."""
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    for part in parts:
        assert part in said.err


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_names_every_verb_and_waits_for_nothing_heavy() -> None:
    """How long it takes is measured by `meristem bench start`; what takes long is torch."""
    program = """
import sys
from meristem.cli import main
sys.argv = ["meristem", "--help"]
try:
    main()
finally:
    heavy = ("torch", "numpy", "scipy", "safetensors", "tokenizers", "transformers")
    print([name for name in heavy if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for verb in ("plan", "data", "train", "resume", "eval", "compare", "generate", "bench"):
        assert f" {verb} " in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_version(call: Call) -> None:
    assert call("--version") == Said(0, f"{__version__}\n", "")


# --- plan ------------------------------------------------------------------------------------------------------------


def test_plan_json_holds_the_facts(call: Call) -> None:
    facts = json.loads(call("plan", "--json").out)
    assert set(facts) == {
        "heads", "head_dims", "kv_heads", "loops", "repeats", "parameters", "flops_per_token", "softmax_elements",
        "kv_bytes_per_token", "training_memory", "warnings", "digest",
    }  # fmt: skip
    plan = Plan.prism(layers=12, width=768, heads=12)
    assert facts["training_memory"]["total"] == plan.memory(32768).total
    assert facts["heads"] == [3, 3, 6, 6, 8, 8, 12, 12, 12, 12, 12, 12]
    assert facts["head_dims"] == [768 // h for h in facts["heads"]]
    assert facts["kv_heads"] == facts["heads"]
    assert (facts["loops"], facts["repeats"]) == ({}, [0] * 12)
    assert facts["parameters"] == 123_587_328
    forward, training = plan.cost.forward, plan.cost.training
    assert facts["flops_per_token"] == {
        "forward": {"full": forward.full, "causal": forward.causal},
        "training": {"full": training.full, "causal": training.causal},
    }
    assert facts["softmax_elements"] == sum(facts["heads"]) * 1024**2
    assert facts["kv_bytes_per_token"] == 2 * 2 * 768 * 12
    assert any("head dim 96" in warning for warning in facts["warnings"])
    assert facts["digest"] == plan.digest


def test_plan_tells_the_memory_of_each_process(call: Call) -> None:
    sharded = ("--world", "8", "--parallel", "fsdp", "--optimizer", "muon")
    said = call("plan", *sharded)
    assert "GiB in each of 8 processes (fsdp) at 32,768 tokens per pass" in said.out
    assert "0.5 GiB of whole weights while a process evaluates or grows" in said.out
    facts = json.loads(call("plan", *sharded, "--json").out)["training_memory"]
    memory = Plan.prism(layers=12, width=768, heads=12).memory(32768, optimizer="muon", parallel="fsdp", world=8)
    assert facts == {
        "optimizer": "muon", "parallel": "fsdp", "world": 8, "average": False, "recompute": False,
        "batch_tokens": 32768, "total": memory.total, **asdict(memory),
    }  # fmt: skip
    assert "device = 'cpu': is where to measure" in call("plan", "--device", "cpu").err
    assert call("plan", "--parallel", "fsdp").err == (
        "error: parallel = 'fsdp': is of several processes: say how many with --world\n"
    )
    assert call("plan", "--world", "0").code == 2


def test_plan_tells_the_memory_of_an_average(call: Call) -> None:
    """One number in float32 for every parameter, kept with the optimizer's moments."""
    without, averaged = (json.loads(call("plan", "--json", *more).out) for more in ((), ("--average",)))
    before, after = without.pop("training_memory"), averaged.pop("training_memory")
    assert without == averaged
    assert after["optimizer"] == before["optimizer"] + 4 * without["parameters"]
    assert after["total"] == before["total"] + 4 * without["parameters"]


def test_plan_is_measured_on_the_device_at_hand(call: Call) -> None:
    small = ("plan", "--layers", "1", "--width", "16", "--heads", "2", "--schedule", "uniform", "--vocabulary", "64")
    few = ("--context", "8", "--batch-tokens", "16", "--measure", "--device", "cpu")
    said = call(*small, *few)
    assert said.code == 0
    assert re.search(r"measured on .* CPU.*: [\d.]+ ms a step of 2 x 8 tokens, [\d,]+ tokens/s", said.out)
    assert re.search(r"writes [\d,]+ tokens/s, one text at a time", said.out)
    facts = json.loads(call(*small, *few, "--json", "--optimizer", "muon", "--recompute", "--average").out)["measured"]
    assert facts["batch"] == 2
    assert facts["tokens_per_second"] == pytest.approx(16 / facts["milliseconds"] * 1e3)
    assert facts["decoding"] > 0
    assert facts["peak_bytes"] is facts["mfu"] is facts["limit_share"] is None  # not known of a CPU
    told = json.loads(call(*small, *few, "--json", "--classes", "3").out)["measured"]
    assert told["decoding"] is None  # a classifier writes nothing
    assert "world = 2: must be 1 with --measure" in call(*small, *few, "--world", "2").err


def test_bench_sizes_say_it_all(call: Call) -> None:
    assert "sizes = '1b': must be of 124m, 354m, 757m" in call("bench", "step", "--sizes", "1b").err
    said = call("bench", "step", "--sizes", "354m", "--batch", "8").err
    assert "sizes = '354m': says layers, width, heads and batch; leave those out" in said


def test_plan_shows_structure_memory_and_warnings(call: Call) -> None:
    said = call("plan", "--heads", "3,12,12,12", "--width", "1536", "--tensor-parallel", "4")
    assert said.code == 0
    assert "warning: tensor-parallel size 4 does not divide the head counts [3]" in said.out
    assert "training memory about" in said.out
    assert "warning: layer 0: head dim 512 is above 256" in said.out


def test_plan_against_uniform_says_neutral(call: Call) -> None:
    said = call("plan", "--against", "uniform")
    assert said.code == 0
    assert "\nneutral: parameters, FLOPs and KV cache are exactly equal" in said.out
    options = ["--batch-tokens", "1024", "--world", "8", "--parallel", "fsdp", "--recompute"]
    lines = [call("plan", "--against", "uniform", *more).out.splitlines() for more in ([], options)]
    memory = [next(line.split() for line in each if line.startswith("training memory, GiB")) for each in lines]
    assert float(memory[1][-1]) < 0.5 * float(memory[0][-1])
    facts = json.loads(call("plan", "--against", "uniform", "--json").out)
    assert facts["against"]["heads"] == [12] * 12
    for key in ("parameters", "flops_per_token", "kv_bytes_per_token"):
        assert facts["against"][key] == facts[key]
    assert facts["against"]["softmax_elements"] > facts["softmax_elements"]


def test_multi_query_is_not_neutral_and_needs_force(call: Call) -> None:
    refused(call("plan", "--mqa"), "mqa = True", "not neutral", "123,587,328", "--kv-group", "--force")
    forced = call("plan", "--mqa", "--force", "--against", "uniform")
    assert forced.code == 0
    assert "not neutral: they differ in parameters" in forced.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--layers", "0"], ["layers = 0", "at least 1"]),
        (["--width", "-4"], ["width = -4", "at least 2"]),
        (["--heads", "7"], ["heads = 7", "must divide width 768", "1, 2, 3, 4, 6, 8, 12"]),
        (["--heads", "7,7"], ["heads = 7", "must divide width 768", "1, 2, 3, 4, 6, 8, 12"]),
        (["--heads", "6,12,6,12"], ["heads[2] = 6", "must not fall: at least 12"]),
        (["--heads", "twelve"], ["heads = 'twelve'", "must be an integer"]),
        (["--heads", "6,6,12,12", "--layers", "5"], ["layers = 5", "must equal the 4 head counts"]),
        (["--schedule", "prysm"], ["'--schedule'", "'prysm' is not one of 'prism', 'linear', 'geometric'"]),
        (["--against", "prysm"], ["'--against'", "'prysm' is not one of"]),
        (["--kv-group", "5"], ["kv_group = 5", "must divide every head count", "one of [1]"]),
        (["--tensor-parallel", "0"], ["tensor_parallel = 0", "at least 1"]),
        (["--batch-tokens", "-5"], ["batch_tokens = -5", "at least 1"]),
        (["--heads", "6,12", "--schedule", "prism"], ["schedule = 'prism'", "list of head counts"]),
        (["--dims", "100"], ["dims = 100", "multiples of 8 up to 256"]),
        (["--ramp", "7"], ["ramp = 7", "must be in 0..6"]),
        (["--plan", "nowhere.json"], ["nowhere.json: cannot be read"]),
        (["--plan", "/dev/zero"], ["/dev/zero: cannot be read (is not a regular file)"]),
        (["--out", "/dev/null"], ["/dev/null: cannot be written"]),
        (["--layers", "1000000"], ["layers = 1000000", "at most 16,384"]),
        (["--width", "600000000000000000"], ["width = 600000000000000000", "at most 1,048,576"]),
        (["--heads", "9" * 400], ["heads = 999", "at most"]),
        (["--heads", "9" * 5000], ["heads = '999", "must be an integer"]),
        (["--heads", "12," + "9" * 400], ["heads = 999", "must divide width 768"]),
        (["--heads", "3,3", "--width", "0"], ["width = 0", "at least 1"]),
        (["--batch-tokens", "9" * 30], ["batch_tokens = 999", "at most"]),
    ],
)
def test_bad_plans_are_refused_with_field_value_and_what_is_allowed(
    arguments: list[str], parts: list[str], call: Call
) -> None:
    refused(call("plan", *arguments), *parts)


def test_falling_head_counts_need_force(call: Call) -> None:
    refused(call("plan", "--heads", "12,6"), "heads[1] = 6", "must not fall")
    assert json.loads(call("plan", "--heads", "12,6", "--force", "--json").out)["heads"] == [12, 6]


def test_a_plan_file_stands_alone(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert call("plan", "--out", str(file)).code == 0
    refused(call("plan", "--plan", str(file), "--layers", "3"), "layers = 3", "--plan")
    refused(call("plan", "--plan", str(file), "--mqa"), "mqa = True", "--plan")


def test_a_plan_is_written_over_a_plan_alone(call: Call, tmp_path: Path) -> None:
    file, text = tmp_path / "plan.json", tmp_path / "notes.txt"
    for _ in range(2):
        assert call("plan", "--out", str(file)).code == 0
    text.write_text("do not lose this")
    refused(call("plan", "--out", str(text)), "notes.txt", "is there already, and is not a plan")
    assert text.read_text() == "do not lose this"
    (tmp_path / "config.toml").write_text("")
    refused(call("plan", "--out", str(file)), "plan.json", "is the plan of the run in that folder")


def test_a_folder_that_is_not_there_is_one_line(call: Call, tmp_path: Path) -> None:
    refused(call("plan", "--out", str(tmp_path / "no" / "plan.json")), "plan.json: No such file or directory")
    refused(call("plan", "--out", str(tmp_path)), "Is a directory")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--heads", "8,8", "--width", "512", "--against", "prism", "--dims", "100"), ("--batch-tokens", "0"),
        ("--tensor-parallel", "0", "--against", "uniform"), ("--measure", "--device", "tpu"),
    ],
)  # fmt: skip
def test_no_plan_is_written_where_something_is_refused(wrong: tuple[str, ...], call: Call, tmp_path: Path) -> None:
    assert call("plan", *wrong, "--out", tmp_path / "plan.json").code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_parallel_size_that_divides_is_accepted(call: Call) -> None:
    assert call("plan", "--schedule", "uniform", "--tensor-parallel", "4").code == 0


def test_a_plan_file_comes_back(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ("--schedule", "reverse", "--context", "77", "--vocabulary", "1000")
    written = json.loads(call("plan", *options, "--out", path, "--json").out)
    read = json.loads(call("plan", "--plan", path, "--json").out)
    assert read == written
    assert Plan.load(path).context == 77
    assert "neutral" in call("plan", "--plan", path, "--against", "uniform").out


def test_a_plan_of_normed_heads(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = call("plan", "--qk-norm", "--out", path)
    assert "queries and keys normed" in said.out
    assert Plan.load(path).qk_norm
    facts = json.loads(call("plan", "--plan", path, "--against", "uniform", "--json").out)
    assert facts["qk_norm"] is facts["against"]["qk_norm"] is True
    refused = call("plan", "--plan", path, "--qk-norm")
    assert refused.code != 0
    assert "cannot be given together with --plan" in refused.err


def test_a_plan_shows_what_is_run_again(call: Call, tmp_path: Path) -> None:
    plan = RepeatBlock(1, 2).apply(LoopHeads(3, (0, 2), 2).apply(Plan.uniform(layers=4, width=256, heads=4)))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    said = call("plan", "--plan", path)
    assert said.code == 0
    assert "run again" in said.out.splitlines()[0]
    assert [word in said.out for word in ("h0,h2 x2", "block x2")] == [True, True]
    facts = json.loads(call("plan", "--plan", path, "--json").out)
    assert facts["loops"] == {"3": {"heads": [0, 2], "passes": 2}}
    assert facts["repeats"] == [0, 2, 0, 0]
    beside = call("plan", "--plan", path, "--against", "uniform").out
    assert "4 x 64 h0,h2 x2" in beside
    assert "4 x 64 block x2" in beside
    assert "not neutral: they differ in FLOPs/token" in beside


# --- the whole way ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a configuration and a finished run, all made by commands."""
    folder = tmp_path_factory.mktemp("place")
    write_texts(folder / "texts")
    config = build_config({**TINY, "data.path": str(folder / "data"), "train.steps": 1000})
    (folder / "tiny.toml").write_text(config.to_toml(), encoding="utf-8")
    for arguments in (
        ["data", "prepare", str(folder / "texts"), "--out", str(folder / "data"), "--held-out", "0.2"],
        ["train", str(folder / "tiny.toml"), "--out", str(folder / "run"), "--train.steps", "12"],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["meristem", *arguments])
            with pytest.raises(SystemExit) as end:
                main()
        assert not end.value.code
    return folder


def test_data_are_prepared_and_verified(place: Path, call: Call, tmp_path: Path) -> None:
    said = call("data", "prepare", place / "texts", "--out", tmp_path / "data", "--held-out", "0.2")
    assert said.code == 0
    assert "257 token ids" in said.out
    assert "whole" in call("data", "verify", tmp_path / "data").out
    shard = next((tmp_path / "data").glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    refused(call("data", "verify", tmp_path / "data"), shard.name, "sha256")


def test_data_need_inputs(call: Call, tmp_path: Path) -> None:
    refused(call("data", "prepare", "--out", tmp_path / "data"), "paths = []", "--builtin")
    missing = tmp_path / "none.txt"
    refused(call("data", "prepare", missing, "--out", tmp_path / "data"), str(missing))
    refused(
        call("data", "prepare", tmp_path, "--out", tmp_path / "data", "--on-error", "ignore"),
        "'--on-error'", "'ignore' is not one of 'refuse', 'skip'",
    )  # fmt: skip


def test_train_leaves_a_whole_run(place: Path) -> None:
    run = RunFolder.open(place / "run")
    assert run.config == load_config(place / "tiny.toml", ["--train.steps", "12"])
    assert [p.name for p in list_checkpoints(run.checkpoints)][-1] == "step-00000012"
    ElementTree.parse(run.path / "loss.svg")


def test_eval_measures_and_draws(place: Path, call: Call, tmp_path: Path) -> None:
    run = copy_run(RunFolder.open(place / "run"), tmp_path / "run")
    said = call("eval", run.path, "--windows", "6", "--distance-windows", "2", "--device", "cpu")
    assert said.code == 0
    stored = json.loads((run.path / "eval.json").read_text(encoding="utf-8"))
    assert f"held-out loss {stored['loss']:.4f}" in said.out
    logged = [e["held_out_loss"] for e in run.read(run.metrics) if "held_out_loss" in e]
    assert stored["loss"] == pytest.approx(logged[-1], rel=1e-6)  # the same six windows
    assert len(stored["attention_distance"]) == 2
    for name in ("structure.svg", "loss.svg"):
        assert ElementTree.parse(run.path / name).getroot().tag.endswith("svg")
        assert str(run.path / name) in said.out
    said = call("eval", run.path, "--windows", "6", "--distance-windows", "2", "--device", "cpu", "--json")
    assert json.loads(said.out)["perplexity"] == pytest.approx(math.exp(stored["loss"]))
    refused(call("eval", run.path, "--distance-windows", "0"), "distance_windows = 0", "at least 1")
    refused(call("eval", run.path, "--windows", "-1"), "windows = -1", "at least 1")


def test_growth_is_drawn_after_training_and_evaluation(place: Path, call: Call, tmp_path: Path) -> None:
    run, picture = tmp_path / "run", tmp_path / "run" / "growth.svg"
    growth = ("--growth.policies", "sgt", "--growth.sgt.start", "2", "--growth.sgt.window", "3")
    assert call("train", place / "tiny.toml", "--out", run, "--train.steps", "8", *growth).code == 0
    ElementTree.parse(picture)
    picture.unlink()
    said = call("eval", run, "--windows", "6", "--distance-windows", "2", "--device", "cpu")
    assert str(picture) in said.out
    ElementTree.parse(picture)
    assert "run again" in (run / "structure.svg").read_text()  # the loops that the run began without
    plan = RunFolder.open(run).newest_plan
    assert not RunFolder.open(run).plan.is_looped
    (layer,) = plan.loops
    table = said.out.splitlines()
    assert next(line for line in table if line.startswith("layer")).endswith("distance  run again")
    assert f"  {plan.layers[layer].run_again}" in next(line for line in table if line.startswith(f"    {layer}  "))
    # The plan of a run is the one it has come to.
    facts = json.loads(call("plan", "--plan", run, "--json").out)
    assert facts["digest"] == plan.digest
    assert facts["loops"] == {str(layer): {"heads": list(plan.loops[layer].heads), "passes": 1}}
    assert plan.layers[layer].run_again in call("plan", "--plan", run).out
    assert not (place / "run" / "growth.svg").exists()


def test_the_plan_of_a_run(call: Call, place: Path, tmp_path: Path) -> None:
    """Before its first checkpoint it is the one the run began with; other folders are refused."""
    run = RunFolder.open(place / "run")
    assert json.loads(call("plan", "--plan", run.path, "--json").out)["digest"] == run.plan.digest
    begun = copy_run(run, tmp_path / "run", last=0)
    assert json.loads(call("plan", "--plan", begun.path, "--json").out)["digest"] == run.plan.digest
    refused(call("plan", "--plan", run.path, "--layers", "3"), "layers = 3", "--plan")
    refused(call("plan", "--plan", place / "texts"), "texts: not a run (it has no config.toml)")
    refused(call("plan", "--plan", tmp_path / "none"), "none: cannot be read")


@pytest.mark.parametrize("policies", ["observe,sgt", "sgt"])
def test_an_entropy_that_is_not_finite_spoils_no_picture(
    policies: str, place: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In entropy.jsonl or events.jsonl it is null, and in the picture a gap."""

    def read(model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
        readings = read_heads(model, tokens, gauge)
        readings.entropy[-1] = math.nan if next(calls) == 1 else readings.entropy[-1]
        return readings

    calls = itertools.count(1)
    monkeypatch.setattr(entropy, "read_heads", read)
    run, picture = tmp_path / "run", tmp_path / "run" / "growth.svg"
    growth = ("--growth.policies", policies, "--growth.sgt.start", "2", "--growth.sgt.window", "3")
    said = call("train", place / "tiny.toml", "--out", run, "--train.steps", "8", *growth)
    assert said.code == 0, said.err
    assert "no growth (an entropy is not finite" in said.out
    folder = RunFolder.open(run)
    log = folder.entropy if "observe" in policies else folder.events
    first = next(entry for entry in folder.read(log) if "head_entropy" in entry)
    assert first["head_entropy"][1][-1] is None
    ElementTree.parse(picture)
    picture.unlink()
    said = call("eval", run, "--windows", "6", "--distance-windows", "2", "--device", "cpu")
    assert said.code == 0, said.err
    ElementTree.parse(picture)
    assert "nan" not in picture.read_text().lower()


def test_generate_continues_the_prompt(place: Path, call: Call) -> None:
    greedy = ("generate", place / "run", "--prompt", "Page 3", "--tokens", "20", "--temperature", "0")
    said = call(*greedy)
    assert said.code == 0
    assert said.out.startswith("Page 3")
    assert len(said.out) > len("Page 3") + 1
    assert re.fullmatch(r"20 tokens in [\d.]+ s, [\d,]+ tokens/s", said.err.splitlines()[-1])
    assert call(*greedy, "--seed", "1").out == said.out
    drawn = [call(*greedy[:-1], "1.0", "--seed", str(seed)).out for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generate_takes_several_prompts(place: Path, call: Call) -> None:
    prompts = ("Page 3", "12 times 12 is", "P")
    options = ("--tokens", "10", "--temperature", "0")
    several = call("generate", place / "run", *(part for p in prompts for part in ("--prompt", p)), *options)
    assert several.code == 0
    parts = several.out.split("\n\n")
    assert len(parts) == 4
    for prompt, text in zip(prompts, parts[:3], strict=True):
        assert call("generate", place / "run", "--prompt", prompt, *options).out == text + "\n"


def test_generate_refuses_bad_requests_before_it_prints(place: Path, call: Call) -> None:
    command = ("generate", place / "run", "--prompt")
    for arguments, parts in (
        (("Page", "--tokens", "99"), ("error: tokens = 99", "from 1 to 29", "context of 32")),
        (("Page", "--tokens", "0"), ("error: tokens = 0", "from 1 to 29")),
        (("P" * 67,), ("prompts = 67", "too many for a context of 32")),
        (("P" * 67, "--prompt", "P"), ("prompts = 67", "too many for a context of 32")),
        (("P", "--temperature", "-1"), ("temperature = -1.0",)),
        (("P", "--seed", "99999999999999999999"), ("seed = 99999999999999999999", "at most 9,223,372,036,854,775,807")),
        (("P\udcff",), (r"prompt = 'P\udcff'", "must be valid UTF-8 text")),
        (("P", "--prompt", "\udcff"), (r"prompt = '\udcff'", "must be valid UTF-8 text")),
    ):
        said = call(*command, *arguments)
        refused(said, *parts)
        assert said.out == ""  # the prompt is not printed before the request is known to be good


def test_generate_adds_as_many_tokens_as_fit_if_not_told(place: Path, call: Call) -> None:
    command = ("generate", place / "run", "--temperature", "0", "--prompt")
    said = call(*command, "Page")
    assert said.code == 0
    assert said.out == call(*command, "Page", "--tokens", "29").out
    assert said.err.startswith("29 tokens in ")
    assert call(*command, "P" * 32).code == 0  # room for one
    assert call(*command, "Page", "--prompt", "P" * 30).code == 0


def test_continue_starts_resumes_and_then_says_it_is_finished(place: Path, call: Call, tmp_path: Path) -> None:
    whole = RunFolder.open(place / "run")
    command = ("train", place / "tiny.toml", "--out", tmp_path / "run", "--train.steps=12", "--continue")
    assert call(*command).code == 0
    assert_equal_runs(RunFolder.open(tmp_path / "run"), whole)
    for path in list_checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        (path / "manifest.json").unlink()
    resumed = call(*command)
    assert resumed.code == 0
    assert "step  5/12" in resumed.out
    assert "step  4/12" not in resumed.out
    assert_equal_runs(RunFolder.open(tmp_path / "run"), whole)
    again = call(*command)
    assert again.code == 0
    assert again.out.startswith("finished at step 12, held-out loss ")
    assert call("resume", tmp_path / "run") == again


def test_continue_does_not_pass_over_a_changed_configuration(place: Path, call: Call) -> None:
    run = place / "run"
    for changed, old in (((), 1000), (("--train.steps=99",), 99)):
        said = call("train", place / "tiny.toml", "--out", run, "--continue", *changed)
        refused(said, f"train.steps = {old}", "began with 12")


def test_training_mistakes_are_one_line(place: Path, call: Call, tmp_path: Path) -> None:
    config, out = place / "tiny.toml", tmp_path / "run"
    train = ("train", config, "--out", out)
    refused(call(*train, "--train.stesp", "3"), "train.stesp = 3", "did you mean train.steps?")
    refused(call(*train, "--stesp", "3"), "argument = '--stesp'", "--train.steps?")
    refused(call(*train, "--data.path", tmp_path / "nowhere"), "nowhere", "no prepared data")
    refused(call(*train, "--train.batch_size=3"), "train.micro_batch = 2", "train.batch_size = 3")
    refused(call(*train, "--log.trackers=tensorbord"), "log.trackers = 'tensorbord'", "tensorboard, trackio, wandb")
    refused(call(*train, "--train.device=tpu"), "device = 'tpu'", "auto, cpu, cuda or cuda:N")
    refused(call(*train, "--train.attention=fast"), "attention = 'fast'", "auto")
    refused(call(*train, "--model.context=100000"), "tokens = ", "a context of 100000 needs")
    refused(call(*train, "--model.schedule=prysm"), "schedule = 'prysm'", "must be one of")
    refused(call("train", tmp_path / "none.toml", "--out", out), "none.toml: cannot be read", "(meristem configs)")
    assert not out.exists()  # nothing is left that would be in the way of the next attempt
    refused(call("train", config, "--out", place / "run"), "out = ", "already holds something", "meristem resume")
    refused(call("resume", tmp_path), "not a run")
    refused(call("resume", place / "run", "--train.steps=20"), "train.steps = 20", "began with 12")
    refused(call("eval", tmp_path), "not a run")
    refused(call("eval", place / "run", "--step", "5"), "step = 5", "[4, 8, 12]")
    refused(call("generate", tmp_path, "--prompt", "a"), "not a run")


def test_a_mistake_in_a_real_process_prints_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meristem", "resume", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    refused(Said(result.returncode, result.stdout, result.stderr), str(tmp_path), "not a run")


# --- bench -----------------------------------------------------------------------------------------------------------


def test_bench_step_writes_its_results(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "bench.json"
    said = call(
        "bench", "step", "--layers", "2", "--width", "128", "--heads", "4", "--vocabulary", "64", "--context", "16",
        "--batch", "2", "--steps", "2", "--warmup", "1", "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert said.code == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["torch"] == torch.__version__
    assert report["plans"] == {"uniform": [4, 4], "prism": [1, 4]}
    assert [result["name"] for result in report["results"]] == ["uniform", "prism"]
    assert all(result["tokens_per_second"] > 0 for result in report["results"])
    assert "uniform" in said.out


def test_a_benchmark_needs_two_steps(call: Call) -> None:
    refused(call("bench", "step", "--steps", "1"), "steps = 1", "at least 2")


# --- one run, one command --------------------------------------------------------------------------------------------


def test_two_commands_cannot_work_on_one_run(call: Call, place: Path) -> None:
    with run_lock(place / "run"):
        refused(call("resume", place / "run"), "another process", f"pid {os.getpid()}")
    assert call("resume", place / "run").code == 0


def test_an_unknown_tracker_leaves_no_folder(call: Call, place: Path, tmp_path: Path) -> None:
    said = call("train", place / "tiny.toml", "--out", tmp_path / "run", "--log.trackers", "nonsense")
    refused(said, "log.trackers", "nonsense")
    assert not (tmp_path / "run").exists()


def test_a_file_needs_a_name(call: Call) -> None:
    refused(call("plan", "--out", ""), "cannot be written (a file needs a name)")


def test_a_usage_error_is_one_line(call: Call) -> None:
    refused(call("plan", "--layers", "many"), "'--layers'", "(see meristem plan --help)")
    refused(call("plan", "--nope"), "No such option: --nope")
    refused(call("resume"), "Missing argument")


# --- help and remedies -----------------------------------------------------------------------------------------------


def test_the_help_of_train_lists_every_setting_with_choices_and_default(call: Call) -> None:
    said = " ".join(call("train", "--help").out.split())
    for setting in all_settings():
        assert f" --{setting.key} " in said
    assert "--train.on_divergence stop|rewind [default: stop]" in said
    assert f"--growth.policies any of {', '.join(POLICIES)}, MODULE:CLASS [default: not given]" in said
    assert "--growth.sgt.heads high|low|random|all [default: high]" in said
    assert "--growth.stack.at NUMBER,... [default: 0.3]" in said
    assert "--growth.stack.order stack|interleave [default: stack]" in said
    assert "--growth.sgt.birth gate|paper [default: gate]" in said
    assert "--log.trackers tensorboard|trackio|wandb,... [default: not given]" in said


COMMANDS = (
    "plan", "configs", "train", "resume", "eval", "report", "audit", "generate", "data prepare",
    "data prepare-labelled", "data verify", "demo incrt", "bench step", "bench growth", "bench save", "bench start",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str, call: Call) -> None:
    said = call(*command.split(), "--help")
    assert said.code == 0
    assert f"Examples:\n    meristem {command}" in said.out


def test_choices_are_listed_and_others_refused_in_a_line(call: Call) -> None:
    assert "<refuse|skip>" in call("data", "prepare", "--help").out
    refused(call("demo", "incrt", "--task", "riddle"), "'--task'", "'teacher', 'bag', 'noise'")


def test_errors_name_the_flags_that_mend_them(place: Path, call: Call, tmp_path: Path) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    refused(call("train", place / "tiny.toml", "--out", run), f"go on with the run (meristem resume {run})")
    shutil.rmtree(run / "checkpoints")
    refused(call("resume", run), f"begin anew (meristem resume {run} --from-start)")
    texts = place / "texts"
    refused(call("data", "prepare", texts, "--out", place / "data", "--held-out", "0.3"), "(--overwrite)")
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\na,1\nb\nc,0\nd,0\n")
    refused(call("data", "prepare-labelled", rows, "--out", tmp_path / "data"), "(--on-error skip)")


OWN_FLAGS = ("reading.py", "start.py", "processes.py", "repeat.py")


def test_flags_are_named_by_the_command_line_only() -> None:
    """Except where it is called itself, its overrides are read, a page says how to repeat a run, or in a script.

    Docstrings are for programmers.
    """
    source = Path(meristem.__file__).parent
    found = []
    for path in source.rglob("*.py"):
        if path.parent.name in ("cli", "standalone") or path.name in OWN_FLAGS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.search(r"(?<!\S)\(?--[a-z]|meristem (resume|train) ", text) and "\n" not in text:
                found.append(f"{path.relative_to(source)}: {text}")
    assert found == []


def test_what_the_library_says_is_logged(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A note that concerns the run is a warning, seen without any setting-up of logs."""
    run = shutil.copytree(place / "run", tmp_path / "run")
    for path in list_checkpoints(run / "checkpoints")[-1:]:
        (path / "model.safetensors").write_bytes(b"")
    load_run(run, device="cpu")
    assert [record.levelname for record in caplog.records if "passed over" in record.getMessage()] == ["WARNING"]


def test_notes_of_the_library_are_plain_lines(place: Path, tmp_path: Path, call: Call) -> None:
    """On the standard output; on the standard error where the output is a result."""
    run = shutil.copytree(place / "run", tmp_path / "run")
    for path in list_checkpoints(run / "checkpoints")[-1:]:
        (path / "model.safetensors").write_bytes(b"")
    said = call("eval", run, "--device", "cpu", "--json")
    assert said.err.startswith("damaged checkpoint passed over: ")
    assert json.loads(said.out)["step"] == 8
    assert "\ndamaged checkpoint passed over: " in f"\n{call('resume', run).out}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("meristem tr", "train"), ("meristem bench re", "recipe"), ("meristem eval x --ave", "--average")],
)
def test_shells_complete_verbs_and_options(words: str, expected: str) -> None:
    asked = {"_MERISTEM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "meristem"]
    said = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True)
    assert said.stdout.split() == [expected], said.stderr


def test_progress_says_what_is_left_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 100.0, list[str]()
    monkeypatch.setattr("meristem.cli.messages.time.monotonic", lambda: now)
    report = paced(said.append)
    for done in range(4):
        report("training", done, 20)
        now += 3.0
    report("measuring", 0, 2)
    assert said == ["training: 0 of 20", "training: 2 of 20, 0:54 left of this part", "measuring: 0 of 2"]


def test_progress_of_what_counts_down_names_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 100.0, list[str]()
    monkeypatch.setattr("meristem.cli.messages.time.monotonic", lambda: now)
    report = paced(said.append)
    for left in (144, 140):
        report("heads left", left, 144)
        now += 6.0
    assert said == ["heads left: 144 of 144", "heads left: 140 of 144"]
