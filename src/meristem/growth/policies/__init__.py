"""The policies: each decides what is born or leaves, from its own state and what was measured."""

from __future__ import annotations

from typing import Any

from meristem.growth.policies.block_loop import BlockLoop
from meristem.growth.policies.depth import Depth
from meristem.growth.policies.incrt import Incrt
from meristem.growth.policies.observe import Observe
from meristem.growth.policies.prune import Prune
from meristem.growth.policies.published import Published
from meristem.growth.policies.random_births import RandomBirths
from meristem.growth.policies.sgt import Sgt
from meristem.growth.policies.stack import Stack
from meristem.growth.policies.static_loops import StaticLoops

# By the names that configurations know them by. Any: their settings are their own.
POLICIES: dict[str, Any] = {
    policy.name: policy
    for policy in (Stack, Depth, Incrt, Prune, Published, RandomBirths, Sgt, StaticLoops, BlockLoop, Observe)
}
