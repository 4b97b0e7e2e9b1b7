"""Everything that users call has an example in its docstring, and all examples are true."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meristem
from meristem import Classifier, Decoder, Grower, Plan, train
from meristem.gauges.probe import Probe
from meristem.integrations import GrowthCallback, HfModel
from meristem.runs.run_folder import LoadedRun
from training.helpers import TINY, tiny_config

PUBLIC = ("meristem", "meristem.growth", "meristem.gauges", "meristem.integrations")
# Of these every public method and property is used in an example too: its own, or that of its class.
WHOLE = (Plan, Decoder, Classifier, LoadedRun, Grower, HfModel, GrowthCallback)
# Public in Python, but called by the training loop, gauges, edits, decoding and export, and not by users.
INNER = {
    "attention_mask", "draw", "follow_plan", "gates", "initialise", "loss_of", "make_block", "normed", "rope", "shares",
    "stack", "stream", "unembedding", "use_attention", "with_idle_gates",
}  # fmt: skip
CALLED_BY_A_TRAINER = {"on_init_end", "on_save", "on_step_end", "on_train_begin", "on_train_end"}
EXEMPT: dict[type, set[str]] = {Decoder: INNER, Classifier: INNER, GrowthCallback: CALLED_BY_A_TRAINER}


def public_names() -> dict[str, Any]:
    """What users import, by the name they know it by; `__version__` is no call."""
    modules = [(name, importlib.import_module(name)) for name in PUBLIC]
    named = {f"{home}.{name}": getattr(module, name) for home, module in modules for name in module.__all__}
    kept = {id(thing): (name, thing) for name, thing in reversed(named.items()) if not isinstance(thing, str)}
    return dict(reversed(kept.values())) | {"meristem.load_run.Run": LoadedRun}


def own_methods(thing: Any) -> dict[str, Any]:
    """The public methods and properties of a class that are written in Meristem, inherited ones too."""
    if thing not in WHOLE:
        return {}
    found = {name: inspect.getattr_static(thing, name) for name in dir(thing) if not name.startswith("_")}
    plain = {name: getattr(value, "fget", None) or getattr(value, "__func__", value) for name, value in found.items()}
    return {
        name: value
        for name, value in plain.items()
        if inspect.isfunction(value) and value.__module__.startswith("meristem.")
    }


def examples_of(name: str, thing: Any) -> list[doctest.DocTest]:
    """The examples in a docstring, and in those of the methods of a class."""
    parser = doctest.DocTestParser()
    texts = [(name, inspect.getdoc(thing) if thing.__doc__ else "")]
    texts += [(f"{name}.{method}", inspect.getdoc(value)) for method, value in own_methods(thing).items()]
    found = [parser.get_doctest(text or "", {}, place, place, 0) for place, text in texts]
    return [test for test in found if test.examples]


NAMES = public_names()


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_users_call_has_an_example(name: str) -> None:
    thing = NAMES[name]
    examples = examples_of(name, thing)
    assert any(test.name == name for test in examples), f"{name} has no example in its docstring"
    shown = "\n".join(example.source for test in examples for example in test.examples)
    for method in own_methods(thing).keys() - EXEMPT.get(thing, set()):
        used = re.search(rf"\.{method}\b", shown) or any(test.name == f"{name}.{method}" for test in examples)
        assert used, f"{name}.{method} is in no example"


def test_python_completes_names_that_are_not_loaded_yet() -> None:
    assert set(meristem.__all__) <= set(dir(meristem))


def test_only_what_is_there_is_exempt() -> None:
    for thing, names in EXEMPT.items():
        there = set(own_methods(Decoder)) | set(own_methods(Classifier)) if names is INNER else set(own_methods(thing))
        assert names <= there


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, data: Path, labelled: Path) -> Path:
    """A folder with what examples find there: texts, a configuration, a run and a classifier."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "data").symlink_to(data)
    (folder / "tiny.toml").write_text("\n".join(f"{key} = {value!r}" for key, value in TINY.items()))
    train(tiny_config(data), folder / "runs/first")
    train(tiny_config(labelled), folder / "runs/classifier")
    return folder


def at_hand() -> dict[str, Any]:
    """The names that examples have: all that is public, and the small things that docs/reference.md tells of."""
    public = {name.rpartition(".")[2]: thing for name, thing in NAMES.items()}
    plan = Plan.uniform(layers=2, width=32, heads=4, vocabulary=100, context=16)
    model, windows = Decoder(plan), torch.arange(34).view(2, 17)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    return public | {
        "meristem": meristem, "torch": torch, "Path": Path, "plan": plan, "model": model, "tokens": tokens,
        "targets": targets, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "probe": Probe(model, tokens, targets),
    }  # fmt: skip


def all_examples() -> Iterator[doctest.DocTest]:
    """The examples of the whole package, of what is not public too."""
    source = Path(meristem.__file__).parents[1]
    for path in sorted(source.rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(".".join(path.relative_to(source).with_suffix("").parts))
            yield from (test for test in doctest.DocTestFinder().find(module) if test.examples)


@pytest.mark.parametrize("test", list(all_examples()), ids=lambda test: test.name)
def test_the_examples_of_docstrings_are_true(
    test: doctest.DocTest, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    said: list[str] = []
    test.globs = {**test.globs, **at_hand()}
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
