"""The growth section of a configuration: which policies there are, in their order, and the settings of each.

A policy's table, `[growth.NAME]`, has the fields of its dataclass. Policies of somebody's own are named as
`module:Class`; their modules are imported only where a run is trained, and until then their tables are kept as they
are: of what types their settings are is known only then.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from meristem.errors import InputError
from meristem.growth import Policy
from meristem.growth.policies import POLICIES
from meristem.growth.policy import ENDLESS
from meristem.settings import from_text, is_list, of_type
from meristem.wording import meant

LENGTH = "total_steps"  # the field of a policy that is told how long the run is
# Policies that answer the same question: how deep the model is, what is run again, and when heads are born. A run has
# one of each at most.
DEPTHS = ("stack", "depth")
LOOPS = ("sgt", "static_loops", "block_loop")
HEADS = ("incrt", "published", "random_births")


@dataclass(frozen=True)
class GrowthConfig:
    """What changes the structure during training: policies in their order, and tables with the settings of each."""

    policies: tuple[str, ...] = ()  # none: the structure stays as it is
    steps: int | None = None  # updates that policies take for the whole run; if None train.steps, or those of the trunk
    # By policy: of those that there are, all settings; of others, which the run has no use for, those that were given.
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, name in enumerate(self.policies):
            if name not in POLICIES and not is_foreign(name):
                expected = "unknown policy (a class of your own is named as module:Class)"
                raise InputError("growth.policies", name, f"{expected}; {meant(name, POLICIES)}")
            if table_name(name) in map(table_name, self.policies[:number]):
                raise InputError("growth.policies", name, f"must be named once: there is one table [{table_key(name)}]")
            if is_foreign(name) and table_name(name) in POLICIES:
                expected = f"must be a class with another name: [{table_key(name)}] is the table of Meristem's own"
                raise InputError("growth.policies", name, expected)
        for family in (DEPTHS, LOOPS, HEADS):
            alternatives = [name for name in self.policies if name in family]
            if len(alternatives) > 1:
                expected = f"cannot stand beside {alternatives[0]}, which answers the same question: name one of them"
                raise InputError("growth.policies", alternatives[1], expected)
        self._check_loops_from_the_start()
        whole = {table_name(name): _given(self.settings(name)) for name in self.policies}
        object.__setattr__(self, "tables", {**self.tables, **_given(whole)})

    def _check_loops_from_the_start(self) -> None:
        """Refuse loops that would not follow copies of blocks, or whose heads would not be there at the start."""
        static = [name for name in self.policies if name in POLICIES and POLICIES[name].static]
        for name in (name for name in DEPTHS if static and self.has(name)):
            expected = f"cannot stand beside {name}: loops from the start on would not follow copies of blocks"
            raise InputError("growth.policies", static[0], expected)
        if self.has("depth") and self.has("sgt"):
            expected = "cannot stand beside depth: its loops wait for the last copy of a block, which may never come"
            raise InputError("growth.policies", "sgt", expected)
        behind = self.policies[self.policies.index("static_loops") :] if self.has("static_loops") else ()
        for name in (name for name in behind if name in HEADS):
            if start := self.settings(name)["start_heads"]:
                key = f"{table_key(name)}.start_heads"
                expected = f"must stand behind {name}: {key} = {start} takes away the heads that it would loop"
                raise InputError("growth.policies", "static_loops", expected)

    def has(self, *names: str) -> bool:
        """Whether one of these policies is among them."""
        return any(name in self.policies for name in names)

    def settings(self, name: str) -> dict[str, Any]:
        """All settings of a policy that comes with Meristem; of another one, those that were given."""
        given = dict(self.tables.get(table_name(name), {}))
        if name not in POLICIES:
            return given
        entries = [entry for entry in dataclasses.fields(POLICIES[name]) if entry.name != LENGTH]
        values = {entry.name: given.get(entry.name, entry.default) for entry in entries}
        return {key: value for key, value in values.items() if value is not dataclasses.MISSING}

    def check(self, steps: int) -> None:
        """Refuse values that a run of so many updates cannot have; of policies that are not named, that no run can."""
        for name in (name for name in dict.fromkeys((*self.policies, *self.tables)) if name in POLICIES):
            try:
                self.policy(name, steps)
            except InputError:
                if self.has(name) or not self._is_possible(name):
                    raise
        if self.has("stack") and self.has("sgt"):
            self._check_loops_after_stack(steps)

    def _check_loops_after_stack(self, steps: int) -> None:
        """Refuse a stack after which loops, which wait for it, could not settle."""
        stack, sgt = self.policy("stack", steps), self.policy("sgt", steps)
        needed = sgt.probed_steps + sgt.window_steps
        if stack.times[-1] + needed > steps:
            expected = (
                f"leaves sgt no time to grow: it waits for the last copy and then needs {needed} of {steps} updates"
            )
            raise InputError("growth.stack.at", stack.at[-1], expected)

    def _is_possible(self, name: str) -> bool:
        """Whether the table of a policy is right for some run, if a long one."""
        try:
            self.policy(name, ENDLESS)
        except InputError:
            return False
        return True

    def policy(self, name: str, steps: int) -> Any:
        """A policy that comes with Meristem, as its table has it, for a run of so many updates."""
        return _made(name, POLICIES[name], self.settings(name), steps)

    def build(self, steps: int) -> list[Policy]:
        """All policies in their order, for a run of so many updates; imports those that are somebody's own."""
        return [
            _made(name, POLICIES.get(name) or _imported(name), self.settings(name), steps) for name in self.policies
        ]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not left out."""
    return {key: value for key, value in values.items() if value not in (None, {})}


def is_foreign(name: str) -> bool:
    """Whether a policy is named as somebody's own."""
    module, colon, own = name.partition(":")
    return bool(colon) and own.isidentifier() and all(part.isidentifier() for part in module.split("."))


