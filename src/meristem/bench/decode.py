"""Tokens per second of generation, ours beside transformers, measured in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from meristem.bench.step import check_minimums, wait
from meristem.decoding import Sampling, generate
from meristem.devices import autocast, compute_dtype, describe_device, memory_bandwidth
from meristem.errors import InputError, missing_extra
from meristem.model import Decoder
from meristem.plan import Plan

PLAIN, STATIC = "transformers", "transformers, static"
Arm = Callable[[], None]  # continues the same prompts by so many tokens, greedily


@dataclass(frozen=True)
class DecodeResult:
    """One arm in one round: a whole call, prefill included."""

    name: str
    batch: int
    seconds: float
    tokens_per_second: float
    milliseconds: float  # a token of each text
    limit_share: float | None  # of the rate at which weights and cache can be read once a token


def compare_decoding(
    plans: Mapping[str, Plan],
    device: torch.device,
    *,
    batches: Sequence[int],
    prompt: int,
    tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure transformers, plain and with its static cache, and each plan, in turn; ready for JSON.

    transformers runs a Llama of the first plan's shape, whose layers have to be alike. Every arm is called once before
    it is timed. All weights are random, and nothing ends before `tokens` tokens.
    """
    counts = (("prompt", prompt, 1), ("tokens", tokens, 2), ("rounds", rounds, 1))
    check_minimums(*counts, *(("batch", batch, 1) for batch in batches))
    first = next(iter(plans.values()))
    if prompt + tokens - 1 > first.context:
        raise InputError("tokens", tokens, f"must be at most {first.context + 1 - prompt}: the context less the prompt")
    version = _transformers_version()
    results = []
    for batch in batches:
        ids = torch.randint(first.vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(0))
        arms = {name: (first, arm) for name, arm in _llama_arms(first, device, ids.to(device), tokens).items()}
        arms |= {
            f"meristem, {name}": (plan, _our_arm(Decoder(plan).to(device), device, ids, tokens))
            for name, plan in plans.items()
        }
        for name, (_, arm) in arms.items():
            say(f"batch {batch}, {name}: first call {_seconds(arm, device):.1f} s")
        for _ in range(rounds):
            for name, (plan, arm) in arms.items():
                seconds = _seconds(arm, device)
                rate, share = _rate(seconds, plan, device, batch, prompt, tokens)
                results.append(DecodeResult(name, batch, seconds, rate, 1e3 * seconds / tokens, share))
        arms.clear()
        gc.collect()
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "transformers": version,
        "settings": {
            "prompt": prompt, "tokens": tokens, "rounds": rounds, "layers": len(first.layers), "width": first.width,
            "vocabulary": first.vocabulary, "context": first.context, "dtype": str(compute_dtype(device)),
        },
        "plans": {name: list(plan.heads) for name, plan in plans.items()},
        "results": [asdict(result) for result in results],
    }  # fmt: skip


def our_rate(plan: Plan, device: torch.device, *, prompt: int, tokens: int) -> tuple[float, float | None]:
    """Tokens per second of our generation of one text, in the second call, and their share of the limit."""
    rate = model_rate(Decoder(plan).to(device), device, prompt=prompt, tokens=tokens)
    most = limit(plan, device, 1, prompt, tokens)
    return rate, None if most is None else rate / most


def model_rate(
    model: Decoder, device: torch.device, *, prompt: int, tokens: int, calls: int = 1, batch: int = 1
) -> float:
    """Tokens per second with which a model goes on with random prompts: the fastest call, the first one apart."""
    ids = torch.randint(model.plan.vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(0))
    arm = _our_arm(model, device, ids, tokens)
    _seconds(arm, device)
    return batch * tokens / min(_seconds(arm, device) for _ in range(calls))


def _rate(
    seconds: float, plan: Plan, device: torch.device, batch: int, prompt: int, tokens: int
) -> tuple[float, float | None]:
    """Tokens per second of a call, and their share of the limit, where that is known."""
    rate, most = batch * tokens / seconds, limit(plan, device, batch, prompt, tokens)
    return rate, None if most is None else rate / most


