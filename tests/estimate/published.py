"""FLOPs, memory and times as papers and other programs count them, to reproduce their tables. Ours stand in
`zero2all.estimate`.

Notation: B sequences of s tokens, L layers of width h, a heads, V ids, t tensor ranks, b sequences of a micro-batch.

Narayanan et al. 2021   hardware FLOPs with full recomputation
Korthikanti et al. 2022 model FLOPs; hardware FLOPs with selective recomputation, where attention adds s/(3h): that is
                        three times one attention forward pass (4 B L s^2 h), which `literal` counts once, 2s/(9h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def narayanan_hardware_flops(batch: float, s: float, layers: float, h: float, vocab: float) -> float:
    """Of one iteration with full recomputation (eq. 3): 4/3 on the layers, not on the logits."""
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def korthikanti_model_flops(batch: float, s: float, layers: float, h: float, vocab: float) -> float:
    """Of one iteration."""
    return 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))


def korthikanti_hardware_flops(
    batch: float, s: float, layers: float, h: float, vocab: float, literal: bool = False
) -> float:
    """Of one iteration with selective recomputation."""
    attention = 2 * s / (9 * h) if literal else s / (3 * h)
    return 72 * batch * s * layers * h**2 * (1 + attention + vocab / (12 * layers * h))


def korthikanti_activations(s: float, b: float, h: float, a: float, t: float = 1) -> dict[str, float]:
    """Bytes a layer saves: 16-bit values, GELU, dropout, attention with its scores. SP: sequence parallel."""
    sbh, scores = s * b * h, 5 * a * s / h
    return {
        "none": sbh * (34 + scores),
        "tensor": sbh * (10 + 24 / t + scores / t),
        "tensor and SP": sbh / t * (34 + scores),
        "selective": sbh * (10 + 24 / t),
        "SP and selective": 34 * sbh / t,
        "full": 2 * sbh,
    }


def interleaving_factor(p: float, v: float = 1) -> float:
    """Activations of the first of p pipeline stages with v blocks each, beside those of a whole model's layers."""
    return 1 + (p - 1) / (p * v) if v > 1 else 1.0


def llama_activations(h: float, h_q: float, h_kv: float, f: float, a: float, variant: str = "fused") -> float:
    """Bytes a token saves in a layer with RMSNorm, SwiGLU and flash attention, 16-bit. `fused`; `recomputed`: the
    product of the gate too; `eager`: float32 norms and keys and values repeated to all heads, as in transformers."""
    if variant == "eager":
        return 18 * h + 10 * h_q + 8 * f
    return 8 * h + 4 * h_q + 4 * h_kv + (4 if variant == "recomputed" else 6) * f + 4 * a + 8


def megatron_states(h: float, layers: float, t: float, p: float) -> float:
    """Bytes of weights, float32 gradients and Adam's states (18 a parameter) of a rank."""
    return 18 * 12 * layers * h**2 / (t * p)


def deepspeed_states(parameters: float, ranks: float, largest_layer: float = 0) -> dict[str, float]:
    """Bytes of a rank as DeepSpeed's code counts them."""
    share = 18 * parameters / ranks
    return {"zero 2": 2 * parameters + share, "zero 3": 4 * largest_layer + share}


def implied_utilisation(parameters: float, tokens: float, device_hours: float, peak: float) -> float:
    """6 N D / (hours x peak): the MFU that published GPU-hours imply, with their stops."""
    return 6 * parameters * tokens / (device_hours * 3600 * peak)


def dot_product_intensity(n: float, value_bytes: float = 2) -> float:
    """FLOP per byte of a dot product of n values: n products and n - 1 sums."""
    return (2 * n - 1) / (value_bytes * (2 * n + 1))


def ulysses_volume(tokens: float, hidden: float, ranks: int) -> float:
    """Of a layer forward; `tokens` of the whole group."""
    return 4 * tokens * hidden / ranks


def megatron_sequence_volume(tokens: float, hidden: float) -> float:
    """Of a layer forward, with Megatron's sequence parallelism in place of Ulysses."""
    return 4 * tokens * hidden


def most_tensor_ranks(intermediate: float, flops: float, link_bytes: float) -> float:
    """Tensor ranks below which computing takes longer than communication: f W/C."""
    return intermediate * link_bytes / flops