def table_name(name: str) -> str:
    """The name of a policy's table: of a class of one's own, the class in small letters."""
    return name.rpartition(":")[2].lower() if is_foreign(name) else name


def table_key(name: str) -> str:
    """The title of a policy's table."""
    return f"growth.{table_name(name)}"


def policy_keys() -> dict[str, Any]:
    """Every key of a policy's table, as `growth.NAME.KEY`, with its type."""
    return {
        f"growth.{name}.{key}": kind
        for name, policy in POLICIES.items()
        for key, kind in get_type_hints(policy).items()
        if key in {entry.name for entry in dataclasses.fields(policy)} - {LENGTH}
    }


def _made(name: str, policy: Any, settings: Mapping[str, Any], steps: int) -> Any:
    known = {entry.name: entry for entry in dataclasses.fields(policy)}
    length = {LENGTH: steps} if LENGTH in known else {}
    for key in (key for key in known if key not in {*settings, *length}):
        if known[key].default is known[key].default_factory is dataclasses.MISSING:
            raise InputError(f"{table_key(name)}.{key}", None, "must be given")
    own = [key for key in known if key != LENGTH]
    for key in (key for key in settings if key not in own):  # of a class of one's own: others are known when read
        instead = meant(key, own, f"{table_key(name)}.{{}}") if own else "it has no settings"
        raise InputError(f"{table_key(name)}.{key}", settings[key], f"unknown key; {instead}")
    hints = _hints(policy)
    typed = {key: _typed(f"{table_key(name)}.{key}", value, hints.get(key)) for key, value in settings.items()}
    try:
        made = policy(**typed, **length)
        made.check_length()
    except TypeError as error:  # a value of which a class of one's own can make nothing
        raise InputError(table_key(name), dict(settings), f"does not fit: {error}") from None
    except InputError as error:
        raise InputError(f"{table_key(name)}.{error.field}", error.value, error.expected) from None
    return made


def _hints(policy: Any) -> dict[str, Any]:
    """The types of a policy's fields; none of a class of one's own whose types are not there when it runs."""
    try:
        return get_type_hints(policy)
    except NameError:
        return {}


def _typed(key: str, value: Any, kind: Any) -> Any:
    """A setting as its type says; what is to be a list may still be as the command line had it."""
    if is_list(kind) and not isinstance(value, (list, tuple)):
        value = from_text(str(value), kind)
    return of_type(key, value, kind)


def _imported(name: str) -> Any:
    """A class of one's own, by `module:Class`; modules of the present folder are found too."""
    module, _, own = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = getattr(importlib.import_module(module), own)
    except Exception as error:  # whatever somebody's own module does
        expected = f"cannot be imported ({error}); its module must be in the present folder or installed"
        raise InputError("growth.policies", name, expected) from None
    finally:
        sys.path.remove(here)
    derived = isinstance(found, type) and issubclass(found, Policy)
    if not derived or not dataclasses.is_dataclass(found):
        raise InputError("growth.policies", name, "must be a dataclass that derives from meristem.growth.Policy")
    return found
