"""A plan for the eye and for other programs."""

from __future__ import annotations

from typing import Any

from meristem.plan import GIB, Plan


def plan_facts(plan: Plan, tensor_parallel: int = 1) -> dict[str, Any]:
    """The facts of a plan, for machines."""
    cost = plan.cost
    return {
        **({} if plan.classes is None else {"classes": plan.classes, "pooling": plan.pooling}),
        "heads": list(plan.heads),
        "head_dims": list(plan.head_dims),
        "kv_heads": list(plan.kv_heads),
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
        "warnings": plan.warnings(tensor_parallel),
        "digest": plan.digest,
    }


def plan_text(plan: Plan, batch_tokens: int, tensor_parallel: int = 1) -> str:
    """Table, memory estimate and warnings."""
    memory = plan.memory(batch_tokens)
    lines = [
        plan.table(),
        f"training memory about {memory.total / GIB:.1f} GiB at {batch_tokens:,} tokens per pass "
        f"(activations {memory.activations / GIB:.1f}, weights {memory.weights / GIB:.1f}, gradients "
        f"{memory.gradients / GIB:.1f}, optimizer {memory.optimizer / GIB:.1f}, loss {memory.loss / GIB:.1f})",
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in plan.warnings(tensor_parallel))])


def side_by_side(plan: Plan, other: Plan, name: str, other_name: str) -> str:
    """Two plans layer by layer, and whether they cost the same."""
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
