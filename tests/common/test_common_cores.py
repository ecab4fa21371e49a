"""Cores that may be used: one function knows, and everybody asks it."""

from __future__ import annotations

import re
from pathlib import Path

from zero2all.common import cores
from zero2all.common.engine import EngineConfig, open_engine
from zero2all.measure.doctor.software import look_at_environment

PACKAGE = Path(__file__).parents[2] / "zero2all"


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
