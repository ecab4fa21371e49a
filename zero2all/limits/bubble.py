"""Idle time of a pipeline's stages: a bubble at the start and the end of every step.

p stages, m micro-batches, v blocks per stage. The bubble in the times of one micro-batch in a stage, forward F, input
gradient B, weight gradient W: 1F1B and GPipe (p-1)(F+B+W), interleaved 1/v of it; zero bubble (Qi
et al. 2023) H1 (p-1)(F+B-W), H2 (p-1)(F+B-2W), V about 0; DualPipe (DeepSeek-V3) (p/2-1)(FB+Bfull-3W), where FB is a
forward and a backward pass that overlap, F+B+W at most.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bubble:
    """Of one schedule."""

    idle: float  # time
    ideal: float  # time of m micro-batches without a bubble
    in_flight: float  # micro-batches whose activations the fullest stage keeps

    @property
    def over_ideal(self) -> float:
        """Overhead beside the ideal time."""
        return self.idle / self.ideal

    @property
    def of_total(self) -> float:
        """Share of the whole step."""
        return self.idle / (self.idle + self.ideal)


def bubbles(
    p: int, m: int, v: int = 1, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
) -> dict[str, Bubble]:
    """Every schedule; `interleaved` only for v > 1, DualPipe only for an even p; zb-h2, zb-v and DualPipe only for
    enough micro-batches."""
    F, B, W = forward, input_gradient, weight_gradient
    ideal = m * (F + B + W)
    found = {
        "gpipe": Bubble((p - 1) * (F + B + W), ideal, m),
        "1f1b": Bubble((p - 1) * (F + B + W), ideal, min(p, m)),
        "zb-h1": Bubble(max(0.0, (p - 1) * (F + B - W)), ideal, min(p, m)),
    }
    if m >= 2 * p - 1:  # with fewer, a stage has nothing to do while it waits for its first gradient
        found["zb-h2"] = Bubble(max(0.0, (p - 1) * (F + B - 2 * W)), ideal, 2 * p - 1)
        found["zb-v"] = Bubble(0.0, ideal, p)
    if v > 1:
        found["interleaved"] = Bubble((p - 1) * (F + B + W) / v, ideal, min(p * (1 + (p - 1) / (p * v)), m))
    if p % 2 == 0 and m >= 2 * p:
        found["dualpipe"] = Bubble(max(0.0, (p / 2 - 1) * ((F + B + W) + (B + W) - 3 * W)), ideal, min(p + 1, m))
    return found
