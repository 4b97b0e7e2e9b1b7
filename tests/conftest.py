"""Settings for all tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from commands import Call, Said

if TYPE_CHECKING:
    from meristem.runs.run_folder import RunFolder

# Parallel test processes share the cores; torch would start a thread per core in each, which then wait for one
# another many times longer than they work. Set before torch is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# A shell that starts a job in the background lets it ignore Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("meristem", deadline=None)  # a busy machine is no error
settings.load_profile("meristem")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process."""
    from meristem.cli import main

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["meristem", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Said(int(end.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text, made once per test process."""
    from training.helpers import prepared

    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared labelled rows, made once per test process."""
    from training.helpers import prepared_labelled

    folder = tmp_path_factory.mktemp("labelled") / "data"
    prepared_labelled(folder)
    return folder


@pytest.fixture(scope="session")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One uninterrupted run, never changed by a test: copy it."""
    from training.helpers import trained

    return trained(data, tmp_path_factory.mktemp("whole") / "run")
