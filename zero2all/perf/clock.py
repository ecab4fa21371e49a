"""Time of one call on the device, and the device's best copy and matmul rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zero2all.perf.measure import wait_for

LEAST_SECONDS = 0.2
LEAST_CALLS = 3


def seconds_of(call: Callable[[], Any], device: torch.device, least_seconds: float = LEAST_SECONDS) -> float:
    """Mean seconds of a call, over as many as fill `least_seconds`, after a warm-up."""
    for _ in range(2):
        call()
    once = _timed(call, 1, device)
    return _timed(call, max(LEAST_CALLS, int(least_seconds / max(once, 1e-7))), device)


def _timed(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    wait_for(device)
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        wait_for(device)
        return begin.elapsed_time(end) / 1e3 / calls
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


@dataclass(frozen=True)
class Ceilings:
    """Measured upper limits of this device."""

    copy_bytes_per_second: float
    """Read and written, by a plain copy of one large tensor."""
    matmul_flops_per_second: float
    """Of a large square matmul of random values, in the dtype of the model, in a short burst."""


def measured_ceilings(device: torch.device, dtype: torch.dtype, least_seconds: float = LEAST_SECONDS) -> Ceilings:
    """Measure both."""
    return Ceilings(_copy_rate(device, dtype, least_seconds), _matmul_rate(device, dtype, least_seconds))


def _copy_rate(device: torch.device, dtype: torch.dtype, least_seconds: float) -> float:
    source = torch.ones(2**28 if device.type == "cuda" else 2**23, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, least_seconds)


def _matmul_rate(device: torch.device, dtype: torch.dtype, least_seconds: float) -> float:
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: a @ b, device, least_seconds)
