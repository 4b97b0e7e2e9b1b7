"""Everything that `meristem eval` measures about a run."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meristem.data import TokenData
from meristem.devices import describe_device
from meristem.errors import InputError, Remedy
from meristem.gauges import mean_distances
from meristem.plan import Plan
from meristem.records import finite
from meristem.runs.run_folder import load_run
from meristem.training.held_out import held_out_loss, held_out_windows

logger = logging.getLogger(__name__)

EVALUATION_FILE = "eval.json"


@dataclass(frozen=True)
class Evaluation:
    """Results of one checkpoint on held-out data."""

    run: str
    step: int
    data: str
    windows: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None  # for byte data
    attention_distance: tuple[float, ...]  # tokens, per layer
    distance_windows: int
    plan: Plan
    device: str
    average: bool = False  # whether of the average of the weights
    file: Path | None = None  # that it was written to

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN: None stands for a number that is not finite."""
        facts = {name: finite(value) if isinstance(value, float) else value for name, value in asdict(self).items()}
        del facts["file"]
        return {
            **facts,
            "attention_distance": [finite(value) for value in self.attention_distance],
            "plan": self.plan.to_dict(),
        }


def evaluate_run(
    run: str | Path, *, step: int | str | None = None, average: bool = False, windows: int = 256,
    distance_windows: int = 64, data: Path | None = None, device: str = "auto", out: Path | None = None,
) -> Evaluation:  # fmt: skip
    """Measure a checkpoint on the held-out windows of its own data, or of other data with the same tokenizer.

    With `average`, the average of its weights is measured, which the run must have kept.
    The result is also written beside the run's files, or into the folder `out`; see `result_file`.

    >>> found = evaluate_run("runs/first", windows=4)
    >>> found.step, found.windows, len(found.attention_distance)
    (12, 4, 2)
    """
    for field, value in (("windows", windows), ("distance_windows", distance_windows)):
        if value < 1:
            raise InputError(field, value, "must be at least 1")
    loaded = load_run(run, step=step, average=average, device=device, report=logger.warning)
    model = loaded.decoder
    folder = Path(loaded.config.data.path) if data is None else data
    if folder.is_file():
        expected = "is a file; a language model is measured on a folder of prepared text"
        raise InputError("data", str(folder), expected, Remedy(call="data prepare"))
    tokens = loaded.folder.open_alike(folder)
    assert isinstance(tokens, TokenData)
    context = model.plan.context
    chosen = held_out_windows(tokens.split("held_out"), context, windows)
    loss = held_out_loss(model, chosen, batch=loaded.config.eval.batch, device=loaded.device)
    probes = chosen[:distance_windows, :-1]
    distances = mean_distances(model, probes, batch=loaded.config.eval.batch, device=loaded.device)
    result = Evaluation(
        run=str(run),
        step=loaded.step,
        data=str(folder),
        windows=len(chosen),
        tokens=len(chosen) * context,
        loss=loss,
        perplexity=math.inf if loss > 700 else math.exp(loss),
        bits_per_byte=loss / math.log(2) if tokens.index.tokenizer.kind == "bytes" else None,
        attention_distance=tuple(distances.tolist()),
        distance_windows=len(probes),
        plan=model.plan,
        device=describe_device(loaded.device),
        average=average,
    )
    text = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    return replace(result, file=loaded.folder.write(result_file(data, average=average), text, out))


def result_file(data: Path | None, *settings: object, average: bool = False) -> str:
    """The name of the file for the result on other data than the run's own, read by these settings; each has its own.

    >>> result_file(None), result_file(None, average=True)
    ('eval.json', 'eval-average.json')
    """
    begin = EVALUATION_FILE.removesuffix(".json") + "-average" * average
    if data is None:
        return f"{begin}.json"
    source = [str(data.resolve()), *map(repr, settings)]
    digest = hashlib.sha256("\n".join(source).encode(errors="surrogateescape")).hexdigest()[:8]
    name = "".join(character if character.isalnum() or character in "._-" else "_" for character in data.name)
    return f"{begin}-{name[:80]}-{digest}.json"
