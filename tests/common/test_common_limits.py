"""What a container leaves: cores, which one function counts for everybody, and memory."""

import re
from pathlib import Path

import psutil
import pytest

from zero2all.common import cores
from zero2all.common.engine import EngineConfig, open_engine
from zero2all.common.memory import available_memory
from zero2all.measure.doctor.software import look_at_environment

PACKAGE = Path(__file__).parents[2] / "zero2all"
MB = 10**6


def test_a_container_with_the_time_of_four_cores_on_64_gets_four_workers(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("400000 100000")
    (tmp_path / "own").write_text("0::/")
    limits = cores.quota_cores
    monkeypatch.setattr(cores, "quota_cores", lambda: limits(tmp_path, tmp_path / "own"))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores.usable_cores() == 4
    with open_engine(EngineConfig()) as engine:
        assert engine.workers == 4
    (finding,) = look_at_environment({"OMP_NUM_THREADS": "8"})
    assert "4 CPUs" in finding.why


def test_nobody_else_asks_the_system_how_many_cores_there_are():
    asks = re.compile(r"cpu_count\(|sched_getaffinity\(|process_cpu_count")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())}
    assert found == {"common/cores.py", "measure/doctor/host.py"}, "the doctor names the CPUs of the machine, too"


def group(folder: Path, limit: object, used: int, cached: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    files = f"{prefix}active_file {cached // 2}\n{prefix}inactive_file {cached // 2}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{files}")


def available(tmp_path: Path, *own_groups: str) -> int:
    (tmp_path / "own").write_text("".join(f"{line}\n" for line in own_groups))
    return available_memory(tmp_path / "cg", tmp_path / "own")


def test_without_control_groups_memory_is_what_the_machine_has(tmp_path):
    free = pytest.approx(psutil.virtual_memory().available, rel=0.3)
    assert available_memory(tmp_path / "none", tmp_path / "missing") == free
    assert available(tmp_path, "0::/", "garbage", "") == free


def test_the_tightest_group_around_the_process_counts_and_cached_files_are_free(tmp_path):
    group(tmp_path / "cg", "max", 900 * MB)
    group(tmp_path / "cg/job", 30 * MB, 25 * MB, cached=4 * MB)
    group(tmp_path / "cg/job/task", 100 * MB, 1 * MB)
    assert available(tmp_path, "0::/job/task") == 9 * MB
    group(tmp_path / "cg/job", 30 * MB, 31 * MB)
    assert available(tmp_path, "0::/job/task") == 0


def test_a_path_that_only_the_host_knows_means_the_root_of_the_container(tmp_path):
    group(tmp_path / "cg", 30 * MB, 10 * MB)
    assert available(tmp_path, "0::/docker/0123abcd") == 20 * MB


def test_groups_of_version_1_count_too(tmp_path):
    group(tmp_path / "cg/memory", 2**63 - 4096, 5 * MB, version=1)
    group(tmp_path / "cg/memory/job", 30 * MB, 20 * MB, cached=2 * MB, version=1)
    assert available(tmp_path, "5:cpu,cpuacct:/x", "4:memory:/job", "0::/") == 12 * MB
