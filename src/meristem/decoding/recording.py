"""Decoding on a GPU: the step is recorded as a CUDA graph, and the host reads the tokens some steps behind it.

A recording is kept for the next call with the same model and shapes. It reads copies of the weights, which each call
brings up to date, so that a model that trains on in between is never seen as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from meristem.decoding.sampling import Sampling
from meristem.decoding.token_step import Decoding
from meristem.decoding.unrolled import ReadyWeights
from meristem.model.decoder import Decoder
from meristem.model.operators import use_triton

BUCKET = 256  # capacities are multiples of it, so that texts of about one length share a recording
AHEAD = 8  # steps that the device may be ahead of the host
WORTH = 16  # steps still to come that make up for the time a recording takes
KEPT = 2  # recordings of a model; each holds a cache of its own


class RecordedDecoding(Decoding):
    """The first step runs as it is, which compiles its kernels; the others are replays of a recording."""

    always_padded = True

    def __init__(
        self, ready: ReadyWeights, batch: int, capacity: int, sampling: Sampling, vocabulary: int | None
    ) -> None:
        super().__init__(ready, batch, capacity, sampling, vocabulary)
        self.recording: torch.cuda.CUDAGraph | None = None
        self.warm = False
        self.arrived = torch.zeros(self.drawn.shape, dtype=torch.long).pin_memory()
        self.events = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        self.done = torch.cuda.Event()

    def prefill(self, model: Decoder, prompts: Sequence[Sequence[int]], seed: int, max_tokens: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().wait_event(self.done)  # of the call before, perhaps in another stream
            super().prefill(model, prompts, seed, max_tokens)

    def draws(self, count: int) -> Iterator[list[int]]:
        """As `Decoding.draws`; steps are launched before the tokens of those before them have come to the host."""
        waiting: deque[int] = deque()
        try:
            for number in range(count):
                self._launch(number, count)
                waiting.append(number)
                if len(waiting) > AHEAD:
                    yield self._wait(waiting.popleft())
            while waiting:
                yield self._wait(waiting.popleft())
        finally:
            with torch.cuda.device(self.device):
                self.done.record()

    def _launch(self, number: int, count: int) -> None:
        with torch.cuda.device(self.device):
            if number and self.recording is None and self.warm and count - number >= WORTH:
                self.recording = self._record()
            if number and self.recording is not None:
                self.recording.replay()
            elif number:
                self.step()
                self.warm = True
            self.arrived[number].copy_(self.drawn[number], non_blocking=True)
            self.events[number % len(self.events)].record()

    def _wait(self, number: int) -> list[int]:
        self.events[number % len(self.events)].synchronize()
        tokens: list[int] = self.arrived[number].tolist()
        return tokens

    def _record(self) -> torch.cuda.CUDAGraph:
        recording = torch.cuda.CUDAGraph()
        # Thread by thread: a checkpoint may be on its way to the host meanwhile, which has nothing to do with this.
        with torch.cuda.graph(recording, capture_error_mode="thread_local"):
            self.step()
        return recording


class _Shape(NamedTuple):
    """What a recording is good for."""

    batch: int
    capacity: int
    sampling: Sampling
    vocabulary: int | None


class _Recordings:
    """The weights of a model in one dtype, and its recordings that nobody is using, the latest last."""

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        self.ready = ReadyWeights(model, dtype)
        self.idle: dict[_Shape, RecordedDecoding] = {}

    def follow(self, model: Decoder, dtype: torch.dtype) -> bool:
        return dtype == self.ready.dtype and self.ready.follow(model)

    def take(self, shape: _Shape) -> RecordedDecoding:
        """One of that shape, for one user at a time: who comes meanwhile gets another one."""
        return self.idle.pop(shape, None) or RecordedDecoding(self.ready, *shape)

    def put_back(self, shape: _Shape, decoding: RecordedDecoding) -> None:
        self.idle.pop(shape, None)
        self.idle[shape] = decoding
        while len(self.idle) > KEPT:
            del self.idle[next(iter(self.idle))]


_recordings: WeakKeyDictionary[Decoder, _Recordings] = WeakKeyDictionary()


def release(model: Decoder) -> None:
    """Give back the memory that `generate` and `stream` keep on a GPU for their next call with this model.

    >>> written = generate(model, [[1, 2, 3]], max_tokens=5)
    >>> release(model)
    """
    _recordings.pop(model, None)


@contextmanager
def decoding_of(
    model: Decoder, dtype: torch.dtype, batch: int, capacity: int, sampling: Sampling, vocabulary: int | None
) -> Iterator[Decoding]:
    """A decoding with room for `capacity` tokens, with the weights as they are now; products are in `dtype`."""
    if not use_triton(model.embedding.weight):
        yield Decoding(ReadyWeights(model, dtype), batch, capacity, sampling, vocabulary)
        return
    with torch.cuda.device(model.embedding.weight.device):
        kept = _recordings.get(model)
        if kept is None or not kept.follow(model, dtype):
            kept = _recordings[model] = _Recordings(model, dtype)
        shape = _Shape(batch, min(model.plan.context, -(-capacity // BUCKET) * BUCKET), sampling, vocabulary)
        decoding = kept.take(shape)
    try:
        yield decoding
    finally:
        kept.put_back(shape, decoding)
