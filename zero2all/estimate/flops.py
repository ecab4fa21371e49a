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
groups         the same, but only the last block of a group stops there.
selective      only norms and the like, which count as 0 here; and the qkv projection where the rotary kernel
               overwrites its output, and attention where it has dropout or consists of plain matmuls.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zero2all.estimate.floors import operator_work
from zero2all.estimate.gpus import DEVICE_NAMES, GPUS
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.ops.footprint import Footprint

CONVENTIONS = ("seed", "palm", "causal")
WHOLE_FORWARD = ("full", "every_n", "groups")
"""Kinds of train.recompute whose recomputed blocks run all of their forward pass again."""


def flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Training FLOPs of one token under each convention."""
    counts, width = parameter_counts(config), config.layers * config.heads * config.head_size
    return conventions(counts["active"], counts["matmul"], width, seq_len)


def conventions(active: float, matmul: float, attention_width: float, seq_len: float) -> dict[str, float]:
    """Training FLOPs of one token under each convention. `attention_width`: layers x heads x head width."""
    full_attention = 12.0 * attention_width * seq_len
    return {
        "seed": 6.0 * active + full_attention,
        "palm": 6.0 * matmul + full_attention,
        "causal": 6.0 * matmul + full_attention / 2,
    }


FLOPS_PER_VALUE = {"rms_norm": (5.0, 9.0), "rope": (3.0, 3.0), "swiglu": (6.0, 10.0), "cross_entropy": (4.0, 2.0)}
"""Forward and backward. Each add, multiply, divide and exponential counts 1. rms_norm with its residual addition."""
ADAMW_FLOPS = 15.0
"""Per parameter and step, counted the same way."""


@dataclass(frozen=True)
class Group:
    """FLOPs of a micro-batch, forward and backward, and the bytes that must move where memory limits."""

    flops: float
    bytes: float = 0.0


def flops_by_group(config: ModelConfig, tokens: int, seq_len: int, value_bytes: int = 2) -> dict[str, Group]:
    """Training work of a micro-batch by kind: matrix products (with causal attention, 3 x its forward), normalisation,
    elementwise. The bytes are the floors of `zero2all.estimate.floors`; the optimizer is one step, not one token's."""
    shared, moe = parameter_counts(config), config.moe
    of_experts = (moe.experts_per_token + moe.shared_experts) * moe.expert_size
    inner = (config.layers - config.expert_layers) * config.intermediate_size + config.expert_layers * of_experts
    work = operator_work(config, tokens, seq_len, value_bytes)
    swiglu_bytes = work["swiglu"].total / config.intermediate_size * inner
    rotated = config.layers * (config.heads + config.kv_heads) * config.head_size
    norms = 2 * config.layers + 1 + config.embedding_norm
    normed = norms * config.hidden_size + (rotated if config.qk_norm else 0)

    def count(name: str, values: float) -> float:
        return tokens * values * sum(FLOPS_PER_VALUE[name])

    return {
        "matrix products": Group(6.0 * tokens * shared["matmul"]),
        "attention": Group(6.0 * tokens * config.layers * config.heads * config.head_size * seq_len),
        "normalisation": Group(count("rms_norm", normed), norms * work["rms_norm"].total),
        "SwiGLU": Group(count("swiglu", inner), swiglu_bytes),
        "RoPE": Group(count("rope", rotated), config.layers * work["rope"].total),
        "embedding": Group(0.0, work["embedding"].total),
        "cross entropy": Group(count("cross_entropy", config.vocab_rows), work["cross_entropy"].total),
        "optimizer": Group(ADAMW_FLOPS * shared["total"], work["optimizer"].total),
    }


def peak_flops(device_name: str) -> float | None:
    """The dense bfloat16 peak of a device by its whole name; None for an unknown one, never a guess."""
    name = DEVICE_NAMES.get(device_name)
    return GPUS[name].peak_flops if name else None


def compute_mfu(flops: Mapping[str, float], tokens_per_second: float, device_name: str) -> dict[str, float]:
    """tokens/s x FLOPs per token / peak; empty when the device's peak is unknown. MFU for `flops_per_token`; HFU where
    `recomputed_flops_per_token` are added."""
    peak = peak_flops(device_name)
    return {} if peak is None else {name: tokens_per_second * value / peak for name, value in flops.items()}


def recomputed_blocks(config: ModelConfig, kind: str, every_n: int) -> int:
    """How many blocks run their forward pass twice."""
    return {"none": 0, "every_n": -(-config.layers // every_n)}.get(kind, config.layers)


def stopped_blocks(config: ModelConfig, kind: str, every_n: int) -> int:
    """How many of those stop before their last matmul."""
    return recomputed_blocks(config, "every_n" if kind == "groups" else kind, every_n)


def recomputed_flops_per_token(
    config: ModelConfig, seq_len: int, kind: str, every_n: int, operators: Mapping[str, Footprint]
) -> dict[str, float]:
    """FLOPs per token of the second forward passes, under each convention; `operators` are `Ops.footprints`."""
    counts, hidden, heads = parameter_counts(config), config.hidden_size, config.heads * config.head_size
    of_block = (counts["matmul"] - counts["embedding"]) // config.layers  # of a mixture: on average
    qkv = hidden * (heads + 2 * config.kv_heads * config.head_size)
    runs_whole = operators["feed_forward"].is_fused or config.moe.experts
    down = 0 if runs_whole else hidden * config.intermediate_size
    matrices = dict.fromkeys(WHOLE_FORWARD, of_block)
    matrices["selective"] = qkv if operators["rope"].overwrites(config.qk_norm) else 0
    attends = kind in WHOLE_FORWARD or (
        kind == "selective" and (config.attention_dropout > 0 or not operators["attention"].is_fused)
    )
    attention = 4.0 * heads * seq_len if attends else 0.0
    others = (counts["active"] - counts["embedding"] - counts["head"] - hidden) // config.layers - of_block
    blocks = recomputed_blocks(config, kind, every_n)
    multiplied = blocks * matrices.get(kind, 0)
    if kind in WHOLE_FORWARD:
        multiplied -= stopped_blocks(config, kind, every_n) * down
    return {
        "seed": 2.0 * (multiplied + (blocks * others if kind in WHOLE_FORWARD else 0)) + blocks * attention,
        "palm": 2.0 * multiplied + blocks * attention,
        "causal": 2.0 * multiplied + blocks * attention / 2,
    }
