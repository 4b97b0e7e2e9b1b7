"""Which tasks there are, and their rows: from local copies, from a folder of one's own, or the harness's own."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from meristem.errors import InputError, Remedy, RunError, shortened
from meristem.evaluation.harness import local_data

LOCAL_TASKS = Path(__file__).parent / "local_tasks"
BARS = ("scoring", "writing", "Running loglikelihood requests", "Running generate_until requests")


def load_tasks(names: Sequence[str], data: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """The tasks of these names with their rows, as the harness keeps them: `tasks` by name, and `groups`.

    With `data`, a folder of local copies, they are those of `LOCAL_TASKS`; else the harness's own, whose rows come
    from the network. Those in `folder`, files as the harness describes them, are there in both cases.
    """
    for field, place in (("data", data), ("task_folder", folder)):
        if place is not None and not place.is_dir():
            raise InputError(field, str(place), "must be a folder")
    with quietly():
        manager = _manager(names, data, folder)
        try:
            objects = [_loaded(manager, name, data, folder) for name in dict.fromkeys(names)]
            loaded: dict[str, Any] = manager.load([each for some in objects for each in some])
        except InputError:
            raise
        except ValueError as error:  # a task and a group that has it
            raise InputError("tasks", ",".join(names), f"must each have tasks of their own ({error})") from error
        finally:
            local_data.forget()
    return loaded


def _manager(names: Sequence[str], data: Path | None, folder: Path | None) -> TaskManager:
    """What knows all of these names; the harness's own tasks, which take seconds to list, only if they are needed."""
    places = [place for place in (LOCAL_TASKS if data is not None else None, folder) if place is not None]
    manager = TaskManager(include_path=places, include_defaults=False, metadata={"data": str(data)})
    if data is None and not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=places, metadata={"data": str(data)})
    for name in names:
        if name not in manager.task_index:
            raise InputError("tasks", name, _known(manager, name, data, folder))
    return manager


def _known(manager: TaskManager, name: str, data: Path | None, folder: Path | None) -> str:
    """What is said of a name that is not known."""
    passed_over = f"; files of {folder} that describe no task are passed over" if folder is not None else ""
    if data is not None:
        parts = [child for group in manager.all_groups for child in manager.task_index[group].cfg["task"]]
        there = [known for known in manager.all_tasks if known not in parts]
        return f"is not known with local copies; there are {', '.join(there)}{passed_over}"
    close = ", ".join(get_close_matches(name, manager.all_tasks)) or "other ones (lm_eval ls tasks)"
    return f"is not known to lm-evaluation-harness; it has {close}{passed_over}"


def _loaded(manager: TaskManager, name: str, data: Path | None, folder: Path | None) -> list[Any]:
    """The tasks or the group of a name, with their rows."""
    found = manager.task_index[name].yaml_path
    own = folder is not None and found is not None and folder.resolve() in found.resolve().parents
    try:
        loaded = manager.load([name])
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = shortened(f"{type(error).__name__}: {error}".partition("\n")[0])
        if own:
            raise RunError(f"the rows of {name} cannot be read ({reason})") from error
        text = f"the rows of {name} cannot be fetched ({reason}); without a network they can come from local copies"
        raise RunError(text, Remedy(("data=DIR",))) from error
    return list(loaded["groups"].values()) or list(loaded["tasks"].values())


@contextmanager
def quietly() -> Iterator[None]:
    """Let the harness log errors only, print nothing, and show of its many bars those that last, to who looks."""
    logger = logging.getLogger("lm_eval")
    level, plain = logger.level, tqdm.__init__

    def bar(self: tqdm, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{**options, "disable": None if options.get("desc") in BARS else True})

    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), patch.object(tqdm, "__init__", bar):
            yield
    finally:
        logger.setLevel(level)
