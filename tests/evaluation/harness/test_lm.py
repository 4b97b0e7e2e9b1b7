"""The model as the harness asks for it: against a direct computation, and against the harness's own on an export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from data.helpers import SHARED, needs_shared, small_bpe
from meristem.data import ByteTokenizer, Tokenizer, load_tokenizer, prepare
from meristem.errors import InputError
from meristem.export import export_run
from meristem.model import Decoder
from meristem.runs.run_folder import load_run
from training.helpers import trained, write_texts

from .helpers import tiny, zero

pytest.importorskip("lm_eval", reason="needs the extra eval (make test-eval)")

from lm_eval.api.instance import Instance

from meristem.evaluation.harness.exported import load_lm
from meristem.evaluation.harness.lm import MeristemLM

BYTES = ByteTokenizer()
PAIRS = [
    ("", " Who is it?"),  # nothing before: after an end of text
    ("Page 7", ": 14"),
    # A space at the end goes over to what is scored. (Not "Page 7: 14" cut elsewhere: what the harness's own model
    # keeps of a text, it gives back for the wrong positions if the text comes again with a shorter continuation.)
    ("Page 8: ", "24"),
    ("A context that is longer than all of the model's", " own"),  # cut on the left
    ("Page", " 9 times 8 and so on on"),
    ("naïve", " 日本"),
]


def ask(kind: str, *arguments: Any) -> Any:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def asked(pairs: list[tuple[str, str]]) -> list[Any]:
    return [ask("loglikelihood", *pair) for pair in pairs]


def direct(model: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """With as much of the context as the model takes."""
    ids = (context + continuation)[-(model.plan.context + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0].double()[-len(continuation) :]
    found = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return float(found.sum()), logits.argmax(-1).tolist() == continuation


def test_continuations_of_bytes() -> None:
    model = tiny()
    lm = MeristemLM(model, BYTES, batch=4)
    found = lm.loglikelihood(asked(PAIRS))
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        kept = context.rstrip()
        ids = [BYTES.encode(text).tolist() for text in (kept, context[len(kept) :] + continuation)]
        expected = direct(model, ids[0] or [BYTES.end_of_text], ids[1])
        assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert (lm.requests, lm.cut) == (6, 2)


def test_only_a_space_before_and_nothing_after() -> None:
    model = tiny()
    found = MeristemLM(model, BYTES).loglikelihood(asked([("  ", "a"), ("a", "")]))
    assert found[0][0] == pytest.approx(direct(model, [256], [32, 32, 97])[0], abs=1e-4)
    assert found[1] == (0.0, True)


def test_a_continuation_that_is_longer_than_the_context_is_scored_in_windows() -> None:
    model, text = tiny(context=8), "twenty-one characters"
    lm = MeristemLM(model, BYTES)
    ((value, _),) = lm.loglikelihood(asked([("abc", text)]))
    assert value == pytest.approx(oracle(model, BYTES.encode(text).tolist(), ord("c")), abs=1e-3)
    assert lm.cut == 1


def oracle(model: Decoder, tokens: list[int], before: int) -> float:
    """Every token once, in blocks of the context, each after the token before it, the last one after what fits."""
    context, whole, total = model.plan.context, [before, *tokens], 0.0
    for begin in range(0, len(tokens), context):
        targets = tokens[begin : begin + context]
        end = begin + len(targets)
        inputs = whole[max(0, end - context) : end]
        with torch.no_grad():
            logits = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
        total += float(logits[-len(targets) :][range(len(targets)), targets].sum())
    return total


@pytest.mark.parametrize("length", [1, 23, 24, 25, 48, 61])
def test_whole_texts_in_windows(length: int) -> None:
    model, text = tiny(), ("The quick brown fox jumps over the lazy dog, again and again.")[:length]
    (value,) = MeristemLM(model, BYTES, batch=2).loglikelihood_rolling([ask("loglikelihood_rolling", text)])
    assert value == pytest.approx(oracle(model, BYTES.encode(text).tolist(), BYTES.end_of_text), abs=1e-3)


def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_ids_for_each_byte() -> None:
    text = "every byte once " * 9
    (value,) = MeristemLM(zero(vocabulary=320), BYTES).loglikelihood_rolling([ask("loglikelihood_rolling", text)])
    assert -value / math.log(2) / len(text.encode()) == pytest.approx(math.log2(320))


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and its export."""
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = BYTES if request.param == "bytes" else small_bpe()
    prepare([write_texts(folder / "texts")], folder / "data", tokenizer=tokenizer, held_out=0.2)
    run = trained(folder / "data", folder / "run", optimizer__lr=1e-2, train__steps=20, checkpoint__every=20)
    return run.path, export_run(run.path, folder / "exported").folder


