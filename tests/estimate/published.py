"""FLOPs, memory and times as papers and other programs count them, to reproduce their tables. Ours stand in
`zero2all.estimate`.

Notation: B sequences of s tokens, L layers of width h, a heads, V ids, t tensor ranks, b sequences of a micro-batch.

Narayanan et al. 2021   hardware FLOPs with full recomputation
Korthikanti et al. 2022 model FLOPs; hardware FLOPs with selective recomputation, where attention adds s/(3h): that is
                        three times one attention forward pass (4 B L s^2 h), which `literal` counts once, 2s/(9h).
"""

from __future__ import annotations

from zero2all.estimate.run_calculators import bus_seconds


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
