"""A plan for the eye and for other programs: its table, what will be slow, and two of them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack

from meristem.limits import MOST_PROCESSES, check_integer
from meristem.plan.costs import GIB, TrainingOptions
from meristem.schedules import choices, is_prism_like, short_phases
from meristem.wording import listed

if TYPE_CHECKING:
    from meristem.plan.layers import LayerPlan
    from meristem.plan.plan import Plan

FLASH_LIMIT = 256  # flash and cuDNN attention kernels stop here
FLASHINFER_DIMS = (64, 128, 256, 512)
TILE = 128  # columns that a product on a GPU computes at a time; what is left over is wasted
LARGE_WIDTH = 1024  # from where that is measured: 2736 takes 2.5 % longer a step than 2688 and 1.4 % than 2816


def _millions(flops: int, places: int) -> str:
    """FLOPs in millions; of a small model three digits, so that its numbers can be told apart."""
    return f"{flops / 1e6:,.{places}f}" if flops >= 10**7 else f"{flops / 1e6:.3g}"


def plan_table(plan: Plan) -> str:
    """A readable table, one line per run of equal layers, and the totals."""
    rows = [("layers", "heads", "head dim", "kv heads", "run again", "parameters", "MFLOP/token", "KV bytes")]
    for first, last, layer in _runs(plan.layers):
        cost = plan.layer_cost(layer)
        rows.append(
            (
                f"{first}" if first == last else f"{first}-{last}",
                f"{layer.heads}",
                f"{layer.head_dim}",
                f"{layer.kv_heads}",
                layer.run_again or "-",
                f"{cost.parameters:,}",
                _millions(cost.forward.causal, 2),
                f"{cost.kv_bytes_per_token:,}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    cost = plan.cost
    causal, full = (_millions(flops, 1) for flops in (cost.forward.causal, cost.forward.full))
    work = f"{causal} MFLOP/token causal, {full} full square"
    cache, answer = f"; KV cache {cost.kv_bytes_per_token:,} bytes/token", ""
    if plan.classes is not None:
        work, cache = f"{full} MFLOP/token, all tokens seeing each other", ""
        answer = f"; {plan.classes} classes read from " + ("all tokens" if plan.pooling == "mean" else "the first")
    lines += [
        "(each line is one layer's cost, for the layers named)",
        f"width {plan.width}, vocabulary {plan.vocabulary}, context {plan.context}, "
        f"feed-forward {plan.feed_forward}{_variant_text(plan)}{answer}",
        f"parameters {cost.parameters:,} in all; forward {work}; training three times that",
        f"softmax elements {cost.softmax_elements:,} per sequence{cache}",
        *([] if plan.gates is None else [f"gates for {plan.gates.passes} passes over {plan.gates.heads} heads"]),
        *([f"grows to {len(plan.target)} layers"] if plan.target else []),
        f"plan {plan.digest[:12]}",
    ]
    return "\n".join(lines)


def plan_warnings(plan: Plan, tensor_parallel: int = 1) -> list[str]:
    """What will be slow or impossible somewhere, each with its reason."""
    check_integer("tensor_parallel", tensor_parallel, 1, MOST_PROCESSES)
    found: list[str] = []
    for dim, where in _positions(plan.head_dims).items():
        if dim > FLASH_LIMIT:
            found.append(
                f"{where}: head dim {dim} is above {FLASH_LIMIT}, where flash and cuDNN attention stop; "
                "a several times slower kernel is used"
            )
        if dim % 8:
            found.append(f"{where}: head dim {dim} is not a multiple of 8; fused kernels pad or refuse it")
        if dim == 96:
            found.append(f"{where}: head dim 96 cannot be served by FlashInfer (it takes {FLASHINFER_DIMS})")
    bad = [h for h in sorted(set(plan.heads + plan.kv_heads)) if h % tensor_parallel]
    if bad:
        found.append(f"tensor-parallel size {tensor_parallel} does not divide the head counts {choices(bad)}")
    if is_prism_like(plan.heads) and all(layer.query_width == plan.width for layer in plan.layers):
        for count, length in short_phases(plan.heads):
            found.append(f"the phase of {count} heads lasts {length} layer; Prism keeps at least 2")
    if plan.width >= LARGE_WIDTH and plan.feed_forward % TILE:
        lower = plan.feed_forward // TILE * TILE
        found.append(
            f"feed-forward {plan.feed_forward} is not a multiple of {TILE}, so products on a GPU leave parts of their "
            f"tiles empty; {lower} or {lower + TILE} would fill them"
        )
    ratios = {layer.heads // layer.kv_heads for layer in plan.layers}
    if len(ratios) > 1:
        found.append(
            f"query heads per key/value head differ between layers ({sorted(ratios)}): parameters and "
            "cache are not those of the uniform plan"
        )
    return found


def plan_facts(
    plan: Plan, batch_tokens: int, tensor_parallel: int = 1, **options: Unpack[TrainingOptions]
) -> dict[str, Any]:
    """The facts of a plan, for machines."""
    cost, memory = plan.cost, plan.memory(batch_tokens, **options)
    return {
        **({} if plan.classes is None else {"classes": plan.classes, "pooling": plan.pooling}),
        "heads": list(plan.heads),
        "head_dims": list(plan.head_dims),
        "kv_heads": list(plan.kv_heads),
        **{name: plan.to_dict()[name] for name in plan.variant},
        "loops": {str(index): {"heads": list(loop.heads), "passes": loop.passes} for index, loop in plan.loops.items()},
        "repeats": [layer.repeats for layer in plan.layers],
        "parameters": cost.parameters,
        "flops_per_token": {
            "forward": {"full": cost.forward.full, "causal": cost.forward.causal},
            "training": {"full": cost.training.full, "causal": cost.training.causal},
        },
        "softmax_elements": cost.softmax_elements,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        **({} if plan.classes is None else {"flops_per_answer": cost.answer}),
        "training_memory": {**options, "batch_tokens": batch_tokens, **asdict(memory), "total": memory.total},
        "warnings": plan.warnings(tensor_parallel),
        "digest": plan.digest,
    }


def plan_text(plan: Plan, batch_tokens: int, tensor_parallel: int = 1, **options: Unpack[TrainingOptions]) -> str:
    """Table, memory estimate and warnings."""
    memory, world = plan.memory(batch_tokens, **options), options.get("world", 1)
    each = f" in each of {world} processes ({options.get('parallel', 'ddp')})" if world > 1 else ""
    again = ", blocks recomputed" * options.get("recompute", False)
    lines = [
        plan.table(),
        f"training memory about {memory.total / GIB:.1f} GiB{each} at {batch_tokens:,} tokens per pass{again} "
        f"(activations {memory.activations / GIB:.1f}, weights {memory.weights / GIB:.1f}, gradients "
        f"{memory.gradients / GIB:.1f}, optimizer {memory.optimizer / GIB:.1f}, loss {memory.loss / GIB:.1f})",
    ]
    if memory.gathered:
        lines.append(
            f"instead of activations and loss, {memory.gathered / GIB:.1f} GiB of whole weights while a process "
            "evaluates or grows"
        )
    return "\n".join([*lines, *(f"warning: {text}" for text in plan.warnings(tensor_parallel))])


def side_by_side(
    plan: Plan, other: Plan, name: str, other_name: str, batch_tokens: int, **options: Unpack[TrainingOptions]
) -> str:
    """Two plans layer by layer, and whether they cost the same; with the memory of a training step."""
    rows = [("layer", name, other_name)]
    for index, (left, right) in enumerate(zip(plan.layers, other.layers, strict=True)):
        mine, theirs = (f"{layer.heads} x {layer.head_dim} {layer.run_again}".strip() for layer in (left, right))
        rows.append((str(index), mine, theirs))
    rows.append(("", "", ""))
    a, b = plan.cost, other.cost
    pairs = {
        "parameters": (a.parameters, b.parameters),
        "FLOPs/token, causal": (a.forward.causal, b.forward.causal),
        "FLOPs/token, full": (a.forward.full, b.forward.full),
        "KV bytes/token": (a.kv_bytes_per_token, b.kv_bytes_per_token),
        "softmax elements": (a.softmax_elements, b.softmax_elements),
    }
    rows += [(label, f"{x:,}", f"{y:,}") for label, (x, y) in pairs.items()]
    mine, theirs = (f"{each.memory(batch_tokens, **options).total / GIB:.1f}" for each in (plan, other))
    rows.append(("training memory, GiB", mine, theirs))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{label:<{widths[0]}}  {x:>{widths[1]}}  {y:>{widths[2]}}".rstrip() for label, x, y in rows]
    differ = [label for label, (x, y) in pairs.items() if x != y and label != "softmax elements"]
    verdict = (
        f"not neutral: they differ in {', '.join(differ)}"
        if differ
        else "neutral: parameters, FLOPs and KV cache are exactly equal"
    )
    ratio = a.softmax_elements / b.softmax_elements
    lines.append(f"{verdict}; softmax work {ratio:.4f} of {other_name}'s")
    return "\n".join([*lines, *(f"warning: {text}" for text in plan.warnings())])


def _variant_text(plan: Plan) -> str:
    """What there is besides sizes, each part after a comma; nothing of what is as usual."""
    turns = f"rotary base {plan.rotary.base:,.10g}"
    if plan.rotary.scaled:
        began = "" if plan.rotary.context is None else f" beyond {plan.rotary.context:,} tokens"
        turns += f" slowed down by {plan.rotary.factor:g}{began}"
    texts = {
        "qk_norm": "queries and keys normed" + ", with gains" * plan.qk_gain,
        "qkv_bias": "biases of queries, keys and values",
        "tied": "an output of its own",
        "norm_eps": f"norm epsilon {plan.norm_eps:g}",
        "rotary": turns,
    }
    return "".join(f", {text}" for name, text in texts.items() if name in plan.variant)


def _runs(layers: Sequence[LayerPlan]) -> list[tuple[int, int, LayerPlan]]:
    """(first, last, layer) for each run of equal consecutive layers."""
    runs: list[tuple[int, int, LayerPlan]] = []
    for i, layer in enumerate(layers):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], i, layer)
        else:
            runs.append((i, i, layer))
    return runs


def _positions(values: Sequence[int]) -> dict[int, str]:
    """Each distinct value with the layers that have it, in words."""
    where: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        where.setdefault(value, []).append(i)
    return {v: f"layer{'s' if len(at) > 1 else ''} {listed([str(i) for i in at], 100)}" for v, at in where.items()}
