"""`evaluate_run` against a direct computation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data.helpers import small_bpe
from meristem.data import ByteTokenizer, TokenData, prepare
from meristem.errors import InputError
from meristem.evaluation import evaluate
from meristem.evaluation.evaluate import EVALUATION_FILE, evaluate_run
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.report.pictures import draw_loss, draw_structure, evaluation_text
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.held_out import held_out_loss, held_out_windows
from model.helpers import causal_probabilities
from training.helpers import CPU, copy_run, prepared, trained, write_texts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Evaluates in batches of 4."""
    folder = tmp_path_factory.mktemp("evaluation")
    return trained(prepared(folder), folder / "run", train__steps=40, optimizer__lr=1e-2, checkpoint__every=20)


def windows_of(run: RunFolder, count: int, data: str | Path | None = None) -> Tensor:
    stream = TokenData.open(data or run.config.data.path).split("held_out")
    rows = torch.from_numpy(stream.window(0, 32 * count + 1))
    return torch.stack([rows[i * 32 : i * 32 + 33] for i in range(count)])


def direct_loss(model: Decoder, windows: Tensor) -> float:
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    return float(cross_entropy(logits.double().flatten(0, 1), windows[:, 1:].flatten()))


def direct_distances(model: Decoder, tokens: Tensor) -> list[float]:
    """Explicit attention maps, layer by layer: mean of t - s over the last half of the queries."""
    seen: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        plain = block.attention.project  # type: ignore[union-attr]

        def watched(*arguments: Tensor, plain: object = plain) -> tuple[Tensor, Tensor, Tensor]:
            projected = plain(*arguments)  # type: ignore[operator]
            seen.append((projected[0].transpose(1, 2), projected[1].transpose(1, 2)))
            return projected

        block.attention.project = watched  # type: ignore[union-attr]
    with torch.no_grad():
        model(tokens)
    positions = torch.arange(tokens.shape[1], dtype=torch.float64)
    gaps = positions[:, None] - positions
    return [
        float((causal_probabilities(q.double(), k.double()) * gaps).sum(-1)[..., tokens.shape[1] // 2 :].mean())
        for q, k in seen
    ]


def test_loss_and_distances_equal_a_direct_computation(run: RunFolder) -> None:
    # 10 and 6 windows do not divide into batches of 4, so a wrong weight of the last batch would show.
    result = evaluate_run(run.path, windows=10, distance_windows=6, device="cpu")
    model, windows = load_run(run.path, device="cpu").decoder, windows_of(run, 10)
    assert (result.step, result.windows, result.tokens, result.distance_windows) == (40, 10, 320, 6)
    assert result.loss == pytest.approx(direct_loss(model, windows), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2))
    expected = direct_distances(model, windows[:6, :-1])
    assert result.attention_distance == pytest.approx(expected, rel=1e-4)
    assert abs(expected[0] - expected[1]) > 1e-3  # so that layers cannot be exchanged unseen


def test_results_are_stored_with_the_run(run: RunFolder) -> None:
    result = evaluate_run(run.path, windows=4, distance_windows=2, device="cpu")
    stored = json.loads((run.path / EVALUATION_FILE).read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(result.to_dict()))
    assert stored["loss"] == result.loss
    assert Plan.from_dict(stored["plan"]) == run.plan


@pytest.mark.parametrize("setting", ["windows", "distance_windows"])
@pytest.mark.parametrize("value", [0, -1])
def test_too_few_windows_are_refused_before_any_work(setting: str, value: int, tmp_path: Path) -> None:
    counts: dict[str, int] = {setting: value}
    with pytest.raises(InputError, match=f"^{setting} = {value}: must be at least 1"):
        evaluate_run(tmp_path / "nowhere", **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_results_that_are_not_finite_are_stored_as_null(
    run: RunFolder, tmp_path: Path, loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = copy_run(run, tmp_path / "run")
    monkeypatch.setattr(evaluate, "held_out_loss", lambda *_, **__: loss)
    monkeypatch.setattr(evaluate, "mean_distances", lambda *_, **__: torch.tensor([math.nan, 3.0]))
    result = evaluate_run(broken.path, windows=4, device="cpu")
    stored = json.loads((broken.path / EVALUATION_FILE).read_text(encoding="utf-8"))
    assert [stored[name] for name in ("loss", "perplexity", "bits_per_byte")] == [None] * 3
    assert stored["attention_distance"] == [None, 3.0]
    assert f"held-out loss {loss}" in evaluation_text(result)


def test_a_context_of_one_token(tmp_path: Path) -> None:
    run = trained(prepared(tmp_path), tmp_path / "run", model__context=1, train__steps=2)
    result = evaluate_run(run.path, windows=4, device="cpu")
    assert list(result.attention_distance) == [0, 0]
    assert "even attention: 0.0" in evaluation_text(result)
    assert draw_structure(run.path, result.attention_distance) == run.path / "structure.svg"
    ElementTree.parse(run.path / "structure.svg")


def test_an_earlier_checkpoint_is_evaluated_on_demand(run: RunFolder) -> None:
    earlier = evaluate_run(run.path, step=20, windows=10, device="cpu")
    assert earlier.step == 20
    model = load_run(run.path, step=20, device="cpu").decoder
    assert earlier.loss == pytest.approx(direct_loss(model, windows_of(run, 10)), rel=1e-5)
    assert earlier.loss != evaluate_run(run.path, windows=10, device="cpu").loss


def test_a_held_out_loss_that_is_not_finite_is_a_gap(run: RunFolder, tmp_path: Path) -> None:
    broken = copy_run(run, tmp_path / "run")
    with broken.metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 40, "loss": null}\n{"step": 40, "held_out_loss": null}\n')
    assert draw_loss(broken.path) == broken.path / "loss.svg"
    ElementTree.parse(broken.path / "loss.svg")


def test_other_data_of_the_same_tokenizer_are_taken(run: RunFolder, tmp_path: Path) -> None:
    other = prepared(tmp_path, count=50)
    result = evaluate_run(run.path, windows=5, data=other, device="cpu")
    model = load_run(run.path, device="cpu").decoder
    assert result.data == str(other)
    assert result.loss == pytest.approx(direct_loss(model, windows_of(run, 5, other)), rel=1e-5)


def test_data_of_another_tokenizer_are_refused(run: RunFolder, tmp_path: Path) -> None:
    prepare([write_texts(tmp_path / "texts")], tmp_path / "data", tokenizer=small_bpe(), held_out=0.2)
    with pytest.raises(InputError, match=r"data = .*another tokenizer"):
        evaluate_run(run.path, data=tmp_path / "data", device="cpu")


def test_a_file_is_no_data_of_a_language_model(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na,b\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"data = .*rows.csv.*is a file"):
        evaluate_run(run.path, data=tmp_path / "rows.csv", device="cpu")


def test_the_loss_does_not_depend_on_the_batch(run: RunFolder) -> None:
    model, windows = load_run(run.path, device="cpu").decoder, windows_of(run, 7)
    losses = [held_out_loss(model, windows, batch=batch, device=CPU) for batch in (1, 3, 7, 100)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_fewer_windows_are_taken_if_there_are_fewer(run: RunFolder) -> None:
    stream = TokenData.open(run.config.data.path).split("held_out")
    assert len(held_out_windows(stream, 32, 10**9)) == (len(stream) - 1) // 32


def test_too_few_held_out_tokens_are_explained(run: RunFolder, tmp_path: Path) -> None:
    stream = TokenData.open(run.config.data.path).split("held_out")
    count = len(stream)
    assert len(held_out_windows(stream, count - 1, 1)) == 1
    message = f"held-out tokens = {count}: must be at least {count + 1} for a context of {count}; .*larger share"
    with pytest.raises(InputError, match=message):
        held_out_windows(stream, count, 1)
    prepare([write_texts(tmp_path / "texts", 2)], tmp_path / "data", tokenizer=ByteTokenizer(), held_out=0)
    with pytest.raises(InputError, match="held-out tokens = 0: must be at least 33 for a context of 32"):
        evaluate_run(run.path, data=tmp_path / "data", device="cpu")
