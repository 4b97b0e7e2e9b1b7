"""Measurements that look inside a model."""

from meristem.gauges.distance import attention_distance, layer_distances, mean_distances

__all__ = ["attention_distance", "layer_distances", "mean_distances"]
