"""Floating-point work of training, per token, in the three conventions in use.

A multiply-add counts as 2; the backward pass costs twice the forward. So a weight that takes part in a matmul costs
6 per token, and attention over T positions 12 L (heads x D) T when all of them are counted, half of that when only the
causal half is. MFU (model FLOPs utilisation) counts what the model needs; HFU (hardware) also what
`zero2all.model.recompute` does a second time. Only MFU says how fast a run learns.

`seed`   6 x all parameters + full attention
`palm`   6 x matmul parameters + full attention
`causal` 6 x matmul parameters + half attention

Of experts those count that a token goes to (active parameters).

What a recomputed block does again:
full, every_n  all matmuls and attention. torch stops before the last matmul, the down projection, whose result the
               backward pass does not need; a fused feed-forward is one function and runs whole, experts do too.
selective      only norms and the like, which count as 0 here; and the qkv projection where the rotary kernel
               overwrites its output, and attention where it has dropout or consists of plain matmuls.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.ops.footprint import Footprint

CONVENTIONS = ("seed", "palm", "causal")

DENSE_BF16_PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H800": 989e12,
    "NVIDIA H800 PCIe": 756e12,
}
"""Dense bfloat16 peak by the device's whole name, from the vendor's data sheets (without sparsity). The whole name,
because the names of slower devices (`NVIDIA H200 NVL`, a MIG slice) begin with that of a faster one."""


def flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Training FLOPs of one token under each convention."""
    counts = parameter_counts(config)
    full_attention = 12.0 * config.layers * config.heads * config.head_size * seq_len
    return {
        "seed": 6.0 * counts["active"] + full_attention,
        "palm": 6.0 * counts["matmul"] + full_attention,
        "causal": 6.0 * counts["matmul"] + full_attention / 2,
    }


def peak_flops(device_name: str) -> float | None:
    """The peak of a known device; None for any other, never a guess."""
    return DENSE_BF16_PEAK_FLOPS.get(device_name)


def flops_utilisation(flops: Mapping[str, float], tokens_per_second: float, device_name: str) -> dict[str, float]:
    """tokens/s x FLOPs per token / peak; empty when the device's peak is unknown. MFU for `flops_per_token`; HFU where
    `recomputed_flops_per_token` are added."""
    peak = peak_flops(device_name)
    return {} if peak is None else {name: tokens_per_second * value / peak for name, value in flops.items()}


def recomputed_blocks(config: ModelConfig, kind: str, every_n: int) -> int:
    """How many blocks run their forward pass twice."""
    return {"none": 0, "every_n": -(-config.layers // every_n)}.get(kind, config.layers)


def recomputed_flops_per_token(
    config: ModelConfig, seq_len: int, kind: str, every_n: int, operators: Mapping[str, Footprint]
) -> dict[str, float]:
    """FLOPs per token of the second forward passes, under each convention; `operators` are `Ops.footprints`."""
    counts, hidden, heads = parameter_counts(config), config.hidden_size, config.heads * config.head_size
    of_block = (counts["matmul"] - counts["embedding"]) // config.layers  # of a mixture: on average
    qkv = hidden * (heads + 2 * config.kv_heads * config.head_size)
    runs_whole = operators["feed_forward"].is_fused or config.moe.experts
    down = 0 if runs_whole else hidden * config.intermediate_size
    matrices = {"full": of_block - down}
    matrices["every_n"] = matrices["full"]
    matrices["selective"] = qkv if operators["rope"].overwrites_input else 0
    attends = kind in ("full", "every_n") or (
        kind == "selective" and (config.attention_dropout > 0 or not operators["attention"].is_fused)
    )
    attention = 4.0 * heads * seq_len if attends else 0.0
    others = (counts["active"] - counts["embedding"] - counts["head"] - hidden) // config.layers - of_block
    blocks = recomputed_blocks(config, kind, every_n)
    multiplied = matrices.get(kind, 0)
    return {
        "seed": blocks * (2.0 * (multiplied + (others if kind in ("full", "every_n") else 0)) + attention),
        "palm": blocks * (2.0 * multiplied + attention),
        "causal": blocks * (2.0 * multiplied + attention / 2),
    }
