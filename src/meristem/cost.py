"""What a structure costs: parameters, FLOPs, cache and memory, as values that add up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Per token: `full` counts the whole T x T square, `causal` the keys a position may see (averaged).

    In a classifier a position sees all, and both are the same.
    """

    full: int = 0
    causal: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.full + other.full, self.causal + other.causal)

    def __mul__(self, factor: int) -> Flops:
        return Flops(self.full * factor, self.causal * factor)


@dataclass(frozen=True)
class Cost:
    """What a layer, or a whole model, costs.

    FLOPs and bytes are per token; softmax elements, and the FLOPs of a classifier's answer, per sequence.
    """

    parameters: int = 0
    forward: Flops = Flops()
    softmax_elements: int = 0
    kv_bytes_per_token: int = 0
    activation_bytes_per_token: int = 0
    answer: int = 0

    @property
    def training(self) -> Flops:
        """Forward and backward: every product has two gradient products of the same size."""
        return self.forward * 3

    def training_of(self, sequences: int, length: int) -> Flops:
        """Forward and backward of whole sequences, all of the length (the context) that this is the cost of."""
        answers = 3 * self.answer * sequences
        return self.training * (sequences * length) + Flops(answers, answers)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.forward + other.forward,
            self.softmax_elements + other.softmax_elements,
            self.kv_bytes_per_token + other.kv_bytes_per_token,
            self.activation_bytes_per_token + other.activation_bytes_per_token,
            self.answer + other.answer,
        )


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one training process (mixed precision, AdamW, chunked vocabulary loss)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss
