"""What a model looks like, as a value, and what it costs, in closed form."""

from meristem.plan.costs import LOSS_CHUNK
from meristem.plan.layers import Gates, LayerPlan, Loop, Rotary
from meristem.plan.plan import NORM_EPS, PADDING, Plan, Shape, default_feed_forward

__all__ = [
    "LOSS_CHUNK",
    "NORM_EPS",
    "PADDING",
    "Gates",
    "LayerPlan",
    "Loop",
    "Plan",
    "Rotary",
    "Shape",
    "default_feed_forward",
]
