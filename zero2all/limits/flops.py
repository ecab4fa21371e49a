"""Floating-point work of training, per token, in the three conventions in use.

A multiply-add counts as 2; the backward pass costs twice the forward. So a weight that takes part in a matmul costs
6 per token, and attention over T positions 12 L (heads x D) T when all of them are counted, half of that when only the
causal half is. Recomputation never counts: these are the FLOPs the model needs, not those a run spends.

`seed`   6 x all parameters + full attention
`palm`   6 x matmul parameters + full attention
`causal` 6 x matmul parameters + half attention

MFU is tokens/s x FLOPs per token / peak; it can be compared only within one convention.
"""

from __future__ import annotations

from zero2all.model.config import ModelConfig, parameter_counts

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
        "seed": 6.0 * counts["total"] + full_attention,
        "palm": 6.0 * counts["matmul"] + full_attention,
        "causal": 6.0 * counts["matmul"] + full_attention / 2,
    }


def peak_flops(device_name: str) -> float | None:
    """The peak of a known device; None for any other, never a guess."""
    return DENSE_BF16_PEAK_FLOPS.get(device_name)


def model_flops_utilisation(
    config: ModelConfig, seq_len: int, tokens_per_second: float, device_name: str
) -> dict[str, float]:
    """MFU under each convention; empty when the device's peak is unknown."""
    peak = peak_flops(device_name)
    if peak is None:
        return {}
    return {name: tokens_per_second * flops / peak for name, flops in flops_per_token(config, seq_len).items()}
