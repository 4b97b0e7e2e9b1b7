"""Growth: policies decide, edits change, the grower ties them to a model."""

from meristem.growth.block_loop import BlockLoop
from meristem.growth.edits import AddHead, LoopHeads, RemoveHead, RepeatBlock
from meristem.growth.grower import Grower
from meristem.growth.incrt import Incrt
from meristem.growth.outcome import Growth
from meristem.growth.pruning import Pruning
from meristem.growth.published import Published, RandomBirths
from meristem.growth.sgt import Sgt, SgtState

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
