"""Settings that were changed although others leave them without effect.

They are said when a run begins, and not refused: one file is often the base of several runs, some of which use them.
"""

from __future__ import annotations

from meristem.config.growth import table_name
from meristem.config.reading import Config
from meristem.config.sections import SHAPE

SCHEDULED = ("layers", "heads", "schedule", "dims", "shuffle_seed")  # what a list of head counts says instead


def idle_settings(config: Config, *, classifier: bool) -> list[str]:
    """A sentence for each reason, with the settings that it leaves without effect.

    >>> idle_settings(build_config({"optimizer.momentum": 0.9}), classifier=False)
    ['optimizer.momentum: of no use with optimizer.kind = adamw']
    """
    defaults, said = Config(), []
    for keys, reason in _reasons(config, classifier):
        if changed := [key for key in keys if config[key] != defaults[key]]:
            said.append(f"{', '.join(changed)}: of no use {reason}")
    growth = config.growth
    if growth.steps is not None and not growth.policies:
        said.append("growth.steps: of no use, as growth.policies names none")
    if unnamed := [f"growth.{name}" for name in growth.tables if name not in map(table_name, growth.policies)]:
        said.append(f"{', '.join(unnamed)}: of no use, as growth.policies does not name it")
    return said


def _reasons(config: Config, classifier: bool) -> list[tuple[list[str], str]]:
    """Settings that have no effect here, with the reason."""
    model, optimizer, train = config.model, config.optimizer, config.train
    idle: list[tuple[list[str], str]] = []
    if whole := model.whole:
        idle.append(([*SHAPE], f"with {whole}, which has a plan"))
    elif model.head_list:
        idle.append(([f"model.{name}" for name in SCHEDULED], "with model.head_list"))
    else:
        unused = {"shuffle_seed": model.schedule != "shuffle", "dims": model.schedule == "uniform"}
        keys = [f"model.{name}" for name, idles in unused.items() if idles]
        idle.append((keys, f"with model.schedule = {model.schedule}"))
    if optimizer.kind != "muon":
        idle.append((["optimizer.momentum"], f"with optimizer.kind = {optimizer.kind}"))
    if optimizer.curve != "wsd":
        idle.append((["optimizer.decay"], f"with optimizer.curve = {optimizer.curve}"))
    if train.on_divergence != "rewind":
        idle.append((["train.max_rewinds"], f"with train.on_divergence = {train.on_divergence}"))
    if classifier:
        idle.append((["eval.windows"], "for a classifier, which is measured on rows"))
    else:
        of_rows = ["eval.rows"] if whole else ["model.pooling", "eval.rows"]
        idle.append((of_rows, "for a language model"))
    return idle
