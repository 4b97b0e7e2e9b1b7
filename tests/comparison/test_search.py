"""Searching for settings: trials are functions of what came before, so that nothing is repeated and nothing is kept."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from comparison.helpers import comparison, result, trained
from meristem.comparison.analysis import analyse
from meristem.comparison.ended import finished_runs
from meristem.comparison.file import Comparison
from meristem.comparison.planning import (
    RunKey,
    Waiting,
    best_trial,
    configuration,
    count_of_runs,
    known_keys,
    possible_keys,
    seed_key,
    trial_settings,
    tuning_keys,
)
from meristem.comparison.record import show
from meristem.comparison.results import Result
from meristem.comparison.running import run_comparison
from meristem.comparison.search import FIRST, Range, Search, suggested
from meristem.errors import RunError
from meristem.runs.run_folder import RunFolder
from training.helpers import prepared

SPACE = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.layers": {"low": 2, "high": 9},
    "optimizer.weight_decay": {"low": 0.0, "high": 0.5},
    "model.schedule": ["uniform", "prism"],
}
FOUND = Search((("optimizer.lr", Range(1e-4, 1e-1, True)),), trials=30, seeds=(9,), arms=("a",))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("search"), 30)


def asked(folder: Path, data: Path, **changes: Any) -> Comparison:
    search = {"trials": FIRST + 2, "seeds": [8, 9], "space": SPACE, "arms": ["searched"]}
    return comparison(
        folder, data, arms={"searched": {}, "plain": {}}, primary=["searched", "plain"], search={**search, **changes}
    )  # fmt: skip


def test_trials_and_what_is_reported_of_them_are_possible_runs(tmp_path: Path, data: Path) -> None:
    found = asked(tmp_path, data)
    reported = {RunKey("searched", 1, trial=FIRST), RunKey("plain", 1)}
    assert {*tuning_keys(found), *reported} < {*possible_keys(found)}


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RunError, match=r"optuna is not installed; install it with: pip install 'meristem\[search\]'"):
        suggested.__wrapped__(FOUND, (), 0)


class TestWithOptuna:
    """What needs the extra."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("optuna", reason="Optuna is not installed (extra `search`)")

    def test_trials_are_within_the_space_and_come_again(self, tmp_path: Path, data: Path) -> None:
        found = asked(tmp_path, data)
        tried = [trial_settings(found, "searched", number, {}) for number in range(FIRST)]
        assert tried == [trial_settings(asked(tmp_path, data), "searched", number, {}) for number in range(FIRST)]
        assert len({str(one) for one in tried}) == FIRST
        for one in tried:
            assert 1e-4 <= one["optimizer.lr"] <= 1e-1
            assert one["optimizer.lr"] == float(f"{one['optimizer.lr']:.4g}")
            assert one["model.layers"] in range(2, 10)
            assert one["model.schedule"] in ("uniform", "prism")
            config = configuration(found, RunKey("searched", 8, trial=tried.index(one)), {})
            assert {key: config[key] for key in SPACE} == one
        other = asked(tmp_path, data, sampler_seed=1)
        assert trial_settings(other, "searched", 0, {}) != tried[0]

    def test_later_trials_learn_from_those_before(self) -> None:
        """The best rate is 1e-2; trials after the first ones lie nearer to it, in the median, than drawn ones."""

        def distance(tried: dict[str, Any]) -> float:
            return abs(math.log10(tried["optimizer.lr"]) + 2)

        scores: list[float] = []
        for number in range(FOUND.trials):
            tried = suggested(FOUND, tuple(scores) if number >= FIRST else (), number)
            scores.append(distance(tried))
        learned, drawn = sorted(scores[FIRST:]), sorted(scores[:FIRST])
        assert learned[len(learned) // 2] < drawn[len(drawn) // 2]

    def test_a_trial_that_diverged_is_the_worst(self) -> None:
        scores = (math.inf, *(0.1 * number for number in range(1, FIRST)))
        assert 1e-4 <= suggested(FOUND, scores, FIRST)["optimizer.lr"] <= 1e-1

    def results(self, found: Comparison, losses: list[float]) -> dict[RunKey, Result]:
        return {
            RunKey("searched", seed, trial=trial): result("searched", seed, loss + 0.1 * (seed - 8.5))
            for trial, loss in enumerate(losses)
            for seed in (8, 9)
        }

    def test_the_best_trial_is_reported_on_other_seeds(self, tmp_path: Path, data: Path) -> None:
        found = asked(tmp_path, data)
        assert count_of_runs(found, {}) == 2 * (FIRST + 2) + 2 * 2
        with pytest.raises(Waiting):
            configuration(found, RunKey("searched", 8, trial=FIRST), {})
        losses = [3.0 - 0.01 * number for number in range(FIRST)]
        some = self.results(found, losses)
        configuration(found, RunKey("searched", 8, trial=FIRST), some)
        with pytest.raises(Waiting):  # before all trials are done nothing is chosen
            seed_key(found, "searched", 0, some)
        known = self.results(found, [*losses, 2.5, 2.7])
        assert best_trial(found, "searched", known) == FIRST
        assert seed_key(found, "searched", 0, known) == RunKey("searched", 0, trial=FIRST)
        assert seed_key(found, "plain", 0, known) == RunKey("plain", 0)
        assert {key.path.as_posix() for key in known_keys(found, known) if key.seed == 0} == {
            f"runs/searched/trial-{FIRST}/seed-0", "runs/plain/seed-0",
        }  # fmt: skip

    def test_what_was_found_is_said_and_what_was_not_searched_too(self, tmp_path: Path, data: Path) -> None:
        found = asked(tmp_path, data)
        known = self.results(found, [3.0 - 0.01 * number for number in range(FIRST + 2)])
        best = FIRST + 1
        settings = trial_settings(found, "searched", best, known)
        for seed in found.seeds:
            known[RunKey("searched", seed, trial=best)] = result("searched", seed, 2.9)
            known[RunKey("plain", seed)] = result("plain", seed, 3.0 + seed)
        analysis = analyse(found, known)
        assert analysis.arms[0].settings == settings
        notes = "\n".join(analysis.notes)
        assert f"searched at its own best of {FIRST + 2} trials on 2 other seeds, number {best}: " in notes
        assert all(f"{key} = {value}" in notes for key, value in settings.items())
        assert "Not searched, so that contrasts with searched arms favour these: plain." in notes

    def test_no_trial_is_repeated(self, tmp_path: Path, data: Path) -> None:
        """Two trials that are really run; a third is one more run, whatever the first two came to."""
        out = tmp_path / "out"
        space = {"optimizer.lr": SPACE["optimizer.lr"]}
        found = asked(tmp_path, data, trials=2, seeds=[9], space=space)
        known = trained(found, out)
        assert len(known) == 2 + 2 * 2
        tried = [RunFolder.open(out / f"runs/searched/trial-{number}/seed-9").config for number in (0, 1)]
        assert [config["optimizer.lr"] for config in tried] == [
            trial_settings(found, "searched", number, known)["optimizer.lr"] for number in (0, 1)
        ]
        said: list[str] = []
        assert run_comparison(found, out, say=said.append) == known
        assert said == [f"6 runs in {out}; 6 done"]
        analysis, _ = show(found, known, out)
        record = json.loads((out / "comparison.json").read_text())
        assert [trial["held_out_loss"] for trial in record["trials"]] == [
            known[RunKey("searched", 9, trial=number)].scores["held_out_loss"] for number in (0, 1)
        ]
        best = min(record["trials"], key=lambda trial: trial["held_out_loss"])
        assert analysis.arms[0].settings == best["settings"]
        more = asked(tmp_path, data, trials=3, seeds=[9], space=space)
        assert {key for key in finished_runs(more, out) if key.trial is not None and key.seed == 9} == {
            RunKey("searched", 9, trial=number) for number in (0, 1)
        }
