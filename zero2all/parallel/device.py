"""The device a process computes on, and what must be equal for two runs to agree bit for bit."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import torch

from zero2all.common.errors import UsageError

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first; the second is its older name."""


def pick_device(asked: str, setting: str = "parallel.device") -> torch.device:
    """The torch device for `parallel.device` or another setting; a GPU with its index, which some of torch's calls
    require."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    named = re.fullmatch(r"cuda(?::(\d{1,3}))?", asked, re.ASCII)
    if named is None:
        raise UsageError(f"{setting} is `{asked}`. Expected auto, cpu, cuda, or a GPU by its number, such as cuda:1.")
    if not torch.cuda.is_available():
        raise UsageError(
            f"{setting} is {asked}, but torch sees no CUDA device here. Check the driver and that a CUDA build of "
            f"torch is installed, or set {setting} to cpu or auto."
        )
    if named[1] is None:
        return torch.device("cuda", local_rank())
    count = torch.cuda.device_count()
    if int(named[1]) >= count:
        raise UsageError(f"{setting} is {asked}, but this machine has only cuda:0 to cuda:{count - 1}.")
    return torch.device("cuda", int(named[1]))


def local_rank() -> int:
    """The index of this process among those of the run on this machine, and so of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """How many processes of the run this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def set_memory_settings(expandable_segments: bool) -> None:
    """Configure torch's GPU allocator. Call it before the first use of the GPU; the environment takes precedence."""
    if expandable_segments and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def set_cpu_threads(asked: int | None, recorded: int | None) -> int:
    """Use the configured number of threads, else that of the resumed run, else every core this process may use."""
    threads = asked or recorded or _usable_cores()
    torch.set_num_threads(threads)
    return threads


def _usable_cores() -> int:
    """Cores this process may use; systems that cannot restrict a process (macOS) give all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def environment(device: torch.device) -> dict[str, Any]:
    """Everything outside the config that can change the last bit of a result."""
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
