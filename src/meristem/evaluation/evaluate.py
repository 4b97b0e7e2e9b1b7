"""Everything that `meristem eval` measures about a run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meristem.data import TokenData
from meristem.errors import InputError
from meristem.evaluation.held_out import held_out_loss, held_out_windows
from meristem.gauges import mean_distances
from meristem.plan import Plan
from meristem.records import finite
from meristem.training.checkpoint import write_atomically
from meristem.training.devices import describe_device
from meristem.training.run import load_run

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

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN: None where a number is not finite."""
        facts = {name: finite(value) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {
            **facts,
            "attention_distance": [finite(value) for value in self.attention_distance],
            "plan": self.plan.to_dict(),
        }


def evaluate_run(
    run: str | Path, *, step: int | None = None, windows: int = 256, distance_windows: int = 64,
    data: Path | None = None, device: str = "auto",
) -> Evaluation:  # fmt: skip
    """Measure a checkpoint on the held-out windows of its own data, or of other data with the same tokenizer."""
    for field, value in (("windows", windows), ("distance_windows", distance_windows)):
        if value < 1:
            raise InputError(field, value, "must be at least 1")
    loaded = load_run(run, step=step, device=device, report=lambda text: print(text, file=sys.stderr))
    model = loaded.decoder
    folder = Path(loaded.config.data.path) if data is None else data
    if folder.is_file():
        expected = "is a file; a language model is measured on a folder that `meristem data prepare` has made"
        raise InputError("data", str(folder), expected)
    tokens = TokenData.open(folder)
    if tokens.index.tokenizer.digest != loaded.tokenizer.digest:
        raise InputError("data", str(folder), "was made with another tokenizer than this run's")
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
    )
    write_atomically(Path(run) / EVALUATION_FILE, json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")
    return result
