"""What a run, or an exported model, is worth on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meristem.devices import choose_device, describe_device
from meristem.errors import InputError, missing_extra
from meristem.limits import check_integer
from meristem.records import finite
from meristem.runs.run_folder import load_run
from meristem.wording import counted

if TYPE_CHECKING:
    from lm_eval.api.model import LM

logger = logging.getLogger(__name__)

TASKS_FILE = "eval-tasks.json"
EXPORTED_CONFIG = "config.json"  # what a folder of transformers has and a run has not
BOOTSTRAP = 1000  # resamples for the standard errors that have no formula, such as that of a perplexity
FEW_SHOT_SEED = 1234  # the harness's own


@dataclass(frozen=True)
class TaskMetric:
    """One number of a task or a group of tasks; `error` is its standard error, None if the harness has none for it."""

    task: str
    metric: str
    value: float
    error: float | None
    rows: int
    higher_is_better: bool | None
    group: str | None = None  # whose mean tells of it too


@dataclass(frozen=True)
class TaskEvaluation:
    """Results of a model on tasks, in the order they were asked for."""

    model: str
    step: int | None  # None of an exported model
    average: bool
    data: str | None  # the folder of local copies
    limit: int | None  # rows of each task, from its beginning
    metrics: tuple[TaskMetric, ...]
    requests: int | None  # continuations that were scored; not known of an exported model
    cut: int | None  # those that did not fit into the context with all that came before
    context: int
    device: str
    versions: dict[str, str]
    file: Path | None = None  # that it was written to

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN: None stands for a number that is not finite."""
        facts = asdict(self)
        del facts["file"]
        for metric in facts["metrics"]:
            metric.update(value=finite(metric["value"]), error=metric["error"] and finite(metric["error"]))
        return facts

    def __str__(self) -> str:
        """A table of tasks and groups, without what is only part of a group, and what limits it."""
        shown = [metric for metric in self.metrics if metric.group is None]
        cells = [("task", "metric", "value", "standard error", "rows", "better")]
        for metric in shown:
            error = "-" if metric.error is None else f"± {_number(metric.error)}"
            better = {True: "higher", False: "lower", None: ""}[metric.higher_is_better]
            cells.append((metric.task, metric.metric, _number(metric.value), error, f"{metric.rows:,}", better))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = ("<", "<", ">", ">", ">", "<")
        lines = [
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
            for row in cells
        ]
        of = f"{self.model} on {self.device}" if self.step is None else f"step {self.step:,} on {self.device}"
        lines.insert(0, of + ", average of the weights" * self.average)
        if self.limit is not None:
            lines.append(f"only the first {counted(self.limit, 'row')} of each task: nothing to compare with others")
        if self.cut:
            lines.append(
                f"{self.cut:,} of {counted(self.requests or 0, 'request')} did not fit into the context of "
                f"{self.context:,}: their beginning was not seen"
            )
        return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"


def evaluate_tasks(
    model: str | Path, tasks: Sequence[str], *, data: str | Path | None = None, task_folder: str | Path | None = None,
    limit: int | None = None, batch: int = 16, step: int | str | None = None, average: bool = False, device: str = "auto",
    out: Path | None = None,
) -> TaskEvaluation:  # fmt: skip
    """Measure a run, or a folder that transformers loads such as an exported one, on tasks of lm-evaluation-harness.

    Rows come from the folder `data` of local copies, or without it from the network; `task_folder` holds task files of
    one's own. A run is scored by its own model, an exported one by the harness's for transformers; both in float32.
    The result of a run is also written beside its files, or into the folder `out`.

        print(evaluate_tasks("runs/first", ["piqa", "blimp"], data="copies", limit=100))
    """
    if find_spec("lm_eval") is None:
        raise missing_extra("lm-evaluation-harness", "eval")
    from meristem.evaluation.harness.tasks import load_tasks

    if isinstance(tasks, str) or not tasks or not all(tasks):
        raise InputError("tasks", tasks, "must be one or more names of tasks")
    for field, value in (("batch", batch), *((("limit", limit),) if limit is not None else ())):
        check_integer(field, value, 1)
    folder, place = Path(model), choose_device(device)
    exported = not (folder / "config.toml").is_file() and (folder / EXPORTED_CONFIG).is_file()
    if exported:
        for field, given in (("step", step), ("average", average or None)):
            if given is not None:
                raise InputError(field, given, f"means nothing here: {folder} is an exported model, and has one state")
        run = None
    else:
        run = load_run(folder, step=step, average=average, device=device, report=logger.warning)
        assert run.decoder
    loaded = load_tasks(tasks, *(None if each is None else Path(each) for each in (data, task_folder)))
    lm: LM
    if run is None:
        from meristem.evaluation.harness.exported import load_lm

        lm = load_lm(folder, place, batch)
    else:
        from meristem.evaluation.harness.lm import MeristemLM

        lm = MeristemLM(run.decoder, run.tokenizer, batch=batch)
    found = harness_results(lm, loaded, limit)
    result = TaskEvaluation(
        model=str(model),
        step=None if run is None else run.step,
        average=average,
        data=None if data is None else str(data),
        limit=limit,
        metrics=tuple(_metrics(found, loaded, tasks)),
        requests=getattr(lm, "requests", None),
        cut=getattr(lm, "cut", None),
        context=lm.max_length,
        device=describe_device(place),
        versions={name: version(name) for name in ("meristem", "lm_eval", "torch")},
    )
    text = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    name = TASKS_FILE.replace(".json", "-average.json") if average else TASKS_FILE
    if run is not None:
        return replace(result, file=run.folder.write(name, text, out))
    if out is None:  # an exported folder stays as it was written
        return result
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(text, encoding="utf-8")
    return replace(result, file=out / name)


def harness_results(lm: LM, loaded: dict[str, Any], limit: int | None = None) -> dict[str, Any]:
    """What the harness finds for a model on tasks that are loaded, with every sample (`samples`)."""
    from lm_eval.evaluator import evaluate

    from meristem.evaluation.harness.tasks import quietly

    for task in loaded["tasks"].values():  # as its own `simple_evaluate` does, without seeding everything
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    with quietly(), _in_one_process():
        found: dict[str, Any] = evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAP)
    return found


def _metrics(found: dict[str, Any], loaded: dict[str, Any], asked: Sequence[str]) -> Iterator[TaskMetric]:
    """The numbers in the harness's results, in the order that was asked for, and then those within groups."""
    groups = loaded.get("groups", {})
    parents = {child: name for name, group in groups.items() for child in group.child_names}
    better: dict[str, dict[str, bool]] = found["higher_is_better"]
    places = {name: place for place, name in enumerate(asked)}
    for task in sorted(found["results"], key=lambda name: (name in parents, places.get(name, len(asked)))):
        numbers = found["results"][task]
        parts = [child.task_name for child in groups[task].get_all_tasks()] if task in groups else [task]
        rows = sum(found["n-samples"][part]["effective"] for part in parts)
        for key, value in numbers.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{filter_name}")
            yield TaskMetric(
                task=task,
                metric=metric if filter_name == "none" else f"{metric} ({filter_name})",
                value=float(value),
                error=float(error) if isinstance(error, int | float) and not math.isnan(error) else None,
                rows=rows,
                higher_is_better=better.get(task, {}).get(metric),
                group=parents.get(task),
            )


@contextmanager
def _in_one_process() -> Iterator[None]:
    """The harness resamples here and not in a pool: a process with threads had better not be forked."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
