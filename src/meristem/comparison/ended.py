"""Runs of a comparison that have ended before: here, by their folders, or elsewhere, by their lines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from meristem.comparison.file import Comparison
from meristem.comparison.lines import Begun, Line
from meristem.comparison.planning import (
    Lost,
    Results,
    RunKey,
    Waiting,
    check_measure,
    configuration,
    data_digest,
    known_keys,
    possible_keys,
    source_key,
    starting_plan_of,
)
from meristem.comparison.results import Result, has_diverged, is_finished, lost_result, read_result
from meristem.config import Config, check_resumable, known_values
from meristem.errors import InputError
from meristem.runs.origin import first_difference
from meristem.runs.run_folder import RunFolder
from meristem.training.length import as_found
from meristem.wording import counted

Lines = Mapping[str, Line]  # by the path of the run below the folder of the comparison
NO_LINES: Lines = {}


def finished_runs(comparison: Comparison, out: Path, lines: Lines = NO_LINES) -> dict[RunKey, Result]:
    """The results of all runs that are done, here or, by their lines, elsewhere.

    One that was trained otherwise than the file says now is refused.
    """
    check_measure(comparison)
    results: dict[RunKey, Result] = {}
    while True:
        before = len(results)
        some_diverged = any(result.diverged for result in results.values())
        for key in known_keys(comparison, results):
            if key in results or not (is_begun(out, key) or str(key.path) in lines or some_diverged):
                continue
            with suppress(Waiting):
                if (result := ended_before(comparison, key, out, results, lines)) is not None:
                    results[key] = result
        if len(results) == before:  # one that is done may be what others take after
            return results


def describe_lines(comparison: Comparison, lines: Lines) -> str:
    """How many runs lines were read of, and how many of these are of no use, as the comparison does not have them."""
    possible = {str(key.path) for key in possible_keys(comparison)}
    others = [run for run in lines if run not in possible]
    told = f"; {len(others)} of them not of this comparison, such as {others[0]}" if others else ""
    return f"lines of {counted(len(lines), 'run')} read{told}"


def ended_before(comparison: Comparison, key: RunKey, out: Path, results: Results, lines: Lines) -> Result | None:
    """The result of a run that is done, or can never be; None of one that is to be made."""
    try:
        config, source = configuration(comparison, key, results), source_key(comparison, key, results)
        return _finished(key, out, config, source, lines.get(str(key.path)))
    except Lost:
        return lost_result(key.arm, key.seed)


def is_begun(out: Path, key: RunKey) -> bool:
    """Whether there is a folder of the run."""
    return (out / key.path / "config.toml").is_file()


def result_of(key: RunKey, folder: RunFolder) -> Result | None:
    """The result of a run that has come to its end, or was given up; None of one that has not."""
    return read_result(key.arm, key.seed, folder) if is_finished(folder) or has_diverged(folder) else None


def _finished(key: RunKey, out: Path, config: Config, source: RunKey | None, line: Line | None) -> Result | None:
    """The result of a run that has ended; one that was begun with another configuration is refused by the key."""
    if is_begun(out, key):
        folder = RunFolder.open(out / key.path)
        _check_alike(Begun.at(folder.path), config, source)
        if (result := result_of(key, folder)) is not None:
            return result
    if line is None:
        return None
    _check_alike(line.begun, config, source)
    return line.result


def _check_alike(begun: Begun, config: Config, source: RunKey | None) -> None:
    """Refuse a run that began otherwise than the file says now; other data first, from which more may follow."""
    if begun.data != data_digest(config):
        raise begun.refused("data.path", config.data.path, "was trained on other data")
    try:
        check_resumable(begun.config, as_begun(begun, config, source))
    except InputError as error:
        why = f"was trained with {begun.config[error.field]!r}"
        if error.field == "data.seed":
            why += " (an arm that others start from sees the data in another order than they do)"
        raise begun.refused(error.field, error.value, why) from None
    _check_structure(begun, config)


def _check_structure(begun: Begun, config: Config) -> None:
    """Refuse a run that began with another structure; where the file that names it lies does not matter."""
    if (field := first_difference(starting_plan_of(config), begun.plan)) is not None:
        named = [key for key, value in known_values(config).items() if key.endswith((".plan", ".like")) and value]
        if not named and config.growth.has("depth") and field in ("layers", "target"):
            layers, key, told = begun.plan.layers, "growth.depth.start_layers", "began with"
            if config.model.start_from is not None:
                layers, key, told = begun.plan.target or layers, "growth.depth.layers", "was to end with"
            if config["growth.depth.layers"] is None and config["growth.depth.start_layers"] is None:
                keep = f"; to keep it, give {key} = {len(layers)}" if begun.plan.target else ""
                raise begun.refused(key, None, f"{told} {counted(len(layers), 'block')}{keep}")
        key = named[0] if named else f"plan.{field}"
        raise begun.refused(key, config[key] if named else None, f"began with another structure ({field})")


def as_begun(begun: Begun, config: Config, source: RunKey | None) -> Config:
    """The configuration with the plan file that a run began with: its structure has been compared, not its place.

    Likewise with the place of the run that it started from, if that is `source`, and with what it found out: the
    updates that its FLOPs suffice for, and how many blocks are best for them, where these are named now.
    """
    began, model = begun.config, config.model
    config = _with_found_blocks(as_found(config, began), begun)
    if began.model.plan is not None and model.plan is not None:
        model = replace(model, plan=began.model.plan)
    if source is not None and Path(began.model.start_from or "").parts[-len(source.path.parts) :] == source.path.parts:
        model = replace(model, start_from=began.model.start_from)
    return replace(config, model=model)


def _with_found_blocks(config: Config, begun: Begun) -> Config:
    """The configuration without a number of blocks that a run has found out to be best, if it names the same."""
    if not (config.growth.has("depth") and begun.config.growth.has("depth")):
        return config
    name, blocks = "start_layers", len(begun.plan.layers)
    if config.model.start_from is not None:
        name, blocks = "layers", len(begun.plan.target)
    if begun.config[f"growth.depth.{name}"] is not None or config[f"growth.depth.{name}"] != blocks:
        return config
    table = {key: value for key, value in config.growth.tables["depth"].items() if key != name}
    return replace(config, growth=replace(config.growth, tables={**config.growth.tables, "depth": table}))
