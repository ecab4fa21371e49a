"""All checks in order, within a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.common.progress import progress
from zero2all.measure.doctor import host
from zero2all.measure.doctor.finding import Area, DoctorFinding
from zero2all.measure.doctor.gpus import look_at_gpus, look_at_links
from zero2all.measure.doctor.software import TorchFacts, look_at_environment, look_at_kernels, look_at_versions

if TYPE_CHECKING:
    from zero2all.parallel.health import Verdict

SECONDS, JOIN_SECONDS = 30.0, 60.0


def check_machine(work: Path, seconds: float = SECONDS, quiet: bool = False) -> list[DoctorFinding]:
    """Look at everything; what cannot be looked at is a finding too. Writes nothing but the disk test's file."""
    until = time.monotonic() + seconds
    with progress("doctor", total=9, unit="checks", quiet=quiet) as bar:

        def take(name: str, look: Callable[[], Iterable[DoctorFinding]]) -> list[DoctorFinding]:
            bar.advance(0, note=name)
            try:
                found = list(look())
            except (OSError, ValueError) as error:  # files of the kernel differ; the other checks still count
                found = [Area(name).note(f"not looked at: {error}")]
            bar.advance(1, note=name)
            return found

        disk = take("disk", lambda: host.look_at_disk(work))  # alone: loading torch reads from disks too
        gpus, report = look_at_gpus()
        bar.advance(1, note="gpu")
        links = take("links", lambda: look_at_links(report))
        asked = TorchFacts()  # after nvidia-smi, which would count its memory
        looks = {"cpu": host.look_at_cpu, "memory": host.look_at_memory}
        looks |= {"limits": host.look_at_limits, "network": host.look_at_network}
        others = [finding for name, look in looks.items() for finding in take(name, look)]
        environment = take("environment", look_at_environment)
        bar.advance(0, note="torch and kernels")
        facts, problem = asked.collect(until)
        software = [*look_at_versions(facts, problem, report), *look_at_kernels(facts)]
        bar.advance(1, note="torch and kernels")
    return [*gpus, *links, *others, *disk, *software, *environment]


def check_ranks() -> Verdict:
    """Be one of the processes of `z2a doctor --ranks N`: the health check without a run."""
    import torch

    from zero2all.parallel.device import local_rank, pick_device
    from zero2all.parallel.health import find_bad
    from zero2all.parallel.rendezvous import open_store

    rank, size, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), pick_device("auto")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    return find_bad(open_store(rank, JOIN_SECONDS), rank, size, device)
