"""Hugging Face: growth inside a `transformers.Trainer`. Needs the extra `hf`."""

from meristem.integrations.trainer_callback import GrowthCallback

__all__ = ["GrowthCallback"]
