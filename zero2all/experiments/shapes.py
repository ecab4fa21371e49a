"""Shapes of models by size: one dial, width, that also sets depth, heads and the width inside the blocks.

layers = width / 64, heads of 64 (32 in narrow models), as many key/value heads, the SwiGLU 8/3 of the width. A family
of one proportion follows one law: a size with heads of another width lay 1.5 to 3 % above it. Studies and speedruns
choose a size; the shape follows.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from zero2all.model.config import ModelConfig, parameter_counts

WIDTHS = (64, 96, 128, 160, *range(192, 1536, 64), *range(1536, 8193, 128))
NARROW = 192
"""Models narrower than this have heads of 32."""
FIELDS = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads")


def with_width(model: ModelConfig, width: int) -> ModelConfig:
    """The model with another width, and what follows from it."""
    heads = width // (32 if width < NARROW else 64)
    return replace(
        model,
        hidden_size=width,
        intermediate_size=max(64, round(8 / 3 * width / 64) * 64),
        layers=max(2, round(width / 64)),
        heads=heads,
        kv_heads=heads,
        head_dim=None,
    )


def shapes(model: ModelConfig) -> Iterator[ModelConfig]:
    """All shapes, from small to large, with the vocabulary and the other settings of `model`."""
    return (with_width(model, width) for width in WIDTHS)


def shape_of(model: ModelConfig, parameters: float) -> ModelConfig:
    """The shape whose parameters, all of them, are nearest to a number."""
    return min(shapes(model), key=lambda each: abs(math.log(parameter_counts(each)["total"] / parameters)))
