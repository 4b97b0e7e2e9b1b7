"""Comparing runs honestly: paired seeds, differences with intervals."""

from meristem.comparison.paired import PairedDifference, paired_difference

__all__ = ["PairedDifference", "paired_difference"]
