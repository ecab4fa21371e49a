"""Times of a device: how long a call takes, the rates that nothing exceeds, power and clocks meanwhile."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

LEAST_SECONDS = 0.2
LEAST_CALLS = 3
GPU_FIELDS = ("power.draw", "clocks.sm", "clocks.mem", "temperature.gpu")
GPU_NAMES = ("watts", "sm_mhz", "memory_mhz", "celsius")
EVERY_MILLISECONDS = 500


def wait_for(device: torch.device) -> None:
    """Wait until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The name under which `zero2all.estimate.flops` lists its peak."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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

    copy_bytes_per_second: float  # read and written, by a plain copy of one large tensor
    matmul_flops_per_second: float  # of a large square matmul, in a short burst


def measured_ceilings(device: torch.device, dtype: torch.dtype, least_seconds: float = LEAST_SECONDS) -> Ceilings:
    """Measure both."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**23, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, least_seconds)
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    matmul = seconds_of(lambda: a @ b, device, least_seconds)
    return Ceilings(2 * source.nbytes / copy, 2 * side**3 / matmul)


@contextmanager
def watched_gpu(device: torch.device) -> Iterator[dict[str, Any]]:
    """Power and clocks in the block, from nvidia-smi: a GPU at its power limit lowers its clock.

    The mapping is filled when the block ends; it stays empty without a GPU or nvidia-smi.
    """
    found: dict[str, Any] = {}
    if device.type != "cuda":
        yield found
        return
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = [
        *("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"),
        *(f"--loop-ms={EVERY_MILLISECONDS}", *([f"--id=GPU-{identity}"] if identity is not None else [])),
    ]
    with tempfile.TemporaryFile("w+") as lines:  # a pipe that nobody reads would fill up
        try:
            process = subprocess.Popen(command, stdout=lines, stderr=subprocess.DEVNULL)
        except OSError:
            yield found
            return
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            lines.seek(0)
            found.update(gpu_medians(lines.read()))


def gpu_medians(text: str) -> dict[str, float]:
    """The medians of nvidia-smi's lines; the first line is from before the block."""
    samples = []
    for line in text.splitlines()[1:]:
        try:
            values = [float(value) for value in line.split(",")]
        except ValueError:  # "[N/A]": not reported
            continue
        if len(values) == len(GPU_NAMES):
            samples.append(values)
    columns = zip(GPU_NAMES, zip(*samples, strict=True), strict=True) if samples else ()
    return {name: statistics.median(column) for name, column in columns}
