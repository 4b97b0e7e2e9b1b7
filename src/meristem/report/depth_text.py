"""How a run whose depth is chosen came to its blocks, in words."""

from __future__ import annotations

from typing import Any

from meristem.config import Config
from meristem.growth.events import Event, GrowthEvent
from meristem.growth.policies.depth import LAST
from meristem.plan import Plan
from meristem.runs.entries import LARGE
from meristem.runs.first_depth import describe_first_depth
from meristem.runs.layer_numbers import LayerNumbers
from meristem.wording import counted


def depth_text(config: Config, start: Plan, numbers: LayerNumbers) -> str:
    """With how many blocks a run begins and why, how many there may be, and what was decided since."""
    first = describe_first_depth(config, start)
    decides = config.model.start_from is None and start.target
    return f"{first} {_decided(numbers)}" if decides else first


def _decided(numbers: LayerNumbers) -> str:
    decisions = [(event, outlook) for event in numbers.events if (outlook := promise_and_price(event))]
    if not decisions:
        return "Nothing was decided: the loss was not known for long enough."
    grown = sum(isinstance(event, GrowthEvent) for event, _ in decisions)
    added = f"{grown} added blocks, of which there are {numbers.layers} now" if grown else "none added blocks"
    last, (promise, price) = decisions[-1]
    pays = promise > price and not isinstance(last, GrowthEvent)
    late = f", but nothing is copied in the last {LAST:.0%} of the FLOPs" if pays else ""
    return (
        f"Of {counted(len(decisions), 'decision')} {added}. At the last one, at step {last.step:,}, twice the blocks "
        f"promised {promise:.2g} nats and cost {price:.2g}{late}."
    )


def promise_and_price(event: Event) -> tuple[float, float] | None:
    """What more blocks promised and cost where the policy decided on them, in nats; None where it did not."""
    values: tuple[Any, Any] = event.facts.get("promise"), event.facts.get("price")
    is_known = all(type(value) in (int, float) and abs(value) < LARGE for value in values)
    return values if event.policy == "depth" and is_known else None
