"""Recordings: what is kept between calls, how far the device is ahead, and all of it on a real GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from meristem.decoding import Sampling, generate, recording, release, stream
from meristem.decoding.recording import AHEAD, KEPT, WORTH, RecordedDecoding
from meristem.growth.apply import apply_edit
from meristem.growth.edits import RemoveHead
from meristem.model import Decoder
from model.helpers import lively, needs_gpu, small_plan

from .helpers import KINDS, PROMPTS, model_of, repeated_argmax

GREEDY = Sampling(temperature=0)


@dataclass
class Pretended:
    """What happened on a GPU that is only pretended."""

    log: list[str] = field(default_factory=list)
    recordings: int = 0


class PretendedEvent:
    def __init__(self, gpu: Pretended) -> None:
        self.gpu = gpu
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        assert self.recorded
        self.gpu.log.append("wait")


class PretendedGraph:
    def __init__(self, gpu: Pretended, step: Callable[[], None]) -> None:
        self.gpu, self.step = gpu, step
        gpu.recordings += 1

    def replay(self) -> None:
        self.gpu.log.append("replay")
        self.step()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """The CPU in the place of a GPU: everything is as there, but a replay runs the step."""
    pretended = Pretended()
    monkeypatch.setattr(recording, "use_triton", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: PretendedEvent(pretended))
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(RecordedDecoding, "_record", lambda self: PretendedGraph(pretended, self.step))
    return pretended


class _Stream:
    def wait_event(self, event: Any) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_share_a_recording_are_those_of_the_plain_path(kind: str, gpu: Pretended) -> None:
    """Ragged or not, whatever the cache still holds of the call before."""
    model = model_of(kind)
    batches = [PROMPTS[:2], [[7, 8, 9], [3, 2, 1]], PROMPTS[2:]]
    for prompts in batches:
        expected = [repeated_argmax(model, prompt, 20) for prompt in prompts]
        assert generate(model, prompts, max_tokens=20, sampling=GREEDY) == expected
    assert gpu.recordings == 1


def test_the_weights_of_a_recording_are_those_of_now(gpu: Pretended) -> None:
    model = model_of("gated loops")
    before = generate(model, PROMPTS, max_tokens=20, sampling=GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
        assert model.gate_ramp is not None
        model.gate_ramp.mul_(3)
    expected = [repeated_argmax(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=20, sampling=GREEDY) == expected != before
    assert gpu.recordings == 1
    apply_edit(model, None, RemoveHead(5, 3))
    expected = [repeated_argmax(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=20, sampling=GREEDY) == expected
    assert gpu.recordings == 2


def test_copies_in_half_precision_follow_the_model(gpu: Pretended) -> None:
    model = lively(small_plan())
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, PROMPTS, max_tokens=20, sampling=GREEDY)
        (kept,) = recording._recordings[model].idle.values()
        with torch.no_grad():
            model.blocks[0].attention.qkv.weight.mul_(2)  # type: ignore[union-attr,operator]
        generate(model, PROMPTS, max_tokens=20, sampling=GREEDY)
        assert recording._recordings[model].idle == {next(iter(recording._recordings[model].idle)): kept}
    weight: Tensor = model.blocks[0].attention.qkv.weight  # type: ignore[union-attr,assignment]
    assert kept.weights.passes[0].qkv.dtype == torch.bfloat16
    assert torch.equal(kept.weights.passes[0].qkv, weight.bfloat16())


def test_two_streams_at_once_have_a_recording_each(gpu: Pretended) -> None:
    model = model_of("loops")
    expected = [repeated_argmax(model, prompt, 20) for prompt in PROMPTS[:2]]
    both = zip(*(stream(model, [prompt], max_tokens=20, sampling=GREEDY) for prompt in PROMPTS[:2]), strict=True)
    assert [list(row) for row in zip(*[(a[0], b[0]) for a, b in both], strict=True)] == expected
    assert gpu.recordings == 2


def test_the_device_is_ahead_of_the_host_and_not_too_far(gpu: Pretended) -> None:
    model = lively(small_plan())
    expected = repeated_argmax(model, [5], 28)
    steps = stream(model, [[5]], max_tokens=28, sampling=GREEDY)
    assert list(islice(steps, 1)) == [expected[:1]]
    assert gpu.log == ["replay"] * (AHEAD - 1) + ["wait"]  # the first step runs as it is
    assert list(steps) == [[token] for token in expected[1:]]
    assert gpu.log.count("replay") == 26
    assert gpu.log[-AHEAD:] == ["wait"] * AHEAD


def test_an_early_end_stops_the_device(gpu: Pretended) -> None:
    model = lively(small_plan(), torch.float64)
    free = [repeated_argmax(model, prompt, 26) for prompt in PROMPTS]
    end = free[0][6]
    cut = [row[: row.index(end)] if end in row else row for row in free]
    assert generate(model, PROMPTS, max_tokens=26, sampling=GREEDY, end_of_text=end) == cut
    alone = next(row for row in cut if len(row) < 10)
    gpu.log.clear()
    prompt = PROMPTS[cut.index(alone)]
    assert generate(model, [prompt], max_tokens=26, sampling=GREEDY, end_of_text=end) == [alone]
    assert gpu.log.count("replay") <= len(alone) + AHEAD


def test_a_few_tokens_are_not_worth_a_recording(gpu: Pretended) -> None:
    model = lively(small_plan())
    generate(model, [[5]], max_tokens=WORTH + 1, sampling=GREEDY)
    assert gpu.recordings == 0
    generate(model, [[5]], max_tokens=WORTH + 1, sampling=GREEDY)  # now its kernels are compiled
    assert gpu.recordings == 1


def test_how_many_recordings_are_kept(gpu: Pretended) -> None:
    model = lively(small_plan())
    for batch in range(1, KEPT + 2):
        generate(model, PROMPTS[:1] * batch, max_tokens=20, sampling=GREEDY)
    assert [shape.batch for shape in recording._recordings[model].idle] == list(range(2, KEPT + 2))
    release(model)
    assert model not in recording._recordings
    release(model)  # and once more


def test_what_is_kept_goes_with_the_model(gpu: Pretended) -> None:
    model = lively(small_plan())
    generate(model, PROMPTS, max_tokens=20, sampling=GREEDY)
    last = weakref.ref(model)
    del model
    gc.collect()
    assert last() is None


def test_draws_are_those_of_a_cpu(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = lively(small_plan()), Sampling(0.8, top_p=0.9, seed=3)
    found = [generate(model, PROMPTS, max_tokens=20, sampling=sampling, vocabulary=50) for _ in range(2)]
    monkeypatch.undo()
    assert found == [generate(model, PROMPTS, max_tokens=20, sampling=sampling, vocabulary=50)] * 2


# --- on a GPU -------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_on_the_gpu_is_that_of_the_plain_path(kind: str) -> None:
    """In float32: the first call records, the second and third replay, with other prompts in what the first left."""
    model = model_of(kind).cuda()
    for prompts in (PROMPTS, PROMPTS[::-1], [[1, 2, 3]] * 4):
        expected = [repeated_argmax(model, prompt, 24) for prompt in prompts]
        assert generate(model, prompts, max_tokens=24, sampling=GREEDY) == expected
    for prompt in PROMPTS:
        assert generate(model, [prompt], max_tokens=24, sampling=GREEDY) == [repeated_argmax(model, prompt, 24)]


@needs_gpu
@pytest.mark.gpu
def test_a_model_that_trains_on_is_decoded_as_it_is_on_the_gpu() -> None:
    model = model_of("gated loops").cuda()
    generate(model, PROMPTS, max_tokens=24, sampling=GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    expected = [repeated_argmax(model, prompt, 24) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=24, sampling=GREEDY) == expected


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(seed=4), Sampling(0.8, top_k=20, top_p=0.9, seed=4)], ids=str)
def test_draws_on_the_gpu_are_those_of_the_cpu(sampling: Sampling) -> None:
    """Nearly: a chance that lies on the edge between two tokens may fall on either side of it."""
    model = lively(small_plan())
    expected = generate(model, PROMPTS, max_tokens=24, sampling=sampling)
    found = generate(model.cuda(), PROMPTS, max_tokens=24, sampling=sampling)
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(PROMPTS) - 1


@needs_gpu
@pytest.mark.gpu
def test_float64_on_the_gpu() -> None:
    model = lively(small_plan(kv_group=2), torch.float64)
    expected = generate(model, PROMPTS, max_tokens=15, sampling=GREEDY)
    assert generate(model.cuda(), PROMPTS, max_tokens=15, sampling=GREEDY) == expected


@needs_gpu
@pytest.mark.gpu
def test_under_autocast_on_the_gpu() -> None:
    """Most greedy tokens are those of float32; at the initial scale hardly any are near ties."""
    model = Decoder(small_plan("prism")).cuda()
    expected = generate(model, PROMPTS, max_tokens=20, sampling=GREEDY)
    with torch.autocast("cuda", torch.bfloat16):
        found = generate(model, PROMPTS, max_tokens=20, sampling=GREEDY)
    assert [row[0] for row in found] == [row[0] for row in expected]
