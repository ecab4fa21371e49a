"""Power and clocks of the GPU during a measurement, from nvidia-smi.

A GPU at its power limit lowers its clock, so results can be compared only together with both.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FIELDS = ("power.draw", "clocks.sm", "clocks.mem", "temperature.gpu")
NAMES = ("watts", "sm_mhz", "memory_mhz", "celsius")
EVERY_MILLISECONDS = 500


@contextmanager
def watched_gpu(device: torch.device) -> Iterator[dict[str, Any]]:
    """A mapping that is filled when the block ends; it stays empty without a GPU or nvidia-smi."""
    found: dict[str, Any] = {}
    if device.type != "cuda":
        yield found
        return
    command = [
        *("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"),
        *(f"--loop-ms={EVERY_MILLISECONDS}", *_which(device)),
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
            found.update(summary(lines.read()))


def _which(device: torch.device) -> list[str]:
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return [f"--id=GPU-{identity}"] if identity is not None else []


def summary(text: str) -> dict[str, Any]:
    """nvidia-smi's lines -> samples and their medians; the first sample is from before the block."""
    samples = []
    for line in text.splitlines()[1:]:
        try:
            values = [float(value) for value in line.split(",")]
        except ValueError:  # "[N/A]": not reported
            continue
        if len(values) == len(NAMES):
            samples.append(values)
    if not samples:
        return {}
    columns = dict(zip(NAMES, zip(*samples, strict=True), strict=True))
    medians = {name: statistics.median(column) for name, column in columns.items()}
    return {"every_milliseconds": EVERY_MILLISECONDS, **medians, "samples": {k: list(v) for k, v in columns.items()}}
