"""What happened in a run, as rows of a table that say why in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meristem.growth.descriptions import Reason, describe_reason
from meristem.growth.events import GrowthEvent
from meristem.report.depth_text import promise_and_price
from meristem.report.run_growth import RunGrowth
from meristem.wording import counted

Entry = Mapping[str, Any]

ACTIONS = {
    "birth": "head born", "removal": "head removed", "spare": "head kept after a trial", "add": "loop begun",
    "deepen": "loop deepened", "fade": "other heads left the loop", "fix": "growth of loops ended",
    "wait": "put off", "stack": "blocks copied", "postponed": "postponed", "refit": "feed-forward layers refitted",
}  # fmt: skip
RUN_EVENTS = ("start", "resume", "branch", "rewind", "stopped", "diverged", "finished", "not_saved")
MOST_SKIPPED = 20  # updates that are told one by one


def growth_rows(growth: RunGrowth) -> list[dict[str, Any]]:
    """The decisions about the structure, in the numbers that layers have at the end.

    `event` is the place of each among all events of growth, by which the structure after it is found.
    """
    numbers, rows = growth.numbers, []
    sound = {
        (one.step, one.policy, one.action, one.layer, one.plan): one
        for one in growth.heads.decisions
        if isinstance(one, GrowthEvent)
    }
    for place, event in enumerate(numbers.events):
        if not isinstance(event, GrowthEvent):
            continue
        if event.layer is not None and not 0 <= event.layer < numbers.all_layers:
            continue
        known = sound.get((event.step, event.policy, event.action, event.layer, event.plan))
        told = event if known is None else known
        reason = _reason(told, growth.config.tolerance)
        rows.append(
            {
                "step": event.step,
                "policy": event.policy,
                "action": event.action,
                "what": ACTIONS.get(event.action, event.action),
                "layer": event.layer,
                "layer_name": _layer_name(growth, event.layer),
                "head": _head(told),
                "reading": reason.reading,
                "threshold": reason.threshold,
                "rule": event.rule,
                "text": numbers.named(event, growth.text_of(told)),
                "event": place,
            }
        )
    return rows


def _layer_name(growth: RunGrowth, layer: int | None) -> str:
    """The number of a layer at the end; of one that was taken out, its last number and when it left."""
    if layer is None:
        return ""
    number, step = growth.numbers.taken_out.get(layer, (layer, None))
    return str(number) if step is None else f"{number} (until step {step:,})"


def _head(event: GrowthEvent) -> str:
    """The heads that an event is about, by their numbers in the layer; empty if it is about none."""
    heads, head, layer = event.facts.get("heads"), event.facts.get("head"), event.layer
    if type(head) is int:
        return str(head)
    if not isinstance(heads, list) or layer is None:
        return ""
    if event.action == "birth":
        return str(heads[layer] - 1) if layer < len(heads) and type(heads[layer]) is int else ""
    return ", ".join(map(str, heads)) if event.action in ("add", "deepen", "fade") else ""


def _reason(event: GrowthEvent, tolerance: float | None) -> Reason:
    """What a decision was made on; copies of blocks come at a time that was set, or where they promise to pay."""
    if outlook := promise_and_price(event):
        promise, price = outlook
        return Reason(f"promise {promise:.3g} nats", f"above the price, {price:.3g} nats")
    if event.action == "stack" and event.policy == "stack":
        return Reason(f"{counted(event.step, 'update')} done", f"{counted(event.step, 'update')} (growth.stack.at)")
    return describe_reason(event, tolerance)


def run_rows(entries: Iterable[Entry], steps: int) -> list[dict[str, Any]]:
    """When a run began, stopped, went on, went back and ended, and updates that were skipped."""
    rows: list[dict[str, Any]] = []
    skipped = last = 0
    for entry in entries:
        step, kind = entry.get("step"), entry.get("event")
        if type(step) is not int or not 0 <= step <= steps or not isinstance(kind, str):
            continue
        if kind == "skipped":
            skipped, last = skipped + 1, step
            if skipped <= MOST_SKIPPED:
                rows.append({"step": step, "kind": kind, "text": "an update was skipped: it was not finite"})
        elif kind in RUN_EVENTS:
            rows.append({"step": step, "kind": kind, "text": _run_text(kind, entry)})
    if skipped > MOST_SKIPPED:
        more = f"{counted(skipped - MOST_SKIPPED, 'more update')} skipped until now"
        rows.append({"step": last, "kind": "skipped", "text": more})
    return rows


def _run_text(kind: str, entry: Entry) -> str:
    if kind in ("start", "resume"):
        begin = "the run began" if kind == "start" else "the run was resumed"
        versions = [f"{name} {entry[name]}" for name in ("meristem", "torch") if isinstance(entry.get(name), str)]
        device = [entry["device"]] if isinstance(entry.get("device"), str) else []
        processes = entry.get("processes")
        several = [counted(processes, "process", "es")] if type(processes) is int and processes > 1 else []
        told = ", ".join([*device, *several, *versions])
        return f"{begin} ({told})" if told else begin
    if kind == "branch":
        return f"branched off {entry.get('run')}"
    if kind == "rewind":
        return f"went back to this step from step {entry.get('from_step')}: updates were not finite"
    if kind == "stopped":
        return f"stopped by signal {entry.get('signal')}"
    if kind == "diverged":
        what = "weights" if entry.get("not_finite") == "weights" else "updates"
        return f"given up: {what} were not finite from step {entry.get('first')} on"
    if kind == "not_saved":
        return f"not saved: {entry.get('tensor')} was not finite"
    return "the run ended"
