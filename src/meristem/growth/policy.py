"""What a policy is: it says what it needs measured, and decides from that, its state and the plan.

A policy is a frozen value: its settings. Where it stands is its state, which it never changes but gives anew. It knows
nothing of models, files and processes, and of no other policy: what others have done it sees in the plan, and is told
as moves of layers and heads.

A policy of one's own is a frozen dataclass that derives from `Policy`:

    @dataclass(frozen=True)
    class HeadEvery(Policy):
        every: int = 100

        def needs(self, state, step, plan):
            return () if step % self.every == 0 else None

        def decide(self, state, step, plan, readings):
            head = newborn_head(plan.layers[0], plan.width, None, seed=step)
            return Decision(state, (Change("birth", "it is time", (AddHead(0, head),), layer=0),))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self, get_type_hints

from meristem.gauges.gauge import Gauge
from meristem.growth.edits import Edit
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.settings import of_type

Readings = Mapping[Gauge, Any]
ENDLESS = 10**12  # updates of a run whose end is not known


@dataclass(frozen=True)
class Change:
    """A decision about the structure, which becomes an event: what is done, why, and what that was decided from.

    Without edits it is a decision to leave something as it is. `facts` are plain values for the event.

    >>> Change("remove", "it is time", (RemoveHead(0, 3),), layer=0).edits[0].apply(plan).heads
    (3, 4)
    """

    action: str
    rule: str
    edits: tuple[Edit, ...] = ()
    layer: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The next state, the changes in their order, and what there is besides.

    Every edit is of the structure that those before it, in this decision, have left.

    `measured` are plain values to be recorded although nothing changes, `observed` those of a regular record. `quiet`
    edits change no structure and are no event. Where `needs` are named nothing is done yet: these are measured, and the
    policy decides again from more.

    >>> decision = Decision(state=None, changes=(Change("remove", "it is time", (RemoveHead(0, 3),), layer=0),))
    >>> [change.action for change in decision.changes]
    ['remove']
    """

    state: Any
    changes: tuple[Change, ...] = ()
    measured: Mapping[str, Any] | None = None
    observed: Mapping[str, Any] | None = None
    quiet: tuple[Edit, ...] = ()
    needs: tuple[Gauge, ...] = ()


@dataclass(frozen=True)
class Ahead:
    """What is ahead of a run that ends with its FLOPs: after `done` updates so many are `spent`, of a `budget`.

    An update takes `each` of them as long as the model stays as it is. All is reckoned in whole numbers, so that it is
    the same from any update on.

    >>> Ahead(done=100, spent=500, each=10, budget=1000).step_of(0.75)
    125
    """

    done: int
    spent: int
    each: int
    budget: float

    @property
    def end(self) -> int:
        """The updates of the whole run: the last one is the last that there are FLOPs for."""
        return self.done + max(0, (int(self.budget) - self.spent) // self.each)

    def step_of(self, part: float) -> int:
        """The updates that are done when this part is spent; one that is past counts as now."""
        missing = math.ceil(part * self.budget) - self.spent
        return self.done + max(0, -(-missing // self.each))


class Policy:
    """The one interface of all policies. Only `needs` and `decide` have to be written.

    `step` is the number of updates done. A state is any value that `dump` can turn into JSON values and tensors.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Shrink(Policy):
    ...     def needs(self, state, step, plan):
    ...         return () if step == 1 else None
    ...     def decide(self, state, step, plan, readings):
    ...         return Decision(state, (Change("remove", "it is time", (RemoveHead(0, 3),), layer=0),))
    >>> growth = Grower(model, optimizer, [Shrink()]).step(tokens)
    >>> model.plan.heads
    (3, 4)
    """

    static: ClassVar[bool] = False  # whether all it does is there from the start
    exchanges: ClassVar[bool] = True  # whether its edits put new parameters in the place of old ones
    name: ClassVar[str] = ""  # in events and states; that of the class, in small letters, if not given

    @property
    def title(self) -> str:
        return self.name or type(self).__name__.lower()

    @property
    def settings(self) -> dict[str, Any]:
        """What a state is bound to: it is not gone on from by a policy with other settings."""
        return asdict(self)  # type: ignore[call-overload]

    @property
    def warnings(self) -> list[str]:
        """Settings that cannot have their effect, each in a sentence that begins with its name."""
        return []

    def check_length(self) -> None:
        """Refuse settings that have no effect in a run of this length; a configuration that is read is checked so."""

    def lasting(self, ahead: Ahead) -> Self:
        """The policy in a run whose length has changed: times that are parts of the run move, if they are still ahead.

        It asks for the same gauges as before.
        """
        return self

    def prepare(self, plan: Plan) -> Plan:
        """The plan with what the policy must find in it before training; the model is built from this one."""
        return plan

    def check(self, plan: Plan) -> None:
        """Refuse, by name, a plan that the policy cannot work with."""

    def begin(self, plan: Plan) -> Any:
        """The state at the start, for a model of this plan."""
        return None

    def held_back(self, rows: int) -> int:
        """How many of so many training rows, to which the run comes back, it is to do without for measurements."""
        return 0

    @property
    def remembers(self) -> tuple[Gauge, ...]:
        """The gauges with a memory that the policy feeds; one that two policies feed takes in the batches of both."""
        return ()

    def feeding(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...]:
        """The gauges of `remembers` that take in the batch of this step."""
        return ()

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        """The readings that a decision at this step wants; None if there is nothing to decide."""
        raise NotImplementedError

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        """What to do, as a pure function."""
        raise NotImplementedError

    def moved(self, state: Any, step: int, plan: Plan, moves: Moves) -> Any:
        """The state after layers or heads have moved, whoever has moved them; `plan` is the new one."""
        return state

    def dump(self, state: Any) -> Any:
        """The state as JSON values, with tensors among them; of a dataclass, its fields by their names."""
        return asdict(state) if hasattr(state, "__dataclass_fields__") else state

    def load(self, data: Any) -> Any:
        """The inverse of `dump`, which a state that is not plain JSON itself needs; tuples come back as lists."""
        return data

    def fits(self, state: Any, plan: Plan) -> bool:
        """Whether a state, which may come from a damaged file, can be one of a model of this plan."""
        return True


def check_types(policy: Policy) -> None:
    """Refuse settings that are not of the types of their fields; lists become tuples."""
    hints = get_type_hints(type(policy))
    for name in (entry.name for entry in fields(policy)):  # type: ignore[arg-type]
        value = getattr(policy, name)
        of_type(name, value, hints[name])
        if isinstance(value, list):
            object.__setattr__(policy, name, tuple(value))
