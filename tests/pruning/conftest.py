"""How fast models write does not matter here."""

import pytest

from meristem.pruning import search


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "WRITTEN", 2)
    monkeypatch.setattr(search, "CALLS", 1)
