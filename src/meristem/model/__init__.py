"""The models, built from a plan."""

from meristem.model.cache import KVCache
from meristem.model.decoder import Decoder
from meristem.model.encoder import Classifier, build_model
from meristem.model.loss import linear_cross_entropy
from meristem.model.transformer import Output, Regions, Transformer

__all__ = [
    "Classifier",
    "Decoder",
    "KVCache",
    "Output",
    "Regions",
    "Transformer",
    "build_model",
    "linear_cross_entropy",
]
