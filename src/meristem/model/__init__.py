"""The language model, built from a plan."""

from meristem.model.cache import KVCache
from meristem.model.decoder import Decoder, DecoderOutput
from meristem.model.generate import Sampling, generate, stream
from meristem.model.loss import linear_cross_entropy

__all__ = ["Decoder", "DecoderOutput", "KVCache", "Sampling", "generate", "linear_cross_entropy", "stream"]
