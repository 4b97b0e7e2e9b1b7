"""Growth: policies decide, edits change, the grower ties them to a model."""

from meristem.growth.edits import AddBlock, AddHead, LoopHeads, RemoveBlock, RemoveHead, RepeatBlock
from meristem.growth.grower import Grower, Growth, prepared
from meristem.growth.head_surgery import newborn_head
from meristem.growth.policies.block_loop import BlockLoop
from meristem.growth.policies.depth import Depth, best_depth
from meristem.growth.policies.incrt import Incrt
from meristem.growth.policies.observe import Observe
from meristem.growth.policies.prune import Prune
from meristem.growth.policies.published import Published
from meristem.growth.policies.random_births import RandomBirths
from meristem.growth.policies.sgt import Sgt, SgtState
from meristem.growth.policies.stack import Stack
from meristem.growth.policies.static_loops import StaticLoops
from meristem.growth.policy import Change, Decision, Policy
from meristem.moves import Moves

__all__ = [
    "AddBlock",
    "AddHead",
    "BlockLoop",
    "Change",
    "Decision",
    "Depth",
    "Grower",
    "Growth",
    "Incrt",
    "LoopHeads",
    "Moves",
    "Observe",
    "Policy",
    "Prune",
    "Published",
    "RandomBirths",
    "RemoveBlock",
    "RemoveHead",
    "RepeatBlock",
    "Sgt",
    "SgtState",
    "Stack",
    "StaticLoops",
    "best_depth",
    "newborn_head",
    "prepared",
]