def limit(plan: Plan, device: torch.device, batch: int, prompt: int, tokens: int) -> float | None:
    """Tokens per second if each step only had to read the weights and the cache once; None on an unknown device."""
    bandwidth = memory_bandwidth(device)
    if bandwidth is None:
        return None
    size = compute_dtype(device).itemsize
    seen = prompt + (tokens - 1) / 2  # on average
    cache = batch * seen * plan.cost.kv_bytes_per_token / torch.bfloat16.itemsize
    return batch * bandwidth / (size * (plan.parameters + cache))


def _our_arm(model: Decoder, device: torch.device, ids: Tensor, tokens: int) -> Arm:
    prompts = ids.tolist()

    def call() -> None:
        with autocast(device):
            found = generate(model, prompts, max_tokens=tokens, sampling=Sampling(temperature=0))
        assert all(len(row) == tokens for row in found)

    return call


def _llama_arms(plan: Plan, device: torch.device, ids: Tensor, tokens: int) -> dict[str, Arm]:
    """`generate` of a Llama with the shapes of a plan, and the same with a static cache, which it compiles on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if len(set(plan.layers)) > 1:
        raise InputError("schedules", plan.heads, "must begin with uniform: a Llama's layers are all alike")
    layer = plan.layers[0]
    config = LlamaConfig(
        vocab_size=plan.vocabulary, hidden_size=plan.width, intermediate_size=plan.feed_forward,
        num_hidden_layers=len(plan.layers), num_attention_heads=layer.heads, num_key_value_heads=layer.kv_heads,
        head_dim=layer.head_dim, max_position_embeddings=plan.context, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch._dynamo.reset()  # another batch size is compiled anew, not for any size
    llama = LlamaForCausalLM(config).to(device=device, dtype=compute_dtype(device)).eval()

    def arm(**options: Any) -> Arm:
        def call() -> None:
            found = llama.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **options
            )
            assert found.shape[1] == ids.shape[1] + tokens

        return call

    return {PLAIN: arm(), STATIC: arm(cache_implementation="static")}


def _transformers_version() -> str:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "hf") from error
    return str(transformers.__version__)


def _seconds(arm: Arm, device: torch.device) -> float:
    wait(device)
    begin = time.perf_counter()
    arm()
    wait(device)
    return time.perf_counter() - begin


def decoding_text(report: dict[str, Any]) -> str:
    """A table of the medians over rounds, with ratios to transformers' static cache."""
    arms: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for result in report["results"]:
        arms.setdefault((result["batch"], result["name"]), []).append(result)
    settings = report["settings"]
    lines = [
        f"{report['device']}, torch {report['torch']}, transformers {report['transformers']}, "
        f"prompt {settings['prompt']} + {settings['tokens']} tokens, {settings['dtype'].removeprefix('torch.')}",
        "batch  arm                     tokens/s   ms/token   ratio   of the limit",
    ]
    for (batch, name), rounds in arms.items():
        rate = statistics.median(each["tokens_per_second"] for each in rounds)
        # Round by round, so that a drift of the machine falls on both.
        base = arms[batch, STATIC]
        ratio = statistics.median(
            mine["tokens_per_second"] / theirs["tokens_per_second"] for mine, theirs in zip(rounds, base, strict=True)
        )
        known = [each["limit_share"] for each in rounds if each["limit_share"] is not None]
        share = f"{statistics.median(known):12.1%}" if known else "           -"
        lines.append(f"{batch:5}  {name:<20}  {rate:10,.0f}   {1e3 * batch / rate:8.3f}   {ratio:5.2f}   {share}")
    if not any(each["limit_share"] for each in report["results"]):
        lines.append("The memory bandwidth of this device is not known, so nothing is said of the limit.")
    return "\n".join(lines)
