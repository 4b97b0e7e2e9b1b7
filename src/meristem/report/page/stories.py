"""What every policy of a run has done, and why it did no more, in a sentence or two each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meristem.config.growth import table_name
from meristem.growth.descriptions import MEASURES
from meristem.growth.policies import POLICIES
from meristem.report.run_growth import RunGrowth
from meristem.runs.run_folder import PRUNE_FILE
from meristem.wording import counted

Entry = Mapping[str, Any]  # a row of the table of events


def policy_stories(growth: RunGrowth, rows: Sequence[Entry], last_step: int) -> list[dict[str, str]]:
    """What every policy of a run has done, and why it did no more, in a sentence or two each."""
    if (growth.folder.path / PRUNE_FILE).is_file():
        return [{"policy": "prune", "text": "meristem prune took heads out of a trained model; since then none grow."}]
    if not growth.config.growth.policies:
        return [{"policy": "", "text": "growth.policies is empty: the structure was to stay as it is."}]
    stories = []
    for name in growth.config.growth.policies:
        own = [row for row in rows if row["policy"] == table_name(name)]
        stories.append({"policy": name, "text": _story(name, growth, own, last_step).rstrip()})
    return stories


def _story(name: str, growth: RunGrowth, rows: Sequence[Entry], last_step: int) -> str:
    if name in ("incrt", "published"):
        return _births_story(name, growth, rows)
    if name == "prune":
        return _prune_story(growth, rows)
    if name == "sgt":
        return _sgt_story(growth, rows, last_step)
    if name == "observe":
        seen = len(growth.loops.observations)
        return f"Records the entropy of every head and decides nothing; {counted(seen, 'time')} so far."
    if name == "stack":
        times = growth.config.policy("stack").times
        moved = growth.config.train.flops is not None  # then parts of the run are not known in updates before
        ahead = [] if moved else [time for time in times if time > last_step]
        done = f"Copied blocks {counted(len(rows), 'time')}."
        return f"{done} The next copies come at step {ahead[0]:,}." if ahead else done
    if name == "depth":
        return growth.depth_text
    if name in POLICIES and POLICIES[name].static:
        return "Its loops are there from the first step on; it decides nothing during the run."
    return f"Made {counted(len(rows), 'decision')}."


def _births_story(name: str, growth: RunGrowth, rows: Sequence[Entry]) -> str:
    measure = MEASURES[name]
    births = sum(row["action"] == "birth" for row in rows)
    removed = sum(row["action"] == "removal" for row in rows)
    begin = f"{counted(births, 'head')} born" if births else "No head was born"
    begin += f", {removed} removed." if removed else "."
    points = [
        (point.demand / point.threshold, point, layer)
        for layer, readings in enumerate(growth.heads.readings)
        for point in readings
        if point.threshold > 0 and point.demand == point.demand
    ]
    if not points:
        return f"{begin} Nothing has been measured with certainty so far."
    verdicts = [
        rule
        for event in growth.heads.decisions
        if event.policy == name and event.facts.get("demand")
        for rule in event.facts.get("rules", ())
    ]
    if births:
        return f"{begin} {_most_frequent(verdicts)}"
    share, point, layer = max(points, key=lambda one: one[0])
    noise = f" ± {point.noise:.2g}" if point.noise == point.noise else ""
    nearest = (
        f"The {measure} came {'nearest to' if share <= 1 else 'farthest above'} its threshold in layer {layer} at step "
        f"{point.step:,}: {point.demand:.3g}{noise} of {point.threshold:.3g}."
    )
    return f"{begin} {nearest} {_most_frequent(verdicts)}"


def _most_frequent(verdicts: Sequence[str], most: int = 3) -> str:
    """The reasons that were given most often."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        for reason in verdict.split("; "):
            if reason not in ("not born yet",):
                counts[reason] = counts.get(reason, 0) + 1
    if not counts:
        return ""
    named = sorted(counts.items(), key=lambda one: -one[1])[:most]
    said = ", ".join(f"“{reason}” {counted(times, 'time')}" for reason, times in named)
    return f"Verdicts on layers: {said}."


def _prune_story(growth: RunGrowth, rows: Sequence[Entry]) -> str:
    removed = sum(row["action"] == "removal" for row in rows)
    spared = sum(row["action"] == "spare" for row in rows)
    limit, patience = growth.config["growth.prune.redundant"], growth.config["growth.prune.patience"]
    begin = f"{counted(removed, 'head')} removed" if removed else "No head was removed"
    begin += f", {counted(spared, 'trial')} showed a head to be needed." if spared else "."
    shares = [
        (share, event.step, layer, head)
        for event in growth.heads.decisions
        for layer, heads in enumerate(event.facts.get("own_share", ()))
        if len(heads) > 1
        for head, share in enumerate(heads)
        if share is not None
    ]
    if not shares:
        return f"{begin} No head was old enough to be looked at."
    share, step, layer, head = min(shares)
    verb = "below" if share < limit else "above"
    return (
        f"{begin} The least needed was head {head} of layer {layer} at step {step:,}, whose own share of its layer's "
        f"output was {share:.3g}: {verb} {limit:g}, under which a head is tried without if it stays so for "
        f"{counted(patience, 'decision')}."
    )


def _sgt_story(growth: RunGrowth, rows: Sequence[Entry], last_step: int) -> str:
    policy = growth.config.policy("sgt")
    grown = {row["layer"] for row in rows if row["action"] in ("add", "deepen")}
    begin = f"{counted(len(grown), 'layer')} looped." if grown else "No layer was looped."
    if not rows:
        first = policy.first_decision
        ahead = "comes" if last_step < first else "was due"
        return f"{begin} The first decision {ahead} after {counted(first, 'update')}."
    last = rows[-1]
    if last["action"] in ("fix", "wait", "postponed"):
        return f"{begin} At step {last['step']:,}: {last['rule']}."
    return begin
