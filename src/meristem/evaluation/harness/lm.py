"""A language model of ours as lm-evaluation-harness asks for it: log-likelihoods of texts, and texts written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from meristem.data import Tokenizer
from meristem.decoding import Sampling, stream
from meristem.errors import InputError
from meristem.evaluation.harness.scoring import Piece, scores
from meristem.model import Decoder

GENERATED = 256  # tokens that a task may have written if it does not say how many, as in the harness's own models
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}  # what a task may ask for
BAR = partial(tqdm, desc="scoring", disable=None)  # where there is somebody to look at it


class MeristemLM(TemplateLM):  # type: ignore[misc]  # has no types
    """A model and its tokenizer, scored in the precision of its weights.

    `requests` counts the continuations that were asked for, and `cut` those of them that did not fit into the context
    with all that came before: of these the beginning is not seen, as in the harness's own models. A continuation that
    is longer than the context, which those refuse, is scored in windows.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, batch: int = 16) -> None:
        super().__init__()
        self.model, self.batch = model, batch
        self.requests, self.cut = 0, 0
        self._tokenizer = tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        return self.model.plan.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; it gets no special tokens, as in training."""
        return [int(token) for token in self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood and greediness of the continuation of each (texts, context ids, continuation ids)."""
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        self.requests += len(pairs)
        self.cut += sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        found = scores(self.model, [self._pieces(*pair) for pair in pairs], self.batch, BAR)
        return [(score.log_likelihood, score.greedy) for score in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each token scored once; windows follow one another."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        found = scores(self.model, [list(self._windows(text)) for text in texts], self.batch, BAR)
        return [score.log_likelihood for score in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the stop strings that the task names."""
        asked = [request.args for request in requests]
        order = sorted(range(len(asked)), key=lambda i: (repr(asked[i][1]), len(asked[i][0])))
        texts = [""] * len(asked)
        for _, alike in groupby(order, key=lambda i: repr(asked[i][1])):
            places = list(alike)
            for begin in tqdm(range(0, len(places), self.batch), desc="writing", disable=None):
                part = places[begin : begin + self.batch]
                written = self._write([asked[i][0] for i in part], asked[part[0]][1])
                for place, text in zip(part, written, strict=True):
                    texts[place] = text
        return texts

    def _pieces(self, context: list[int], continuation: list[int]) -> list[Piece]:
        """What is to be scored of a continuation: one piece, or several if it is longer than the context."""
        if len(continuation) > self.max_length:
            return list(self._windows(continuation, context[-1]))
        return [Piece((context + continuation)[-(self.max_length + 1) : -1], continuation)]

    def _windows(self, tokens: list[int], prefix: int | None = None) -> Iterator[Piece]:
        """A text that follows `prefix`, or the end of a text, cut as the harness does it."""
        prefix = self.prefix_token_id if prefix is None else prefix
        for window in get_rolling_token_windows(tokens, prefix, max_seq_len=self.max_length, context_len=1):
            context, targets = make_disjoint_window(window)
            yield Piece([*context, *targets[:-1]], targets)

    def _write(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Continue texts as a task asks for it (`generation_kwargs`)."""
        wanted: dict[str, Any] = normalize_gen_kwargs(settings, GENERATED)
        for name in wanted:
            if name not in GENERATION:
                raise InputError(f"generation_kwargs.{name}", wanted[name], f"must be one of {sorted(GENERATION)}")
        tokens, stops = wanted["max_gen_toks"], [stop for stop in wanted["until"] if stop]
        if tokens >= self.max_length:
            expected = f"must be below the model's context of {self.max_length}, which holds the prompt too"
            raise InputError("generation_kwargs.max_gen_toks", tokens, expected)
        sampling = Sampling(
            wanted.get("temperature", 1.0) if wanted["do_sample"] else 0.0, wanted.get("top_k"), wanted.get("top_p")
        )
        prompts = [
            self.tok_encode(text)[tokens - self.max_length :] or [self.prefix_token_id]  # its end, if it is too long
            for text in contexts
        ]
        ids: list[list[int]] = [[] for _ in prompts]
        texts, ended = [""] * len(prompts), [False] * len(prompts)
        steps = stream(
            self.model, prompts, max_tokens=tokens, sampling=sampling, end_of_text=self.eot_token_id,
            vocabulary=self._tokenizer.vocabulary,
        )  # fmt: skip
        with closing(steps):  # type: ignore[type-var]  # it is a generator
            for step in steps:
                for row, token in enumerate(step):
                    if token is not None and not ended[row]:
                        ids[row].append(token)
                        texts[row] = self._tokenizer.decode(ids[row])
                        ended[row] = any(stop in texts[row] for stop in stops)
                if all(ended):
                    break
        return [min((text.split(stop)[0] for stop in stops), key=len, default=text) for text in texts]
