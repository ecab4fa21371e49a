"""Processor, memory, limits, disk and network of this machine, read from Linux's own files."""

import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from zero2all.common.cores import allowed_cpus, quota_cores, read
from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.memory import available_memory
from zero2all.estimate.model_calculators import CHECKPOINT_BYTES
from zero2all.measure.doctor.finding import Area, DoctorFinding, Grade
from zero2all.parallel.network import fast_ports

CPU, MEMORY, LIMITS, DISK, NETWORK = map(Area, ("cpu", "memory", "limits", "disk", "network"))
SYS, PROC = Path("/sys"), Path("/proc")
ULIMITS = ("nofile", "nproc", "memlock", "as", "fsize")
SMALL_SHM = 1 << 30
FEW_FILES = 4096
LITTLE_DISK, TOO_LITTLE_DISK = 20 << 30, 1 << 30
TEST_BYTES, BLOCK_BYTES, TEST_SECONDS = 64 << 20, 4 << 20, 1.5
SLOW_DISK = 100e6  # bytes/s
NETWORK_DISKS = ("nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p")


def processor() -> str:
    """The name of the CPU."""
    model = re.search(r"^model name\s*:\s*(.+)$", read(PROC / "cpuinfo"), re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def look_at_cpu() -> Iterator[DoctorFinding]:
    """Cores that may be used, what else uses them, and the memory nodes."""
    allowed, quota = len(allowed_cpus()), quota_cores()
    found = f"{processor()}: {allowed} of {os.cpu_count()} CPUs may be used"
    if quota is not None and quota < allowed - 0.01:
        why = "More threads than that are stopped for a part of every 100 ms, all together."
        advice = f"Set --parallel.cpu_threads {max(1, int(quota))}, or raise the container's CPU limit."
        yield CPU.warning(f"{found}, but only for the time of {quota:g}", why, advice)
    else:
        yield CPU.ok(found)
    load = os.getloadavg()[0]
    if load > max(1.0, allowed):
        why = "Whatever else runs here takes time from the process that feeds the GPU."
        yield CPU.warning(f"load {load:.1f} on {allowed} CPUs", why, "See `top`; stop what is not needed.")
    governor = read(SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave" and "intel_pstate" not in read(SYS / "devices/system/cpu/cpu0/cpufreq/scaling_driver"):
        why = "The CPU stays at a low clock, and queues kernels slowly."
        yield CPU.note("the frequency governor is powersave", why, "`cpupower frequency-set -g performance`.")
    yield from _numa()


def _numa() -> Iterator[DoctorFinding]:
    nodes = {path.name: read(path / "cpulist") for path in sorted((SYS / "devices/system/node").glob("node[0-9]*"))}
    if not nodes:
        yield CPU.note("memory nodes (NUMA) were not looked at: this system does not show them")
    elif len(nodes) == 1:
        yield CPU.ok("one memory node (NUMA)")
    else:
        listed = ", ".join(f"{name}: CPUs {cpus}" for name, cpus in nodes.items())
        yield CPU.ok(f"{len(nodes)} memory nodes (NUMA): {listed}")
        if read(PROC / "sys/kernel/numa_balancing") == "1":
            why = "The kernel moves pages between nodes in the background, with pauses in the process."
            yield CPU.note("automatic NUMA balancing is on", why, "As root: `sysctl kernel.numa_balancing=0`.")


def look_at_memory() -> Iterator[DoctorFinding]:
    """Memory of the host, swap and shared memory."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(PROC / "meminfo"), re.MULTILINE))
    total, available = int(sizes.get("MemTotal", 0)) << 10, available_memory()
    found = f"{human_bytes(available)} of {human_bytes(total)} can still be had"
    if available < 2 << 30:
        why = "Loading torch and reading data takes 1 to 2 GB per process; the system kills what takes more."
        yield MEMORY.warning(found, why, "Free memory, or raise the limit of the container.")
    else:
        yield MEMORY.ok(found)
    swapped = (int(sizes.get("SwapTotal", 0)) - int(sizes.get("SwapFree", 0))) << 10
    if swapped > 1 << 30:
        why = "A process that is swapped out stops the others that wait for it."
        yield MEMORY.warning(f"{human_bytes(swapped)} are swapped out", why, "Free memory.")
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        why = "Processes of one run exchange data there (NCCL, reader processes, memory checkpoints)."
        yield MEMORY.warning("there is no /dev/shm", why, "Mount a tmpfs there.")
        return
    size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    found = f"/dev/shm: {human_bytes(free)} of {human_bytes(size)} free"
    if free < SMALL_SHM:
        why = "Containers get 64 MB by default; NCCL and reader processes then end with a bus error."
        yield MEMORY.warning(found, why, "Start the container with --ipc=host or --shm-size=16g.")
    else:
        yield MEMORY.ok(found)


def look_at_limits() -> Iterator[DoctorFinding]:
    """`ulimit`: what this process may take."""
    kinds = {name: getattr(resource, f"RLIMIT_{name.upper()}", None) for name in ULIMITS}
    limits = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items() if kind is not None}
    endless = resource.RLIM_INFINITY
    shown = ", ".join(f"{name} {'unlimited' if value == endless else value}" for name, value in limits.items())
    yield LIMITS.ok(f"ulimits: {shown}")
    files = limits.get("nofile", endless)
    if files != endless and files < FEW_FILES:
        why = "Shards, sockets and reader processes each take file descriptors."
        yield LIMITS.warning(f"at most {files} open files", why, "`ulimit -n 65536` before the run.")
    if limits.get("as", endless) != endless:
        why = "CUDA reserves much more address space than it uses, and fails below such a limit."
        yield LIMITS.warning("the address space is limited", why, "`ulimit -v unlimited`.")
    if limits.get("fsize", endless) != endless:
        why = "A checkpoint or shard larger than that cannot be written."
        yield LIMITS.warning("the size of files is limited", why, "`ulimit -f unlimited`.")
    if list((SYS / "class/infiniband").glob("*")) and limits.get("memlock", endless) != endless:
        why = "InfiniBand registers locked memory; NCCL fails or falls back to TCP."
        yield LIMITS.warning("locked memory is limited", why, "`ulimit -l unlimited`, or --ulimit memlock=-1.")


def look_at_disk(folder: Path) -> Iterator[DoctorFinding]:
    """Kind, free space and speed of the disk that holds a folder, or will hold it."""
    there = next(place for place in [folder.absolute(), *folder.absolute().parents] if place.exists())
    kind = _file_system(there)
    space = os.statvfs(there)
    free = space.f_bavail * space.f_frsize
    found = f"{there}: {human_bytes(free)} free ({kind or 'kind of disk unknown'})"
    why = (
        f"A checkpoint takes {CHECKPOINT_BYTES:g} bytes per parameter with AdamW, and three are kept; packed text 2 to "
        f"4 bytes per token."
    )
    grade: Grade = "error" if free < TOO_LITTLE_DISK else "warning" if free < LITTLE_DISK else "ok"
    advice = "" if grade == "ok" else "Free space, or choose another workspace with --work."
    yield DISK.graded(grade, found, "" if grade == "ok" else why, advice)
    if space.f_files and space.f_favail < 10_000:
        yield DISK.warning(f"only {space.f_favail:,} inodes are free", "New files fail.", "Delete files.")
    if kind in ("tmpfs", "ramfs"):
        why = "What is written there takes memory and is lost with the machine."
        yield DISK.warning(f"{there} lies in memory ({kind})", why, "Use a disk for the workspace.")
    if kind == "overlay":
        why = "What is written there is lost with the container."
        yield DISK.note(f"{there} belongs to the container", why, "Mount a volume for the workspace.")
    if kind in NETWORK_DISKS:
        why = "Its speed depends on others, and commits of checkpoints wait for it."
        yield DISK.note(f"{there} is a network disk ({kind})", why, "Keep packed data on a local disk.")
    yield _disk_speed(there, free)


def _file_system(folder: Path) -> str:
    """The type of the file system, from the longest mount point above the folder."""
    mounts = [line.split() for line in read(PROC / "self/mounts").splitlines()]
    above = [(words[1], words[2]) for words in mounts if len(words) > 2 and folder.resolve().is_relative_to(words[1])]
    return max(above, key=lambda pair: len(pair[0]), default=("", ""))[1]


def _disk_speed(folder: Path, free: int) -> DoctorFinding:
    """Write a temporary file, at most 64 MiB and for 1.5 s, force it to the disk, read it back, delete it."""
    if free < 4 * TEST_BYTES:
        return DISK.note("its speed was not measured: too little space for the test file")
    path = folder / f".z2a-doctor-{os.getpid()}"
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        why = "Every stage writes into the workspace."
        advice = "Choose a folder you can write to with --work."
        return DISK.error(f"{folder} cannot be written to ({error.strerror})", why, advice)
    try:
        path.unlink()  # gone with the process, however it ends
        written, write_seconds = _write(number)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)  # else the reading would be one of memory
        started = time.perf_counter()
        os.lseek(number, 0, os.SEEK_SET)
        while os.read(number, BLOCK_BYTES) and time.perf_counter() - started < TEST_SECONDS:
            pass
        done = os.lseek(number, 0, os.SEEK_CUR)
        read_speed = done / (time.perf_counter() - started)
    except OSError as error:
        why = "Every stage writes into the workspace."
        return DISK.error(f"writing to {folder} failed ({error.strerror})", why, "Check the disk.")
    finally:
        os.close(number)
    speed = written / write_seconds
    found = f"written with fsync {speed / 1e6:,.0f} MB/s, read {read_speed / 1e6:,.0f} MB/s ({written >> 20} MiB)"
    if speed < SLOW_DISK:
        why = f"A checkpoint of 1 B parameters has {CHECKPOINT_BYTES:g} GB with AdamW: two minutes at 100 MB/s."
        return DISK.warning(found, why, "Use a faster disk for the workspace, or save less often.")
    return DISK.ok(found)


def _write(number: int) -> tuple[int, float]:
    block = os.urandom(BLOCK_BYTES)  # some disks compress
    started = time.perf_counter()
    written = 0
    while written < TEST_BYTES and time.perf_counter() - started < TEST_SECONDS:
        written += os.write(number, block)
    os.fsync(number)
    return written, time.perf_counter() - started


def look_at_network() -> Iterator[DoctorFinding]:
    """Network cards with their speed; InfiniBand ports with their state."""
    shown = []
    for card in sorted((SYS / "class/net").glob("*")):
        if card.name == "lo" or read(card / "operstate") == "down":
            continue
        with suppress(ValueError):
            shown.append((card.name, int(read(card / "speed") or -1)))
    rates = (f"{speed / 1000:g} Gbit/s" if speed > 0 else t("(speed unknown)") for _, speed in shown)
    listed = ", ".join(f"{name} {rate}" for (name, _), rate in zip(shown, rates, strict=True))
    yield NETWORK.ok(f"interfaces: {listed}" if listed else "no network interface but the loopback")
    ports = fast_ports(SYS)
    for port in ports:
        if port.is_active:
            yield NETWORK.ok(f"InfiniBand or RoCE port {port.name}: {port.rate}")
        else:
            why = "NCCL uses the other ports only, or TCP, which is many times slower."
            yield NETWORK.warning(f"port {port.name} is {port.state}", why, "Check cable, switch and subnet manager.")
    fastest = max((speed for _, speed in shown), default=-1)
    if not ports and 0 < fastest <= 10_000:
        seconds = 2e9 / (fastest * 125e3)  # each of two ranks sends 2 (n - 1) / n = 1 time the bytes
        found = f"the fastest interface has {fastest / 1000:g} Gbit/s"
        why = f"An all-reduce of 1 B bfloat16 gradients between two machines takes at least {seconds:.0f} s over it."
        advice = "It matters only for runs over several machines: use a faster link, or exchange less often."
        yield NETWORK.note(found, why, advice)
