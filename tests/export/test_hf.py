"""Exported folders: loaded by transformers elsewhere, whole or not there at all, and honest about themselves."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import Call
from meristem.data import TokenData, open_data
from meristem.errors import InputError, RunError
from meristem.export import export_run
from meristem.export.hf import load_exported
from meristem.model import Decoder
from meristem.registration import watch_for_transformers
from meristem.runs.run_folder import LoadedRun, RunFolder, load_run
from training.helpers import trained

from .helpers import FIXTURES

SOURCE = Path(__file__).resolve().parents[2] / "src"


def python(*arguments: str | Path, beside: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with nothing of ours on its path, or with our sources; it keeps copies of code in `beside`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(beside), "PYTHONPATH": str(SOURCE)}
    if beside is not None:
        del environment["PYTHONPATH"]
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=beside
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs with loops and with grown heads, and a classifier, exported."""
    out = tmp_path_factory.mktemp("exported")
    return {name: export_run(FIXTURES / name, out / name).folder for name in ("loops", "heads", "classifier")}


def test_folders_are_loaded_where_there_is_no_meristem(folders: dict[str, Path], tmp_path: Path) -> None:
    done = python(Path(__file__).with_name("elsewhere.py"), folders["loops"], folders["classifier"], beside=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kinds"] == ["MeristemConfig", "MeristemForCausalLM"]
    run = load_run(FIXTURES / "loops", device="cpu")
    assert (
        said["greedy"] == said["uncached"] == said["static"] == [greedy(run, text, 6) for text in ("Page 7: 1", "Pa")]
    )
    assert said["written"] == "Page" + run.tokenizer.decode(greedy(run, "Page", 4))
    assert said["base"] == "MeristemModel"
    assert said["newly"] == [2, 3]
    judge = load_run(FIXTURES / "classifier", device="cpu")
    for text, scores, found in zip(("w3 high w4", "odd"), said["classes"], said["judged"], strict=True):
        with torch.no_grad():
            expected = judge.model.logits(torch.from_numpy(judge.recipe.encode(text))[None])[0]
        assert scores == pytest.approx(expected.tolist(), abs=1e-5)
        assert {each["label"] for each in found} == set(judge.recipe.classes)
        assert found[0]["label"] == judge.recipe.classes[int(expected.argmax())]


def greedy(run: LoadedRun, prompt: str, count: int) -> list[int]:
    """What the run's own model writes, without ids that stand for nothing."""
    tokens = run.tokenizer.encode(prompt).tolist()
    begin = len(tokens)
    for _ in range(count):
        with torch.no_grad():
            logits = run.model.logits(torch.tensor([tokens]))[0, -1, : run.tokenizer.vocabulary]
        tokens.append(int(logits.argmax()))
    return tokens[begin:]


def load_and_save(folders: Sequence[Path], out: Path) -> list[str]:
    """Load exported folders without the flag, and save them again; the modules that the models come from."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    homes = []
    for folder, auto in zip(folders, (AutoModelForCausalLM, AutoModelForSequenceClassification), strict=True):
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        model = auto.from_pretrained(folder)
        model.save_pretrained(out)
        homes.append(type(model).__module__)
    return homes


def assert_stands_alone(folder: Path) -> None:
    code = {"configuration_meristem.py", "modeling_meristem.py", "tokenization_meristem.py"}
    assert code <= set(os.listdir(folder))


def test_no_flag_is_needed_after_meristem_is_imported(folders: dict[str, Path], tmp_path: Path) -> None:
    code = f"import sys, meristem\nfrom pathlib import Path\n{inspect.getsource(load_and_save)}".replace(
        "Sequence[Path]", "list"
    )
    code += "\nprint(load_and_save(sys.argv[1:3], sys.argv[3]))"
    done = python("-c", code, folders["heads"], folders["classifier"], tmp_path)
    assert done.stdout == f"{['meristem.export.standalone.modeling_meristem'] * 2}\n", done.stderr
    assert_stands_alone(tmp_path)


def test_no_flag_is_needed_after_somebody_has_only_asked_for_transformers(folders: dict[str, Path]) -> None:
    code = """import sys, meristem, importlib.util
assert importlib.util.find_spec("transformers") is not None and "transformers" not in sys.modules
from transformers import AutoConfig
print(type(AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False)).__module__)"""
    done = python("-c", code, folders["heads"])
    assert done.stdout == "meristem.export.standalone.configuration_meristem\n", done.stderr


def test_no_flag_is_needed_if_transformers_was_there_first(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "transformers" in sys.modules
    watch_for_transformers()
    homes = load_and_save([folders["heads"], folders["classifier"]], tmp_path)
    assert homes == ["meristem.export.standalone.modeling_meristem"] * 2
    assert_stands_alone(tmp_path)


def test_meristem_is_imported_without_transformers_and_torch() -> None:
    code = "import sys, meristem; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert python("-c", code).stdout == "[]\n"


def test_a_transformers_that_cannot_be_imported_fails_as_it_does_without_us(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('broken')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport meristem\nimport transformers"
    assert "ImportError: broken" in python("-c", code).stderr
    (tmp_path / "transformers.py").write_text("__version__ = '1.0'\n")
    done = python("-c", code + "\nprint(transformers.__version__, transformers.__loader__.__class__.__name__)")
    assert done.stdout == "1.0 SourceFileLoader\n", done.stderr


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A place of our own for the code that transformers takes out of folders."""
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
        patch.setattr(sys, "path", [*sys.path])  # to which transformers adds the place
        yield


