"""Hugging Face: growth inside a `transformers.Trainer`. Needs the extra `hf`."""

from meristem.hub.growth import GrowthCallback

__all__ = ["GrowthCallback"]
