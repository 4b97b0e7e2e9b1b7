"""Pruning a trained model: heads leave that others can stand in for, as far as a budget or the loss allows."""

from meristem.pruning.result import PruneResult
from meristem.pruning.run import prune_run
from meristem.pruning.settings import PruneSettings

__all__ = ["PruneResult", "PruneSettings", "prune_run"]
