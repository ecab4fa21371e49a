"""`z2a doctor --ranks N`: the health check of a run (`parallel.health`) without the run."""

from __future__ import annotations

import os

import torch

from zero2all.parallel.device import local_rank, pick_device
from zero2all.parallel.health import Verdict, find_bad
from zero2all.parallel.rendezvous import open_store

JOIN_SECONDS = 60.0


def check_ranks() -> Verdict:
    """Be one of the processes."""
    rank, size, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), pick_device("auto")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    return find_bad(open_store(rank, JOIN_SECONDS), rank, size, device)
