"""Models from elsewhere: a checkpoint of the Llama family becomes a run."""

from meristem.pretrained.import_model import import_model

__all__ = ["import_model"]
