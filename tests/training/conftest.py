"""Data and one uninterrupted run, made once per test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from meristem.training.run import RunFolder

from .helpers import prepared, prepared_labelled, trained


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labelled") / "data"
    prepared_labelled(folder)
    return folder


@pytest.fixture(scope="session")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Never changed by a test: copy it."""
    return trained(data, tmp_path_factory.mktemp("whole") / "run")
