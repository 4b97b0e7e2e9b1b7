"""What a model looks like, as a value, and what it costs, in closed form."""

from meristem.plan.costs import LOSS_CHUNK
from meristem.plan.layers import Gates, LayerPlan, Loop
from meristem.plan.plan import PADDING, Plan, Shape, default_feed_forward

__all__ = ["LOSS_CHUNK", "PADDING", "Gates", "LayerPlan", "Loop", "Plan", "Shape", "default_feed_forward"]
