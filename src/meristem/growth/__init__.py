"""Growth: policies decide, edits change, the grower ties them to a model."""

from meristem.growth.block_loop import BlockLoop
from meristem.growth.edits import LoopHeads, RepeatBlock
from meristem.growth.grower import Grower, Growth
from meristem.growth.sgt import Sgt, SgtState

__all__ = ["BlockLoop", "Grower", "Growth", "LoopHeads", "RepeatBlock", "Sgt", "SgtState"]
