"""The loss that parameters N and tokens D give, and the best N and D for a number of FLOPs (Hoffmann et al. 2022).

L = E + A/N^alpha + B/D^beta; with C = 6 N D the best N is G (C/6)^(beta/(alpha+beta)), where G = (alpha A / (beta B))
^(1/(alpha+beta)).
The constants of the refit (Besiroglu et al. 2024) are the ones to use; the rounded ones of the paper contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingLaw:
    """One set of constants."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """In nats per token, of the paper's text and tokenizer."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def best_parameters(self, flops: float) -> float:
        """That give the least loss for 6 N D FLOPs."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return float(scale * (flops / 6) ** (self.beta / (self.alpha + self.beta)))

    def flops_for(self, parameters: float) -> float:
        """The FLOPs for which so many parameters are best."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return float(6 * (parameters / scale) ** ((self.alpha + self.beta) / self.beta))


LAWS = {
    "refit": ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    "paper": ScalingLaw(1.6934, 406.4, 410.7, 0.3392, 0.2849),
    "paper-rounded": ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28),
}
TOKENS_PER_PARAMETER = 20.0
"""The rule of thumb."""


def rule_of_thumb(flops: float) -> float:
    """Parameters for D = 20 N."""
    return float((flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5)
