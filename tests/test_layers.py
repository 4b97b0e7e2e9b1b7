"""Imports go one way: a package imports those before it in `LAYERS` and never one after it."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"

# From the bottom to the top. A new module or package gets its place here.
LAYERS = (
    "errors", "choices", "wording", "limits", "amounts", "settings", "files", "seeds", "cores", "records", "ranks",
    "devices", "arguments", "schedules", "plan", "moves",
    "model", "decoding", "gauges", "growth", "data", "config", "runs", "pretrained", "training",
    "comparison", "evaluation", "report", "watch", "export",
    "registration", "integrations", "synthetic", "bench", "pruning", "doctor",
    "cli", "__main__",
)  # fmt: skip

# Files that are copied out of the package, and import their neighbours as they will lie there.
STANDALONE = "standalone"

# Imports upwards that are known and still to be mended, as (module, imported module).
ALLOWED: frozenset[tuple[str, str]] = frozenset()


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module of the package by its dotted name, but the public surface, which imports from everywhere."""
    for path in sorted((root / "meristem").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != "meristem":
            yield name, path


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line and name of each module of ours that a file imports, wherever in it, for type checks only too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level and path.parent.name == STANDALONE:
                continue
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the whole name"
            whole = node.module == "meristem"
            names = [f"meristem.{alias.name}" for alias in node.names] if whole else [node.module or ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "meristem" and name != "meristem.__version__":
                yield node.lineno, name


def upward_imports(root: Path) -> list[str]:
    """Every import that leads to a later layer, in words."""
    found = []
    for module, path in modules(root):
        layer = module.split(".")[1]
        assert layer in LAYERS, f"{module}: say in LAYERS where {layer} belongs"
        for line, name in imported(path):
            parts = name.split(".")
            target = parts[1] if len(parts) > 1 else "the public surface"
            upwards = target not in LAYERS or LAYERS.index(target) > LAYERS.index(layer)
            if upwards and (module, name) not in ALLOWED:
                found.append(f"{path.relative_to(root)}:{line}: {layer} imports {name}, which is in a later layer")
    return found


def test_imports_go_one_way() -> None:
    assert upward_imports(SOURCE) == []


def test_an_import_upwards_is_named(tmp_path: Path) -> None:
    package = tmp_path / "meristem" / "data"
    package.mkdir(parents=True)
    (package / "sampler.py").write_text(
        "from typing import TYPE_CHECKING\n\nfrom meristem.errors import InputError\n\n"
        "if TYPE_CHECKING:\n    from meristem.training.train import train\n\n"
        "def later():\n    from meristem import cli\n"
    )
    assert upward_imports(tmp_path) == [
        "meristem/data/sampler.py:6: data imports meristem.training.train, which is in a later layer",
        "meristem/data/sampler.py:9: data imports meristem.cli, which is in a later layer",
    ]
