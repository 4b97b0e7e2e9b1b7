"""Growth: policies decide, edits change, the grower ties them to a model."""

from meristem.growth.edits import AddHead, LoopHeads, RemoveHead, RepeatBlock
from meristem.growth.grower import Grower
from meristem.growth.outcome import Growth
from meristem.growth.policies.block_loop import BlockLoop
from meristem.growth.policies.incrt import Incrt
from meristem.growth.policies.pruning import Pruning
from meristem.growth.policies.published import Published, RandomBirths
from meristem.growth.policies.sgt import Sgt, SgtState

__all__ = [
    "AddHead",
    "BlockLoop",
    "Grower",
    "Growth",
    "Incrt",
    "LoopHeads",
    "Pruning",
    "Published",
    "RandomBirths",
    "RemoveHead",
    "RepeatBlock",
    "Sgt",
    "SgtState",
]
