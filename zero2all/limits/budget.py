"""Tokens, batches, and the time and money that a run takes; what generating costs.

T = FLOPs per token x D / (n X), X the *model* FLOP/s that one device achieves. Cost = n T price / goodput.
"""

from __future__ import annotations

INFERENCE_BYTES = {"float32 and bfloat16 copy": 6, "float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}
"""Per parameter."""


def training_seconds(flops: float, devices: float, flops_per_second: float) -> float:
    """How long `devices` need, each at its achieved rate."""
    return flops / (devices * flops_per_second)


def cost(device_seconds: float, price_per_hour: float, goodput: float = 1.0) -> float:
    """Of so much productive time of one device."""
    return device_seconds / 3600 * price_per_hour / goodput


def data_ranks(gpus: int, tensor: int = 1, pipeline: int = 1, context: int = 1) -> float:
    """Replicas of the model."""
    return gpus / (tensor * pipeline * context)


def tokens_of_text(rows: float, mean_length: float, tokens_per_character: float, epochs: float = 1) -> float:
    """Before anything is tokenised; `mean_length` in characters."""
    return epochs * rows * mean_length * tokens_per_character


def cache_bytes(values_per_token: float, tokens: float, sequences: float, value_bytes: float = 2) -> float:
    """Of the keys and values of all layers."""
    return values_per_token * tokens * sequences * value_bytes
