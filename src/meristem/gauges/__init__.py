"""Measurements that look inside a model."""

from meristem.gauges.distance import attention_distance, layer_distances, mean_distances
from meristem.gauges.entropy import EntropyGauge, fused_entropies, read_heads, row_entropies

__all__ = [
    "EntropyGauge",
    "attention_distance",
    "fused_entropies",
    "layer_distances",
    "mean_distances",
    "read_heads",
    "row_entropies",
]
