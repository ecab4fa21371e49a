"""The device a process computes on, and what must be equal for two runs to agree bit for bit."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from zero2all.common.errors import UsageError

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch looks: the name of today, and the one before it."""


def pick_device(asked: str) -> torch.device:
    """The torch device for `parallel.device`; a GPU with its number, which some of torch's calls insist on."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "parallel.device is cuda, but torch sees no CUDA device here. Check the driver and that a CUDA build of "
            "torch is installed, or set parallel.device to cpu or auto."
        )
    return torch.device("cuda", local_rank()) if asked == "cuda" else torch.device(asked)


def local_rank() -> int:
    """Which of this machine's processes of the run this is, and so which of its GPUs it has."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """How many processes of the run this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def set_memory_settings(expandable_segments: bool) -> None:
    """How torch cuts up a GPU's memory. Before the first use of the GPU; what the environment says already counts."""
    if expandable_segments and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def set_cpu_threads(asked: int | None, recorded: int | None) -> int:
    """Use the threads asked for, else those a resumed run was started with, else every core this process may use."""
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
