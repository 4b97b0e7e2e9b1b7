"""Hugging Face: models called as its own are, and growth inside a `transformers.Trainer`. Needs the extra `hf`."""

from meristem.integrations.hf_model import HfModel
from meristem.integrations.trainer_callback import GrowthCallback

__all__ = ["GrowthCallback", "HfModel"]
