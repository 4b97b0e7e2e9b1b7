"""Continuing texts with a language model, token by token."""

from meristem.decoding.generate import generate, stream
from meristem.decoding.recording import release
from meristem.decoding.sampling import Sampling

__all__ = ["Sampling", "generate", "release", "stream"]
