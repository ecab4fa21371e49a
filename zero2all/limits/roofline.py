"""Whether arithmetic or memory limits an operation, and how well a matmul fills the device (NVIDIA's matmul guide).

An operation takes at least max(FLOPs / rate, bytes / bandwidth, launch). Its intensity is FLOPs / bytes; above the
ridge, peak / bandwidth, arithmetic limits. A matmul is cut into tiles, which the SMs compute in waves of as many as
there are SMs: the last wave may be nearly empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