def tensor_core_peak(clock_hz: float, units: int, fma_per_clock: int) -> float:
    """Peak FLOP/s = clock x SMs x 4 tensor cores x fused multiply-adds per clock of each x 2."""
    return clock_hz * units * 4 * fma_per_clock * 2


def hierarchical_seconds(size: float, nodes: int, per_node: int, inner: float, outer: float) -> tuple[float, float]:
    """All-reduce over nodes: at least the slower of its two parts, at most both one after the other."""
    inside = bus_seconds("all-reduce", size, per_node, inner)
    between = bus_seconds("all-reduce", size / per_node, nodes, outer)
    return max(inside, between), inside + between


def global_batch(gpus: int, micro_batch: int, accumulation: int = 1, cut: int = 1) -> int:
    """Sequences of a step; `cut` GPUs hold one replica."""
    return micro_batch * (gpus // cut) * accumulation


# Volumes are elements that one rank sends, by the textbook; what our own trainer sends is in
# `estimate.communication`. Times: a ring sends 2 (n - 1)/n of an all-reduce and (n - 1)/n of the others over its
# links ("bus bandwidth", as in nccl-tests); a latency per hop. A double tree has fewer hops, and sends all of it twice.

RING_SHARE = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


def ring_factor(kind: str, ranks: int) -> float:
    """What a rank sends of a collective, as a share of the whole tensor."""
    return RING_SHARE[kind] * (ranks - 1) / ranks


def data_volume(parameters: float, ranks: int, zero: int) -> float:
    """Of a step (zero 0, 1), or of each micro-step for what zero 2 and 3 send there."""
    return (3 if zero == 3 else 2) * (ranks - 1) / ranks * parameters


def tensor_volume(tokens: float, hidden: float, ranks: int) -> float:
    """Of a layer, forward and backward: four all-reduces, or four all-gathers and four reduce-scatters."""
    return 8 * tokens * hidden * (ranks - 1) / ranks


def ring_attention_volume(tokens: float, kv_size: float, ranks: int) -> float:
    """Of a layer forward; twice as much backward; `tokens` of the whole group."""
    return 2 * tokens * kv_size * (ranks - 1) / ranks


def expert_volume(tokens: float, hidden: float, experts_per_token: float, ranks: int) -> float:
    """Of a layer forward, there and back; as much backward; `tokens` of the rank."""
    return 2 * tokens * experts_per_token * hidden * (ranks - 1) / ranks


def bus_seconds(kind: str, size: float, ranks: int, bus_bytes: float) -> float:
    """From a measured bus bandwidth."""
    return size * ring_factor(kind, ranks) / bus_bytes


def ring_seconds(kind: str, size: float, ranks: int, link_bytes: float, latency: float = 0.0) -> float:
    """In a ring, with a latency for each of its hops."""
    return RING_SHARE[kind] * (ranks - 1) * latency + bus_seconds(kind, size, ranks, link_bytes)


def tree_seconds(size: float, ranks: int, link_bytes: float, latency: float = 0.0) -> float:
    """All-reduce in a double tree."""
    return 2 * math.log2(ranks) * latency + 2 * size / link_bytes


def least_tokens_for_zero3(flops: float, link_bytes: float) -> float:
    """Tokens per GPU and micro-step above which computing takes longer than gathering (JAX scaling book): C/W."""
    return flops / link_bytes


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
    """Idle time at the start and the end of every step, of p stages, m micro-batches, v blocks per stage. In the times
    of one micro-batch in a stage, forward F, input gradient B, weight gradient W: 1F1B and GPipe (p-1)(F+B+W),
    interleaved 1/v of it; zero bubble (Qi et al. 2023) H1 (p-1)(F+B-W), H2 (p-1)(F+B-2W), V about 0; DualPipe
    (DeepSeek-V3) (p/2-1)(FB+Bfull-3W), where FB is a forward and a backward pass that overlap, F+B+W at most.

    Every schedule; `interleaved` only for v > 1, DualPipe only for an even p; zb-h2, zb-v and DualPipe only for
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


def any_failure(probability: float, devices: float) -> float:
    """1 - (1 - p)^n: at least one of n devices fails."""
    return -math.expm1(devices * math.log1p(-probability)) if probability < 1 else 1.0


def goodput_approximation(interval: float, save: float, restart: float, mtbf: float) -> float:
    """First order; of use where everything is short beside the mean time between failures."""
    return 1 - save / interval - (interval / 2 + restart) / mtbf
