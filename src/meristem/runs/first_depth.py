"""With how many blocks a run of the policy `depth` begins, in words."""

from __future__ import annotations

from meristem.config import Config
from meristem.plan import Plan
from meristem.wording import counted


def describe_first_depth(config: Config, start: Plan) -> str:
    """With how many blocks a run begins and why, and how many there may be; `start` is its first plan."""
    begin, goal = f"Begins with {counted(len(start.layers), 'block')}", len(start.target)
    best = "as many as are best for train.flops"
    if config.model.start_from is not None:
        begin += ", those of the run that it started from"
        if not start.target:
            return f"{begin}; more would not be better for train.flops, so none are copied."
        why = best if config["growth.depth.layers"] is None else "as growth.depth.layers says"
        return f"{begin}; they become {goal} by copies after the first update, {why}."
    if config["growth.depth.start_layers"] is not None:
        begin += ", as growth.depth.start_layers says"
    else:  # a plan may say itself with how many it begins
        begin += f", {best}" if config.model.plan is None else " of model.plan"
    setting = " (model.layers)" if config.model.scheduled else ""
    if not start.target:
        return f"{begin}; these are all that there may be{setting}, so nothing is left to decide."
    return f"{begin}; there may be {goal} at most{setting}."
