"""An audit in words: two tables, and what may be said about the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meristem.comparison import PairedDifference
from meristem.evaluation.audit import CONFIDENCE, Audit, HeadFinding, LayerFinding
from meristem.wording import counted, listed

NAMED = 8  # heads or layers that a sentence lists


def audit_text(audit: Audit) -> str:
    """Tables and verdict, for the terminal."""
    return "\n".join([*_head_lines(audit), *_layer_lines(audit), _intervals(audit), *verdict(audit)])


def verdict(audit: Audit) -> list[str]:
    """Whether the model is minimal and whether it is sufficient, in a line each that claims no more than is shown."""
    return [
        f"minimal: {audit.minimal}. {' '.join(_minimal_sentences(audit))}",
        f"sufficient: {audit.sufficient}. {' '.join(_sufficient_sentences(audit))}",
    ]


# --- tables ----------------------------------------------------------------------------------------------------------


def _head_lines(audit: Audit) -> list[str]:
    lines = [
        "Every head: the rise of the held-out loss without it, in %",
        f"layer  head  {'switched off':<25}  {'others in its place':<25}  matters",
    ]
    for head in audit.heads:
        replaced = "(there is no other)" if audit.is_only(head) else _percent(audit, head.replaced)
        columns = f"{_percent(audit, head.off):<25}  {replaced:<25}"
        lines.append(f"{head.layer:>5}  {head.head:>4}  {columns}  {audit.matters(head)}")
    return lines


def _layer_lines(audit: Audit) -> list[str]:
    lines = [
        "Every layer: the demand left, of the largest there was; the fall of the loss with another head, in %",
        "layer  heads  predicted  demand  noise  threshold  it is  "
        f"  {'another head':<23}  {'further training':<23}  wants more",
    ]
    for layer in audit.layers:
        demand = "  ".join(
            f"{_number(value):>{width}}"
            for value, width in ((layer.demand.demand, 6), (layer.demand.noise, 5), (layer.demand.threshold, 9))
        )
        gain = layer.gain
        gains = ("not tried", "") if gain is None else (_percent(audit, gain.head), _percent(audit, gain.further))
        lines.append(
            f"{layer.layer:>5}  {layer.heads:>5}  {_predicted(layer.predicted):>9}  {demand}  {layer.kind:<7}  "
            f"{gains[0]:<23}  {gains[1]:<23}  {audit.wants_more(layer)}"
        )
    return lines


def _intervals(audit: Audit) -> str:
    tried = sum(layer.gain is not None for layer in audit.layers)
    counts = [counted(len(audit.heads), "head"), *([f"{counted(tried, 'layer')} tried"] if tried else [])]
    of = "the loss" if audit.unit == audit.loss else f"{audit.unit:g}, as the loss is smaller"
    return (
        f"Shares of {of}. Intervals of {100 * CONFIDENCE:g} % over {audit.sequences} sequences, corrected for "
        f"{' and for '.join(counts)} (Bonferroni)."
    )


# --- verdict ---------------------------------------------------------------------------------------------------------


def _minimal_sentences(audit: Audit) -> list[str]:
    spare, unsure = ([h for h in audit.heads if audit.matters(h) == answer] for answer in ("no", "not shown"))
    said = []
    if spare:
        most = max(head.replaced.high for head in spare)
        said.append(
            f"Not needed{', each by itself' if len(spare) > 1 else ''}: {_heads(spare)}. With the others in its place "
            f"the loss rises by {_share(audit, max(most, 0.0))} % at most."
        )
    if unsure:
        said.append(f"Not shown to matter, as the interval includes 0: {_heads(unsure)}.")
    if not said:
        least = min(audit.heads, key=lambda head: head.replaced.mean)
        rise = f"{_percent(audit, least.replaced)} %"
        if len(audit.heads) == 1:
            return [f"Without the only head the loss rises by {rise}."]
        others = "" if all(map(audit.is_only, audit.heads)) else ", even with others of its layer in its place"
        said.append(
            f"Without any of the {len(audit.heads)} heads the loss rises{others}; least for {_heads([least])}: {rise}."
        )
    return said


def _sufficient_sentences(audit: Audit) -> list[str]:
    steps, bound = audit.settings.steps, f"the threshold of {_share(audit, audit.threshold)} %"
    said = []
    for layer in audit.layers:
        if layer.gain is None or audit.gains(layer) == "no":
            continue
        head, further = (_percent(audit, gain) for gain in (layer.gain.head, layer.gain.further))
        gained = f"In layer {layer.layer} another head, trained for {steps} updates, gains {head} %"
        if audit.gains(layer) == "yes" and layer.gain.extra.low > 0:
            said.append(f"{gained}, and further training of those there are {further} %.")
        elif audit.gains(layer) == "yes":
            said.append(
                f"{gained}, but further training of those there are, {further} %, may gain as much: the training was "
                "not at its end, and may lack updates rather than heads."
            )
        elif layer.gain.head.high < -audit.threshold:
            said.append(f"{gained}: training has made it worse, which says nothing about what a head could do.")
        else:
            said.append(f"{gained}, which may be above or below {bound}.")
    enough = [layer for layer in audit.layers if audit.gains(layer) == "no"]
    if enough:
        most = max(layer.gain.head.high for layer in enough if layer.gain is not None)
        said.append(
            f"In {_layers(enough)} another head, trained for {steps} updates, gains {_share(audit, max(most, 0.0))} % "
            f"at most, less than {bound}."
        )
    for reason in dict.fromkeys(layer.untried for layer in audit.layers if layer.untried):
        same = [layer for layer in audit.layers if layer.untried == reason]
        said.append(f"Another head in {_layers(same)} was not tried: {reason}.")
    return [*said, *_demand_sentences(audit)]


def _demand_sentences(audit: Audit) -> list[str]:
    """What is certain, what is small and what is not known of the demand, layer by layer."""
    of = {kind: [layer for layer in audit.layers if layer.kind == kind] for kind in ("certain", "small", "unknown")}
    unmeasured = [layer for layer in of["unknown"] if not math.isfinite(layer.demand.demand)]
    unclear = [layer for layer in of["unknown"] if layer not in unmeasured]
    said = []
    if of["certain"]:
        said.append(f"The demand of {_layers(of['certain'])} is certain and above its threshold.")
    if of["small"]:
        begin = "That" if said else "The demand"
        said.append(f"{begin} of {_layers(of['small'])} is small: for certain below its threshold.")
    if unclear:
        begin = "That" if said else "The demand"
        said.append(f"{begin} of {_layers(unclear)} is unknown: by its noise it may be above its threshold or below.")
    if unmeasured:
        said.append(f"No demand was certain in {_layers(unmeasured)}, now or at the start.")
    return said


# --- words -----------------------------------------------------------------------------------------------------------


def _heads(heads: Sequence[HeadFinding]) -> str:
    return listed([f"head {head.head} of layer {head.layer}" for head in heads], NAMED)


def _layers(layers: Sequence[LayerFinding]) -> str:
    return f"layer{'' if len(layers) == 1 else 's'} {listed([str(layer.layer) for layer in layers], NAMED)}"


def _share(audit: Audit, difference: float) -> str:
    """A difference of losses in percent."""
    return f"{100 * difference / audit.unit:.3g}"


def _percent(audit: Audit, difference: PairedDifference) -> str:
    """Mean and interval in percent."""
    values = [100 * value / audit.unit for value in (difference.mean, difference.low, difference.high)]
    mean, low, high = (f"{value:+.{3 if abs(value) < 1 else 1}f}" for value in values)
    return f"{mean} [{low}, {high}]"


def _predicted(heads: Mapping[str, float] | None) -> str:
    """The count, and the estimate."""
    return "-" if heads is None else f"{heads['count']:.0f} ({heads['estimate']:.1f})"


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
