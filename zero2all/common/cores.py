"""How many CPU cores this process may use, from Linux's own files."""

import os
from pathlib import Path

from zero2all.common.memory import GROUPS, OWN_GROUPS, group_folders


def read(path: Path) -> str:
    """A small file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_numbers(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def quota_cores(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> float | None:
    """How many cores the control groups around this process allow at once; None: no limit."""
    found: list[float] = []
    for version, folder in group_folders("cpu", groups, own_groups):
        words = read(folder / "cpu.max").split()
        if version == "v1":
            words = [read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def allowed_cpus() -> set[int]:
    """CPUs this process may run on; systems that cannot restrict a process (macOS) give all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Cores this process may use: those it may run on, or the share of time its container allows if that is less."""
    return max(1, min(len(allowed_cpus()), int(quota_cores() or len(allowed_cpus()))))
