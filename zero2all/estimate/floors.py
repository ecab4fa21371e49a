"""The least that any implementation of an operator must move or compute: its floor.

Bytes: each input read once and each output written once, at the width the values have; weights of a norm, targets and
other small things are left out. FLOPs: a multiply-add counts as 2. Divided by what the device can copy or multiply per
second, a floor is a time that no implementation of the same computation can beat; floor / time says how close one is.

An operation takes at least max(FLOPs / rate, bytes / bandwidth, launch). Its intensity is FLOPs / bytes; above the
ridge, peak / bandwidth, arithmetic limits. A matmul is cut into tiles, which the SMs compute in waves of as many as
there are SMs: the last wave may be nearly empty (NVIDIA's matmul guide).

Legend: N tokens, T sequence length, C width, F inner width, Hq and Hk heads, D head width, V vocabulary rows, U
different ids, e bytes of a value, P parameters.
"""

import functools
import math
from dataclasses import dataclass

from zero2all.model.config import ModelConfig, parameter_counts

WIDE_BYTES = 4
"""Bytes per value of masters, moments and gradients."""


@dataclass(frozen=True)
class Work:
    """Forward and backward of an operator."""

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0

    @property
    def is_matmul(self) -> bool:
        """Whether it is limited by arithmetic, not by memory."""
        return self.forward_flops > 0

    @property
    def total(self) -> float:
        """FLOPs where arithmetic limits, else bytes."""
        return self.forward_flops + self.backward_flops if self.is_matmul else self.forward_bytes + self.backward_bytes


def operator_work(config: ModelConfig, tokens: int, seq_len: int, value_bytes: int) -> dict[str, Work]:
    """The work of every operator on `tokens` tokens, once each (not once per layer); `linear/…` per matrix."""
    N, T, C, F = tokens, seq_len, config.hidden_size, config.intermediate_size
    Hq, Hk, D, V, e = config.heads, config.kv_heads, config.head_size, config.vocab_rows, value_bytes
    matrices = linear_shapes(config)
    U = distinct_ids(config.vocab_ids, N)
    work = {
        # in: residual, branch; out: normed, sum. Back: two gradients and the sum in, one gradient out.
        "rms_norm": Work(4.0 * N * C * e, 4.0 * N * C * e),
        # query and key rotated in place. Back: three gradients are gathered into one; a norm reads query and key again.
        "rope": Work(2.0 * N * (Hq + Hk) * D * e, (2.0 * (Hq + 2 * Hk) + config.qk_norm * (Hq + Hk)) * N * D * e),
        # gate and up in, product out. Back: gate, up and one gradient in, two out.
        "swiglu": Work(3.0 * N * F * e, 5.0 * N * F * e),
        # the rows of the ids that occur in, one row per token out. Back: those gradients in, added to float32 rows.
        "embedding": Work((U + N) * C * e, N * C * e + 2 * U * C * WIDE_BYTES),
        # the logits are read, and their gradient written.
        "cross_entropy": Work(1.0 * N * V * e, 1.0 * N * V * e),
        # only the causal half counts; the backward recomputes the scores, which makes five matmuls of it.
        "attention": Work(forward_flops=2.0 * N * T * Hq * D, backward_flops=5.0 * N * T * Hq * D),
        "linear_cross_entropy": Work(forward_flops=2.0 * N * C * V, backward_flops=4.0 * N * C * V),
        "optimizer": optimizer_work(parameter_counts(config)["total"]),
    }
    for name, (rows, columns) in matrices.items():
        work[f"linear/{name}"] = Work(forward_flops=2.0 * N * rows * columns, backward_flops=4.0 * N * rows * columns)
    return work


@functools.lru_cache
def distinct_ids(vocabulary: int, tokens: int) -> float:
    """How many different ids to expect among `tokens` of them in text, where the id of rank r has about 1/r of the
    share of the first (Zipf): log((r + 1) / r) / log(vocabulary + 1), so that the shares add up to 1."""
    whole, found, rank = math.log(vocabulary + 1), 0.0, 1
    while rank <= vocabulary:  # ranks far down the list are as rare as their neighbours: a few at a time
        width = min(1 + rank // 256, vocabulary + 1 - rank)
        middle = rank + (width - 1) / 2
        found += width * (1.0 - (1.0 - math.log1p(1 / middle) / whole) ** tokens)
        rank += width
    return found


def optimizer_work(parameters: int) -> Work:
    """AdamW: gradient, master and two moments in; master and moments out. A bfloat16 weight is half of its master."""
    return Work(forward_bytes=7.0 * WIDE_BYTES * parameters)


def decoding_bytes(config: ModelConfig, batch: int, length: float, weight_bytes: float, cache_bytes: float) -> float:
    """What one decoding pass must read: every matrix once, and the keys and values of the `length` positions of each of
    `batch` sequences, at so many bytes per value. Of experts those count that some token is expected to choose, if each
    chooses at random."""
    moe, matmul = config.moe, parameter_counts(config)["matmul"]
    expert = 3 * config.hidden_size * moe.expert_size
    chosen = moe.experts * (1.0 - (1.0 - moe.experts_per_token / moe.experts) ** batch) if moe.experts else 0.0
    weights = matmul + config.expert_layers * expert * (chosen - moe.experts_per_token)
    cache = 2.0 * config.layers * config.kv_heads * config.head_size * batch * length
    return weights * weight_bytes + cache * cache_bytes


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the matrices of a block."""
    heads = config.heads * config.head_size
    return {
        "qkv": (heads + 2 * config.kv_heads * config.head_size, config.hidden_size),
        "out": (config.hidden_size, heads),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def matmul_flops(m: float, n: float, k: float) -> float:
    """(m, k) x (k, n): a multiply-add counts as 2."""
    return 2.0 * m * n * k


def matmul_bytes(m: float, n: float, k: float, value_bytes: float = 2) -> float:
    """Each operand read once, the result written once."""
    return value_bytes * (m * k + k * n + m * n)


def least_seconds(flops: float, moved: float, rate: float, bandwidth: float, launch: float = 0.0) -> float:
    """The time that no implementation can beat."""
    return max(flops / rate, moved / bandwidth, launch)


@dataclass(frozen=True)
class Tiling:
    """How a matmul's result is spread over the SMs."""

    tiles: int
    waves: int
    wave_efficiency: float
    tile_efficiency: float


def tiling(m: int, n: int, units: int, tile_m: int = 128, tile_n: int = 256) -> Tiling:
    """Of an (m, n) result on `units` SMs."""
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    waves = math.ceil(tiles / units)
    return Tiling(tiles, waves, tiles / (waves * units), m * n / (tiles * tile_m * tile_n))
