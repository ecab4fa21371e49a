"""The ablation of the reference project, Gstdioh/llm-zero2all: z2all-1b's shape on one NVIDIA A800 80GB.

All three tables as published: torch 1.12.1 and torch 2.0.1 without compilation, torch 2.0.1 compiled. An iteration is
16 passes over 2 x 2048 tokens, with a float32 residual. MFU in the convention called `seed` in `estimate.flops`,
of 312 TFLOPS. In the table of torch 1.12.1 only the row `apex AdamW` has a fused AdamW: that row is compared with our
all-fused, and its all-fused row with our row with torch's AdamW loop. In this package "seed" is the reference project.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.measure.variants import ANCHOR
from zero2all.model.config import ModelConfig

DEVICE = "A800"
SEED_SHAPE = {
    "vocab_size": 64_320,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "layers": 22,
    "heads": 32,
    "kv_heads": 8,
    "head_size": 64,
    "tied_embeddings": False,
    "attention_bias": "none",
    "mlp_bias": False,
}
"""The fields of the reference project's model that decide the arithmetic of a step."""


@dataclass(frozen=True)
class SeedRow:
    """One published row."""

    seconds: float  # per iteration of 65,536 tokens
    mfu_percent: float
    memory_gb: float
    fused_seconds: float  # of the all-fused row it is compared with


def _rows(fused_seconds: float, published: dict[str, tuple[float, float, float]]) -> dict[str, SeedRow]:
    return {name: SeedRow(*figures, fused_seconds) for name, figures in published.items()}


TORCH_1 = {
    ANCHOR: SeedRow(3.17, 57.47, 27.89, 3.17),  # all fused with apex's AdamW
    **_rows(
        3.23,
        {
            "naive": (9.85, 18.41, 71.32),
            "optimizer-eager": (3.23, 56.06, 27.87),  # its all-fused row
            "without-attention": (8.69, 20.87, 65.43),
            "without-rope": (3.51, 51.70, 27.90),
            "without-cross-entropy": (3.37, 53.70, 29.83),
            "without-rms-norm": (3.78, 47.94, 30.68),
            "without-swiglu": (3.60, 50.39, 29.79),
            "odd-vocabulary-unpadded": (3.72, 48.74, 27.90),  # 64,321 instead of 64,320
        },
    ),
}
TORCH_2 = _rows(
    3.49,
    {
        "naive": (9.72, 18.66, 72.85),
        ANCHOR: (3.49, 51.95, 27.95),
        "attention-flash": (3.85, 47.09, 28.89),  # flash-attn replaced by sdpa
        "without-attention": (8.75, 20.72, 65.47),
        "without-rope": (3.68, 49.18, 27.96),
        "without-cross-entropy": (3.55, 51.02, 29.89),
        "without-rms-norm": (4.00, 45.27, 32.15),
        "without-swiglu": (3.60, 50.38, 29.86),
        "optimizer-eager": (3.52, 51.55, 30.52),
    },
)
COMPILED: dict[str, SeedRow | None] = {
    "compile-without-swiglu": None,  # published as an error
    **_rows(
        3.60,
        {
            "naive-compile-trunk": (5.47, 33.14, 64.97),
            "kernels-compile-trunk": (3.60, 49.23, 32.46),  # by its seconds the MFU would be 50.4 %
            "compile-attention-flash": (3.95, 45.91, 33.46),  # flash-attn replaced by sdpa
            "compile-without-attention": (5.60, 32.37, 65.92),
            "compile-without-rope": (3.51, 51.67, 31.58),
            "compile-without-cross-entropy": (3.64, 49.74, 33.65),
            "compile-without-rms-norm": (3.45, 52.46, 32.41),
            "compile-optimizer-eager": (3.57, 50.69, 34.05),
            "compile-only-flash": (3.44, 52.73, 32.76),
            "compile-flash-ce-adamw": (3.37, 53.71, 31.54),
        },
    ),
}


def seed_rows(variant: str, model: ModelConfig) -> list[SeedRow | None]:
    """What was published for our row of this name: a compiled row has one entry, others those of torch 1.12.1 and 2.0.1
    (None where one of them lacks it). Empty if there is nothing, or for another model."""
    if any(getattr(model, name) != value for name, value in SEED_SHAPE.items()):
        return []
    if variant in COMPILED:
        return [COMPILED[variant]]
    found = [TORCH_1.get(variant), TORCH_2.get(variant)]
    return found if any(found) else []
