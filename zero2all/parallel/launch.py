"""Starts one process per GPU of this machine, where the person has not done so with torchrun."""

from __future__ import annotations

import os
import sys

import torch

from zero2all.common.errors import UsageError
from zero2all.parallel.config import ParallelConfig


def local_processes(config: ParallelConfig) -> int:
    """How many processes this machine should run: what was asked for, else one per GPU, else one."""
    if "LOCAL_RANK" in os.environ:  # torchrun was here
        return 1
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.processes == "auto":
        return max(1, gpus)
    if config.device == "cuda" and config.processes > gpus:
        raise UsageError(
            f"parallel.processes is {config.processes}, but this machine has {gpus} GPUs, and each process needs one. "
            f"Set it to auto or to at most {gpus}."
        )
    return config.processes


def become_torchrun(processes: int, words: list[str]) -> None:
    """Replace this process by torchrun with `z2a WORDS…` in each of its processes. Does not return."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command, "-m", "zero2all", *words])
