"""How much memory this process can still get.

What the kernel has left for the machine, or what a control group (a container, a service, a job) leaves of its limit if
that is less. Cached files count as free in both: the kernel gives them up when memory is asked for.
"""

from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FILES = {"v2": ("memory.max", "memory.current", ""), "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
"""Limit, usage, and how the names in memory.stat begin that count a group with those below it."""


def available_memory(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """Bytes that can be had now."""
    import psutil

    folders = group_folders("memory", groups, own_groups)
    left = (_left_in(folder, *FILES[version]) for version, folder in folders)
    return min([int(psutil.virtual_memory().available), *(size for size in left if size is not None)])


def group_folders(controller: str, groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> Iterator[tuple[str, Path]]:
    """This process's control group and those around it, each of which may have a limit; v1 or v2, and the folder."""
    try:
        lines = own_groups.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        version, root = ("v1", groups / controller) if controllers else ("v2", groups)
        # Inside a container the path may be the host's, which is not to be seen: its root is then the own group.
        own = root / path.lstrip("/")
        for folder in [own, *own.parents]:
            yield version, folder
            if folder == root:
                break


def _left_in(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    """What a control group has left; None where there is no such group, or no limit ("max")."""
    try:
        highest, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return None
    return max(0, highest - used + cached)
