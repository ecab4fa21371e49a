"""Shapes of models by size: one dial, width, that also sets depth, heads and the width inside the blocks.

layers = width / 64, heads of 64 (32 in narrow models), three query heads for a key/value head where that divides, the
SwiGLU 8/3 of the width: the proportions of the presets. Studies and speedruns choose a size; the shape follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from zero2all.model.config import ModelConfig, parameter_counts

WIDTHS = (*range(64, 512, 32), *range(512, 1536, 64), *range(1536, 8193, 128))
NARROW = 256
"""Models narrower than this have heads of 32."""
FIELDS = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads")


def with_width(model: ModelConfig, width: int) -> ModelConfig:
    """The model with another width, and what follows from it."""
    heads = width // (32 if width < NARROW else 64)
    kv_heads = next(count for count in (heads / 3, heads / 2, heads) if count == int(count))
    return replace(
        model,
        hidden_size=width,
        intermediate_size=max(64, round(8 / 3 * width / 64) * 64),
        layers=max(2, round(width / 64)),
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=None,
    )


def shapes(model: ModelConfig) -> Iterator[ModelConfig]:
    """All shapes, from small to large, with the vocabulary and the other settings of `model`."""
    return (with_width(model, width) for width in WIDTHS)


def shape_of(model: ModelConfig, parameters: float) -> ModelConfig:
    """The shape whose parameters, all of them, are nearest to a number."""
    return min(shapes(model), key=lambda each: abs(math.log(parameter_counts(each)["total"] / parameters)))