@pytest.mark.parametrize("name", ["loops", "classifier"])
def test_the_check_inside_finds_changed_weights(
    name: str,
    folders: dict[str, Path],
    own_code: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(folders[name], tmp_path / f"copy-of-{name}")
    assert checked(folder, monkeypatch) == 0
    assert re.search(r"largest difference of a logit: \d\.\d+e-\d+ \(allowed: ", capsys.readouterr().out)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.weight"] += 0.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert checked(folder, monkeypatch) == 1


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of the check inside a folder."""
    monkeypatch.setattr(sys, "argv", ["check.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(folder / "check.py"), run_name="__main__")
    return int(end.value.code or 0)


def test_the_manifest_and_the_card_say_what_was_exported(folders: dict[str, Path]) -> None:
    folder = folders["loops"]
    manifest = json.loads((folder / "export.json").read_text())
    assert set(manifest["files"]) | {"export.json"} == set(os.listdir(folder))
    assert (manifest["run"], manifest["step"], manifest["to"]) == ("loops", 12, "hf")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    run = RunFolder.open(FIXTURES / "loops")
    for fact in ("![", "](structure.svg)", run.data_digest, f"{run.newest_plan.parameters:,}", "| steps | 12 of 24 |",
                 "| held-out loss | ", "drift apart when you fine-tune"):  # fmt: skip
        assert fact in card
    assert "<svg" in (folder / "structure.svg").read_text()
    assert "drift apart" not in (folders["heads"] / "README.md").read_text()
    assert "pipeline_tag: text-classification" in (folders["classifier"] / "README.md").read_text()


def test_the_command_exports_what_it_is_told_to(data: Path, tmp_path: Path, call: Call) -> None:
    run = trained(data, tmp_path / "run", train__average=0.9)
    said = call("export", run.path, "--out", tmp_path / "last")
    assert said.code == 0, said.err
    assert re.search(r"MeristemForCausalLM of step 12\nchecked: the largest difference of a logit is \d", said.out)
    assert said.err == ""
    assert call("export", run.path, "--out", tmp_path / "average", "--average").code == 0
    assert call("export", run.path, "--out", tmp_path / "early", "--step", "4").code == 0
    for name, options in {"last": {}, "average": {"average": True}, "early": {"step": 4}}.items():
        model = load_run(run.path, device="cpu", **options).model  # type: ignore[arg-type]
        found = load_exported(tmp_path / name, "MeristemForCausalLM")
        assert torch.equal(found.model.embed_tokens.weight, model.embedding.weight)
    assert "average over the training" in (tmp_path / "average" / "README.md").read_text()
    card = (tmp_path / "early" / "README.md").read_text()
    stream, early = open_data(data), next(entry for entry in run.read(run.metrics) if entry["step"] == 4)
    assert isinstance(stream, TokenData)
    facts = {
        "steps": "4 of 12", "epochs": f"{early['tokens'] / len(stream.split('train')):.3g}",
        "optimizer": f"adamw, rate {run.config.optimizer.lr:g}, {run.config.train.batch_size} rows an update",
        "data": f"{len(stream.split('train')):,} training tokens in {stream.index.train.documents} documents, "
        f"{len(stream.split('held_out')):,} held out",
    }  # fmt: skip
    for name, value in facts.items():
        assert f"| {name} | {value} |" in card


def test_what_a_classifier_cannot_be_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    for to in ("llama", "gguf"):
        with pytest.raises(InputError, match=f"to = '{to}': is a language model, and this run is of a classifier"):
            export_run(FIXTURES / "classifier", tmp_path / to, to)


def test_the_command_works_in_a_process_of_its_own(tmp_path: Path) -> None:
    """There it is the first to import transformers, which then learns of our models."""
    done = python("-m", "meristem", "export", FIXTURES / "heads", "--out", tmp_path / "out")
    assert (done.returncode, "checked: the largest difference" in done.stdout) == (0, True), done.stderr
    assert done.stderr == ""


def test_only_an_earlier_export_is_replaced(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_run(FIXTURES / "heads", out)  # an empty folder will do
    with pytest.raises(InputError, match="holds an earlier export"):
        export_run(FIXTURES / "loops", out)
    said = call("export", FIXTURES / "loops", "--out", out)
    assert (said.code, "(--overwrite)" in said.err) == (2, True)
    assert call("export", FIXTURES / "loops", "--out", out, "--overwrite").code == 0
    assert json.loads((out / "export.json").read_text())["run"] == "loops"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"other files \(notes\.txt\)"):
        export_run(FIXTURES / "heads", out, overwrite=True)
    (out / "export.json").unlink()
    with pytest.raises(InputError, match="holds something else"):
        export_run(FIXTURES / "heads", out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_an_export_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, tokens: plain(self, tokens) + 0.01)
    with pytest.raises(RunError, match=r"differs from the run's by 1\.00e-02 in a logit"):
        export_run(FIXTURES / "loops", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_transformers_the_folder_is_written_and_not_checked(tmp_path: Path, folders: dict[str, Path]) -> None:
    code = "import sys; sys.modules['transformers'] = None\nimport meristem; print(meristem.export_run(*sys.argv[1:]))"
    done = python("-c", code, FIXTURES / "loops", tmp_path / "out")
    assert "not checked: what loads it is not installed here" in done.stdout, done.stderr
    for name in ("model.safetensors", "config.json", "tokenizer.json", "modeling_meristem.py"):
        assert (tmp_path / "out" / name).read_bytes() == (folders["loops"] / name).read_bytes()


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="to = 'pickle': must be one of hf, llama, onnx, gguf"):
        export_run(FIXTURES / "loops", tmp_path / "out", "pickle")
