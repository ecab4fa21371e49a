"""How much memory can be had: the machine's, or what a control group leaves."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from zero2all.common.memory import available_memory

MB = 10**6


def group(folder: Path, limit: object, used: int, cached: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(
        f"anon 5\n{prefix}active_file {cached // 2}\n{prefix}inactive_file {cached // 2}\n"
    )


def own(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "own"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_without_control_groups_it_is_what_the_machine_has(tmp_path):
    free = psutil.virtual_memory().available
    for own_groups in (tmp_path / "missing", own(tmp_path, "0::/", "garbage", "")):
        assert available_memory(tmp_path / "none", own_groups) == pytest.approx(free, rel=0.3)


def test_the_tightest_group_around_the_process_counts_and_cached_files_are_free(tmp_path):
    group(tmp_path / "cg", "max", 900 * MB)
    group(tmp_path / "cg/job", 30 * MB, 25 * MB, cached=4 * MB)
    group(tmp_path / "cg/job/task", 100 * MB, 1 * MB)
    assert available_memory(tmp_path / "cg", own(tmp_path, "0::/job/task")) == 9 * MB
    group(tmp_path / "cg/job", 30 * MB, 31 * MB)
    assert available_memory(tmp_path / "cg", own(tmp_path, "0::/job/task")) == 0


def test_a_path_that_only_the_host_knows_means_the_root_of_the_container(tmp_path):
    group(tmp_path / "cg", 30 * MB, 10 * MB)
    assert available_memory(tmp_path / "cg", own(tmp_path, "0::/docker/0123abcd")) == 20 * MB


def test_groups_of_version_1_count_too(tmp_path):
    group(tmp_path / "cg/memory", 2**63 - 4096, 5 * MB, version=1)
    group(tmp_path / "cg/memory/job", 30 * MB, 20 * MB, cached=2 * MB, version=1)
    assert available_memory(tmp_path / "cg", own(tmp_path, "5:cpu,cpuacct:/x", "4:memory:/job", "0::/")) == 12 * MB
