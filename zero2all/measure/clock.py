"""Times of a device: how long a call takes, the rates that nothing exceeds, power and clocks meanwhile; and times of
calls in the state that training keeps the device in (`Stopwatch`)."""

import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


# A GPU at its power limit lowers its clock, so a product in a short burst is faster than in a run. Every timed call of
# a Stopwatch therefore stands behind a *heater*: two large products and a large copy, about the mixture of a training
# step. It keeps the GPU at its power limit, empties the L2 cache, and lets the host queue the timed calls ahead, so
# that the events around them measure the device alone: it runs as often as the queueing needs.
#
# While a figure is prepared (inputs are drawn, kernels compiled) the GPU cools and its clock rises again. Before its
# calls are timed the heater therefore runs until it takes as long as it did when the clock had settled. It is also
# timed between the calls: settled seconds / seconds now is the `clock` of a figure beside the settled one.
#
# On a CPU there is no heater; a call is repeated until enough time has passed.

REPEATS = 7
SLOW_SECONDS, SLOW_REPEATS = 0.02, 3  # a call this long needs fewer repeats
BATCH_SECONDS = 1.5e-3  # of the timed calls between two heaters
MOST_CALLS = 16
QUEUE_SECONDS = 2.5e-3  # what the host may take to queue short ones
QUEUE_MARGIN = 2.0  # the heater runs so much longer than the queueing was measured to take
CPU_SECONDS, CPU_REPEATS = 0.1, 5
HEATER_SIDE, HEATER_BYTES = 8192, 1 << 29
SETTLED = 0.005  # two windows of the heater that differ by less
WINDOW_SECONDS, LEAST_WARM_SECONDS = 1.0, 4.0
REHEAT_CALLS, MOST_REHEAT_SECONDS, REHEATED = 8, 0.25, 1.02  # until the heater takes its settled time / REHEATED


@dataclass(frozen=True)
class Timed:
    """Median seconds of a call, interquartile range / median, and the clock beside the settled one meanwhile."""

    seconds: float
    spread: float
    clock: float = 1.0

    @property
    def settled_seconds(self) -> float:
        """Seconds of a call that arithmetic limits, at the settled clock."""
        return self.seconds * self.clock


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._heater, self._settled = device, None, 0.0
        if device.type == "cuda":
            a, b = (torch.randn(HEATER_SIDE, HEATER_SIDE, device=device).bfloat16() for _ in range(2))
            out = torch.empty_like(a)
            source = torch.empty(HEATER_BYTES, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)

            def heat() -> None:
                torch.mm(a, b, out=out)
                torch.mm(b, a, out=out)
                target.copy_(source)

            self._heater = heat

    def warm_up(self, most_seconds: float) -> tuple[float, float]:
        """Heat until the clock has settled; returns seconds of the heater in a first burst, and settled. 1, 1: no
        heater."""
        if self._heater is None:
            return 1.0, 1.0
        self._heater()
        wait_for(self.device)
        time.sleep(0.5)
        cold = self._window(0.02)
        started, before = time.perf_counter(), math.inf
        while True:
            now, passed = self._window(WINDOW_SECONDS), time.perf_counter() - started
            is_settled = abs(now / before - 1.0) < SETTLED and passed >= LEAST_WARM_SECONDS
            if is_settled or passed >= most_seconds:
                self._settled = now
                return cold, now
            before = now

    def _window(self, seconds: float) -> float:
        """Mean seconds of the heater over a window."""
        assert self._heater is not None
        started, calls = time.perf_counter(), 0
        while True:
            for _ in range(4):
                self._heater()
            calls += 4
            wait_for(self.device)
            passed = time.perf_counter() - started
            if passed >= seconds:
                return passed / calls

    def time(self, call: Callable[[], Any]) -> Timed:
        """Time one call, after two that compile and allocate."""
        for _ in range(2):
            call()
        wait_for(self.device)
        started = time.perf_counter()
        call()
        queued = time.perf_counter() - started
        wait_for(self.device)
        once = time.perf_counter() - started
        if self._heater is None:
            return self._time_on_host(call, once)
        calls = max(1, min(MOST_CALLS, int(BATCH_SECONDS / once) or 1, int(QUEUE_SECONDS / queued)))
        self._reheat()
        heats = heats_to_hide(calls * queued, self._settled)
        events = []
        for _ in range(SLOW_REPEATS if once > SLOW_SECONDS else REPEATS):
            heat, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            heat.record()
            for _ in range(heats):
                self._heater()
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            events.append((heat, begin, end))
        wait_for(self.device)
        found = timed([begin.elapsed_time(end) / 1e3 / calls for _, begin, end in events])
        if not self._settled:
            return found
        # The first heater waits for the host, which has just measured.
        heated = statistics.median(heat.elapsed_time(begin) / 1e3 / heats for heat, begin, _ in events[1:])
        return replace(found, clock=self._settled / heated)

    def _reheat(self) -> None:
        """Heat until the clock is as low as when it had settled."""
        started = time.perf_counter()
        while time.perf_counter() - started < MOST_REHEAT_SECONDS:
            if self._burst(REHEAT_CALLS) >= self._settled / REHEATED:
                return

    def _burst(self, calls: int) -> float:
        """Mean seconds of the heater in a few calls."""
        assert self._heater is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._heater()
        begin.record()
        for _ in range(calls):
            self._heater()
        end.record()
        wait_for(self.device)
        return begin.elapsed_time(end) / 1e3 / calls

    def _time_on_host(self, call: Callable[[], Any], once: float) -> Timed:
        """Repeated calls; of short ones several at a time."""
        calls, found = max(1, int(CPU_SECONDS / CPU_REPEATS / max(once, 1e-7))), []
        for _ in range(SLOW_REPEATS if once > 1.0 else CPU_REPEATS):
            started = time.perf_counter()
            for _ in range(calls):
                call()
            found.append((time.perf_counter() - started) / calls)
        return timed(found)

    def host_seconds(self, call: Callable[[], Any], calls: int = 400) -> float:
        """What the host takes to queue a call; on a CPU, to make it."""
        for _ in range(20):
            call()
        wait_for(self.device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        passed = time.perf_counter() - started
        wait_for(self.device)
        return passed / calls


def heats_to_hide(queueing_seconds: float, heater_seconds: float) -> int:
    """Heaters that run longer than the host takes to queue the timed calls: else their time would be the host's."""
    if not heater_seconds:
        return 1
    return max(1, math.ceil(QUEUE_MARGIN * queueing_seconds / heater_seconds))


def timed(seconds: list[float]) -> Timed:
    """Median and spread of repeated measurements."""
    median = statistics.median(seconds)
    if len(seconds) < 3:
        return Timed(median, 0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timed(median, (high - low) / max(median, 1e-12))
