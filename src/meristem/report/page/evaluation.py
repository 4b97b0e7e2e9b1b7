"""What `meristem eval` has left in a run's folder, for its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meristem.errors import InputError, RunError
from meristem.files import read_json
from meristem.plan import Plan
from meristem.report.page.curves import short
from meristem.report.structure_figure import even_distance
from meristem.report.structure_history import Snapshot
from meristem.runs.run_folder import RunFolder

CLASS_SCORES = ("support", "precision", "recall", "f1")
MOST_CLASSES = 50  # of a classifier that are shown


def read_evaluation(folder: RunFolder, history: Sequence[Snapshot]) -> dict[str, Any] | None:
    """What `meristem eval` has left in the run's folder; None if it has not, or it cannot be read."""
    try:
        content = read_json(folder.path / "eval.json")
        step, plan = content["step"], Plan.from_dict(content["plan"])
    except (OSError, RunError, InputError, KeyError, TypeError, ValueError):
        return None
    if type(step) is not int:
        return None
    result: dict[str, Any] = {"step": step, "facts": []}
    names = {
        "loss": "held-out loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte", "accuracy": "accuracy",
        "macro_f1": "macro-F1", "tokens": "tokens", "rows": "rows",
    }  # fmt: skip
    for name, label in names.items():
        if content.get(name) is not None and _is_number(content[name]):
            result["facts"].append({"label": label, "value": f"{content[name]:,.5g}"})
    distances = content.get("attention_distance")
    if isinstance(distances, list) and len(distances) == len(plan.layers) and all(map(_is_number, distances)):
        numbers = next((one.numbers for one in reversed(history) if one.plan.heads == plan.heads), None)
        result["distance"] = {
            "layers": list(numbers or range(len(distances))),
            "values": [short(value, 4) for value in distances],
            "even": short(even_distance(plan.context), 4),
        }
    classes = content.get("classes")
    if isinstance(classes, list) and all(
        isinstance(one, dict) and isinstance(one.get("label"), str) for one in classes
    ):
        shown = sorted(classes, key=lambda one: -one["support"] if type(one.get("support")) is int else 0)
        result["classes"] = [
            {"label": str(one["label"])}
            | {name: one.get(name) if _is_number(one.get(name)) else None for name in CLASS_SCORES}
            for one in shown[:MOST_CLASSES]
        ]
        result["more_classes"] = max(0, len(classes) - MOST_CLASSES)
    return result


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 1e30)
