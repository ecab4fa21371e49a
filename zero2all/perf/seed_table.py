"""The table this project set out to beat: the seed's ablation of z2all-1b's shape on one NVIDIA A800 80GB.

An iteration is 16 passes over 2 x 2048 tokens. MFU in the convention called `seed` in `zero2all.limits.flops`, of 312
TFLOPS. None: not published. The seed's all-fused row had an unfused AdamW, so it is compared with our row with torch's
AdamW loop, and its last row, with a fused AdamW, with our all-fused.
"""

from __future__ import annotations

from dataclasses import dataclass

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
"""The fields of the seed's model that decide the arithmetic of a step."""


@dataclass(frozen=True)
class SeedRow:
    """One published row."""

    name: str  # as the seed called it
    seconds: float | None = None  # per iteration of 65,536 tokens
    mfu_percent: float | None = None
    memory_gb: float | None = None
    remark: str = ""  # what was published instead of figures


NAIVE_SECONDS, NAIVE_MFU_PERCENT = 9.85, 18.4

SEED_ROWS = {
    "naive": SeedRow("naive", NAIVE_SECONDS, NAIVE_MFU_PERCENT, 71.3),
    "all-fused": SeedRow("all fused, with a fused AdamW", 3.17, 57.5),
    "optimizer-eager": SeedRow("all fused", 3.23, 56.1, 27.9),
    "without-attention": SeedRow("without flash attention", 8.69, None, 65.4),
    "without-rope": SeedRow("without fused rope", 3.51),
    "without-cross-entropy": SeedRow("without fused cross-entropy", 3.37),
    "without-rms-norm": SeedRow("without fused rmsnorm", 3.78),
    "without-swiglu": SeedRow("without fused swiglu", 3.60),
    "naive-compile-trunk": SeedRow("naive, compiled", None, 33.0),
    "odd-vocabulary-unpadded": SeedRow("vocabulary 64321", remark="+13 %"),
}
"""Our row -> the seed's."""


def seed_row(variant: str, model: ModelConfig) -> SeedRow | None:
    """The seed's row for our row of this name; None if it has none, or for another model."""
    if any(getattr(model, name) != value for name, value in SEED_SHAPE.items()):
        return None
    return SEED_ROWS.get(variant)


def seed_mfu_percent(row: SeedRow) -> tuple[float | None, bool]:
    """The row's MFU, and whether it is published (True) or follows from its seconds and the naive row (False)."""
    if row.mfu_percent is not None or row.seconds is None:
        return row.mfu_percent, True
    return NAIVE_MFU_PERCENT * NAIVE_SECONDS / row.seconds, False