def test_everything_equals_the_harness_on_the_export(exported: tuple[Path, Path]) -> None:
    run = load_run(exported[0], device="cpu")
    assert_equal(MeristemLM(run.decoder, run.tokenizer, batch=3), load_lm(exported[1], torch.device("cpu"), 2))


def assert_equal(ours: MeristemLM, theirs: Any) -> None:
    """The same likelihoods, greedy flags, windows and texts."""
    assert (ours.max_length, ours.eot_token_id, ours.prefix_token_id) == (
        theirs.max_length, theirs.eot_token_id, theirs.prefix_token_id,
    )  # fmt: skip
    likeliest = ours.generate_until([ask("generate_until", "Page 1", {"max_gen_toks": 3, "until": []})])[0]
    pairs = [*PAIRS, ("Page 1", likeliest), ("<|endoftext|>Page", " 1")]
    found, expected = ours.loglikelihood(asked(pairs)), theirs.loglikelihood(asked(pairs), disable_tqdm=True)
    for (value, greedy), (their_value, their_greedy) in zip(found, expected, strict=True):
        assert value == pytest.approx(their_value, abs=1e-4)
        assert greedy == their_greedy
    texts = [ask("loglikelihood_rolling", text) for text in ("Page 3: 4 times 5 " * 9, "x", "日本語 " * 20)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-6, abs=1e-4)
    prompts = ["Page 1", "Page 22: 3 times", "a prompt that is too long for the context of this model " * 2]
    wishes = [ask("generate_until", text, {"until": ["mes"], "max_gen_toks": 8}) for text in prompts]
    assert ours.generate_until(wishes) == theirs.generate_until(wishes, disable_tqdm=True)


@needs_shared
def test_the_tokenizer_of_gpt2_equals_the_harness_on_the_export(tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(SHARED / "tokenizers/gpt2")
    prepare([write_texts(tmp_path / "texts")], tmp_path / "data", tokenizer=tokenizer, held_out=0.2)
    run = load_run(trained(tmp_path / "data", tmp_path / "run", train__steps=2).path, device="cpu")
    folder = export_run(tmp_path / "run", tmp_path / "exported").folder
    assert_equal(MeristemLM(run.decoder, run.tokenizer), load_lm(folder, torch.device("cpu"), 4))


def test_texts_end_at_the_first_stop_string() -> None:
    lm = MeristemLM(tiny(context=64), BYTES, batch=2)
    whole, other = (
        lm.generate_until([ask("generate_until", text, {"until": [], "max_gen_toks": 30})])[0]
        for text in ("One", "Two")
    )
    stop = whole[5:7]
    wishes: list[tuple[str, dict[str, Any]]] = [
        ("One", {"until": [stop, whole[9:]], "max_gen_toks": 30}), ("Two", {"max_gen_toks": 30, "until": []}),
        ("One", {"until": stop, "max_gen_toks": 30}),
    ]  # fmt: skip
    found = lm.generate_until([ask("generate_until", *wish) for wish in wishes])
    assert found == [whole.split(stop)[0], other, whole.split(stop)[0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": 24}, r"max_gen_toks = 24: must be below the model's context of 24"),
        ({"max_gen_toks": 4, "num_beams": 3}, r"generation_kwargs\.num_beams = 3: must be one of"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MeristemLM(tiny(), BYTES).generate_until([ask("generate_until", "a", {"until": [], **settings})])
