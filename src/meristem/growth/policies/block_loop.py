"""The baseline that SGT is measured against: whole blocks run more than once, from the first step to the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meristem.errors import InputError
from meristem.growth.edits import RepeatBlock
from meristem.growth.looping import check_depth, check_layers, check_rule, check_source, refuse_idle
from meristem.growth.policy import Policy, check_types
from meristem.plan import Plan


@dataclass(frozen=True)
class BlockLoop(Policy):
    """The chosen blocks are executed `times` more times, attention and feed-forward, with the same weights.

    They are named, or those in which another run has grown, or would have by its entropies and SGT's rule.

    >>> BlockLoop(layers=(1,)).prepare(plan).layers[1].repeats
    1
    """

    name: ClassVar[str] = "block_loop"
    static: ClassVar[bool] = True
    exchanges: ClassVar[bool] = False

    layers: tuple[int, ...] = ()
    times: int = 1
    like: str | None = None  # a run, or a plan file, whose layers are taken over
    heads_per_layer: int = 2  # of a run that was observed: heads that a layer must have to be chosen
    max_layers: int = 3  # layers at most
    shortlist: int = 3  # layers of highest entropy among which they are chosen
    excluded: tuple[int, ...] = (0,)
    order: Literal["deep_first", "shallow_first"] = "deep_first"

    def __post_init__(self) -> None:
        check_types(self)
        check_rule(self)
        check_source(self.layers, self.like)
        if self.layers:
            refuse_idle(self, ("heads_per_layer", "max_layers", "shortlist", "excluded", "order"))

    def prepare(self, plan: Plan) -> Plan:
        """The plan with the blocks repeated; those of another run have to be looked up before."""
        if self.like is not None:
            raise InputError("like", self.like, "names a run: train with the command line or meristem.train")
        check_depth(plan)
        check_layers(self.layers, plan)
        for layer in self.layers:
            plan = RepeatBlock(layer, self.times).apply(plan)
        return plan

    def check(self, plan: Plan) -> None:
        """Refuse a plan in which these blocks run once."""
        for layer in self.layers:
            if plan.layer(layer).repeats != self.times:
                raise InputError("model.plan", plan.digest[:12], "build the model from policy.prepare(plan)")

    def needs(self, state: Any, step: int, plan: Plan) -> None:
        return None  # all of it is there from the start
