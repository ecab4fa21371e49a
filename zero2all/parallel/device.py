"""The device a process computes on, and what must be equal for two runs to agree bit for bit."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from zero2all.common.cores import allowed_cpus, cpu_numbers, read, usable_cores
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
    """Use the configured number of threads, else that of the resumed run, else OMP_NUM_THREADS, else this process's
    share of the cores."""
    threads = asked or recorded or _threads_by_environment() or share_of_cores()
    torch.set_num_threads(threads)
    return threads


def _threads_by_environment() -> int | None:
    """OMP_NUM_THREADS, if a person set it: torchrun sets it to 1 by itself."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    if not value.isdigit() or (value == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return None
    return int(value) or None


def share_of_cores() -> int:
    """Cores of this process: an equal share of those that the run's processes on this machine may use."""
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if tasks and int(tasks[0]) > 1:  # srun started each process, with cores of its own
        return usable_cores()
    return max(1, (_cores_before_binding or usable_cores()) // local_processes())


_cores_before_binding: int | None = None


def bind_near(device: torch.device) -> str:
    """Of several processes on a machine: run this one on the CPUs of its GPU's memory node (NUMA). Returns what was
    done, empty: nothing. Leaves CPUs that somebody chose before (srun, taskset, numactl, a container)."""
    global _cores_before_binding
    if device.type != "cuda" or local_processes() == 1:
        return ""
    properties = torch.cuda.get_device_properties(device)  # of the visible device, however it was named
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)  # type: ignore[attr-defined]
    near = cpus_to_take("{:04x}:{:02x}:{:02x}.0".format(*place), allowed_cpus())
    if not near:
        return ""
    cores = usable_cores()
    try:
        os.sched_setaffinity(0, near)
    except OSError as error:  # some containers forbid it
        return f"processes are not bound to the CPUs near their GPUs: {error.strerror}"
    _cores_before_binding = cores
    return f"each process runs on the CPUs near its GPU (rank 0: {len(near)} of {cores})"


def cpus_to_take(bus: str, allowed: set[int], system: Path = Path("/sys")) -> set[int]:
    """The CPUs of the memory node of a PCI device; empty: stay on those allowed now."""
    node = read(system / "bus/pci/devices" / bus / "numa_node")
    if not node.isdigit() or allowed != cpu_numbers(read(system / "devices/system/cpu/online")):
        return set()  # -1: the firmware does not say
    near = cpu_numbers(read(system / f"devices/system/node/node{node}/cpulist"))
    return near if near < allowed else set()


def environment(device: torch.device) -> dict[str, Any]:
    """Everything outside the config that can change the last bit of a result."""
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
