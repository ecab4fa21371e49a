"""How much a rank sends under each way of spreading a model, and how long a collective takes.

Volumes are elements that one rank sends, by the textbook; what our own trainer sends is in `zero2all.limits.
communication`. Times: a ring sends 2 (n - 1)/n of an all-reduce and (n - 1)/n of the others over its links ("bus
bandwidth", as in nccl-tests); a latency a per hop. A double tree has fewer hops, and sends all of it twice.
"""

from __future__ import annotations

import math

RING_SHARE = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


def ring_factor(kind: str, ranks: int) -> float:
    """What a rank sends of a collective, as a share of the whole tensor."""
    return RING_SHARE[kind] * (ranks - 1) / ranks


def data_volume(parameters: float, ranks: int, zero: int, reshard: bool = True) -> float:
    """Of a step (zero 0, 1), or of each micro-step for what zero 2 and 3 send there."""
    passes = 3 if zero == 3 and reshard else 2
    return passes * (ranks - 1) / ranks * parameters


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
