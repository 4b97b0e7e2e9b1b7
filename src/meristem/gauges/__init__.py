"""Measurements that look inside a model: gauges, which policies ask for, and functions for a single look."""

from meristem.gauges.demand import Demand
from meristem.gauges.distance import attention_distance, layer_distances, mean_distances
from meristem.gauges.energy import Energy
from meristem.gauges.entropy import EntropyGauge, fused_entropies, read_heads, row_entropies
from meristem.gauges.gauge import Gauge, Instrument
from meristem.gauges.redundancy import HeadShares, HeadTrial
from meristem.gauges.training_progress import StepTime, TrainingLoss, UpdateLoss

__all__ = [
    "Demand",
    "Energy",
    "EntropyGauge",
    "Gauge",
    "HeadShares",
    "HeadTrial",
    "Instrument",
    "StepTime",
    "TrainingLoss",
    "UpdateLoss",
    "attention_distance",
    "fused_entropies",
    "layer_distances",
    "mean_distances",
    "read_heads",
    "row_entropies",
]
