"""No policy names another one, and the engine names none."""

from __future__ import annotations

import ast
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import meristem.growth.policies
from meristem.growth import Policy

POLICIES = Path(meristem.growth.policies.__file__).parent
MODULES = sorted(path.stem for path in POLICIES.glob("*.py") if path.stem != "__init__")
ENGINE = ("grower", "policy", "apply", "edits", "events", "state")
# Which policy wrote a line of before events said so has to be known by the name.
ALLOWED = {"events": ("_FORMER", "former =", '_text(data, "policy", "incrt")')}


def classes(module: str) -> list[Any]:
    """The policies that a module defines."""
    home = import_module(f"meristem.growth.policies.{module}")
    own = [value for value in vars(home).values() if isinstance(value, type) and value.__module__ == home.__name__]
    return [value for value in own if issubclass(value, Policy) and is_dataclass(value)]


def names(module: str) -> set[str]:
    """What a policy's module and classes are called, in code and in events."""
    found = classes(module)
    return {module, *(one.__name__ for one in found), *(one.name for one in found if one.name)}


def imports(source: str) -> set[str]:
    """Modules, and what is taken from them, in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def words(source: str, allowed: tuple[str, ...] = ()) -> set[str]:
    """All identifiers and words in strings; comments and docstrings do not count, nor lines with what is allowed."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[line - 1] = ""
    code = [line.split("  # ")[0] for line in lines if not line.lstrip().startswith("#")]
    return set(re.findall(r"\w+", "\n".join(line for line in code if not any(text in line for text in allowed))))


def test_the_policies_are_found() -> None:
    assert {"sgt", "incrt", "published", "random_births", "prune", "observe", "block_loop"} <= set(MODULES)
    assert all(classes(module) for module in MODULES)
    assert names("random_births") == {"random_births", "RandomBirths"}


@pytest.mark.parametrize("module", MODULES)
def test_no_policy_imports_or_names_another(module: str) -> None:
    source = (POLICIES / f"{module}.py").read_text(encoding="utf-8")
    assert not [name for name in imports(source) if name.startswith("meristem.growth.policies")]
    assert "meristem.growth" not in imports(source)  # which has them all
    others = set().union(*(names(other) for other in MODULES if other != module)) - names(module)
    assert not words(source) & (others - own_fields(module))


def own_fields(module: str) -> set[str]:
    """Settings may be called as they like: `prune` is one of the published rule."""
    return {field for one in classes(module) for field in one.__dataclass_fields__}


@pytest.mark.parametrize("module", ENGINE)
def test_the_engine_names_no_policy(module: str) -> None:
    source = (POLICIES.parent / f"{module}.py").read_text(encoding="utf-8")
    assert not [name for name in imports(source) if name.startswith("meristem.growth.policies")]
    everyone = set().union(*(names(policy) for policy in MODULES))
    # `stack` is also what a model calls its blocks, and what torch does with tensors.
    assert not words(source, ALLOWED.get(module, ())) & (everyone - {"stack"})


def test_what_the_engine_imports_names_no_policy() -> None:
    """Nor does it through modules of its own, such as one that reads states of before."""
    folder, seen, ahead = POLICIES.parent, set[str](), {*ENGINE}
    while ahead:
        module = ahead.pop()
        seen.add(module)
        found = imports((folder / f"{module}.py").read_text(encoding="utf-8"))
        assert not [name for name in found if name.startswith("meristem.growth.policies")], module
        parts = {name.removeprefix("meristem.growth.").split(".")[0] for name in found if "meristem.growth." in name}
        ahead |= {part for part in parts if (folder / f"{part}.py").is_file()} - seen
