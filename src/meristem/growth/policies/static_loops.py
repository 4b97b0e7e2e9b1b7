"""Loops that are there from the first step to the last: the control for loops that grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meristem.errors import InputError
from meristem.growth.looping import check_layers, check_rule, check_source, chosen_heads, looped, refuse_idle
from meristem.growth.policy import Policy, check_types
from meristem.limits import MOST_SEED, check_integer
from meristem.plan import Loop, Plan


@dataclass(frozen=True)
class StaticLoops(Policy):
    """Some heads of the named layers are looped, or those that another run has grown, or would have by its entropies.

    Which layers a run that was observed points to is decided by the rule that SGT grows by.

    >>> StaticLoops(layers=(1,), passes=2, heads="all").prepare(plan).loops
    {1: Loop(heads=(0, 1, 2, 3), passes=2, fading=())}
    """

    name: ClassVar[str] = "static_loops"
    static: ClassVar[bool] = True
    exchanges: ClassVar[bool] = False

    layers: tuple[int, ...] = ()
    like: str | None = None  # a run, or a plan file, whose loops are taken over
    passes: int = 1
    heads: Literal["high", "low", "random", "all"] = "high"
    heads_per_layer: int = 2
    max_layers: int = 3  # of a run that was observed: layers at most
    shortlist: int = 3  # layers of highest entropy among which they are chosen
    excluded: tuple[int, ...] = (0,)
    order: Literal["deep_first", "shallow_first"] = "deep_first"
    train_gates: bool = True
    seed: int = 0  # of random heads

    def __post_init__(self) -> None:
        check_types(self)
        check_rule(self)
        check_integer("seed", self.seed, 0, MOST_SEED)
        check_source(self.layers, self.like)
        if self.layers and self.heads in ("high", "low"):
            expected = "needs entropies, which a run has not got yet; use random or all, or name a run in `like`"
            raise InputError("heads", self.heads, expected)
        if self.layers:
            refuse_idle(self, ("max_layers", "shortlist", "excluded", "order"))

    def prepare(self, plan: Plan) -> Plan:
        """The plan with the loops of the named layers; those of another run have to be looked up before."""
        if self.like is not None:
            raise InputError("like", self.like, "names a run: train with the command line or meristem.train")
        check_layers(self.layers, plan)
        loops = {}
        for layer in self.layers:
            entropies = [0.0] * plan.layers[layer].heads
            chosen = chosen_heads(self.heads, self.heads_per_layer, entropies, layer, self.seed)
            loops[layer] = Loop(chosen, self.passes)
        return looped(plan, loops, trained=self.train_gates)

    def needs(self, state: Any, step: int, plan: Plan) -> None:
        return None  # all of it is there from the start
