"""Exported models work with the transformers that vLLM takes (>= 5.16.1, < 5.20), installed aside."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.16.1", "5.19.0"])
def test_the_same_holds_for_another_transformers(version: str, tmp_path: Path) -> None:
    """An environment with it, which finds everything else in this one; skipped where it cannot be had."""
    venv.create(tmp_path, with_pip=True)
    binaries = tmp_path / ("Scripts" if os.name == "nt" else "bin")
    install = [str(binaries / "python"), "-m", "pip", "install", "--quiet", f"transformers=={version}"]
    if subprocess.run(install).returncode:
        pytest.skip(f"transformers {version} cannot be installed here")
    where = sysconfig.get_path("purelib", vars={"base": str(tmp_path), "platbase": str(tmp_path)})
    (Path(where) / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    code = "import transformers; print(transformers.__version__)"
    found = subprocess.run([binaries / "python", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == version
    tests = [f"tests/export/test_{name}.py" for name in ("modeling", "hf", "tokenizers", "llama")]
    done = subprocess.run(
        [binaries / "python", "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
