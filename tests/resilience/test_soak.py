"""`z2a chaos soak`, as `make soak` runs it: SOAK_MINUTES (30), one fault in SOAK_EVERY seconds (120), up to 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all.config import config_yaml
from zero2all.resilience.chaos import soak_plan

LIMITS = {"start": 120.0, "first_step": 10.0, "step": 5.0, "data": 5.0, "save": 30.0}
"""Seconds; the learned ones begin at 60, and the first steps after a start may take 1800."""


def test_a_soak_has_one_fault_in_each_interval_all_kinds_and_is_the_same_for_the_same_seed():
    plan = soak_plan(2085.0, 120, ranks=4, has_memory=True, seed=3)
    assert plan == soak_plan(2085.0, 120, ranks=4, has_memory=True, seed=3)
    moments = sorted({fault.after for fault in plan})
    assert len(moments) == 17
    assert all(number * 120 < moment < (number + 1) * 120 for number, moment in enumerate(moments))
    assert len({(fault.fault, fault.point) for fault in plan}) == 17 + 1  # and the kill after damage
    assert {fault.before for fault in plan} == {2085.0 - 45.0}  # nothing is left for the save at the end
    assert all(fault.problems("", 4, 9) == [] for fault in plan)
    short = {fault.after for seed in range(20) for fault in soak_plan(120.0, 30, ranks=2, has_memory=False, seed=seed)}
    assert {int(moment // 30) for moment in short} == {0, 1, 2}  # the fourth would be in the last 45 s
    assert not [fault for fault in soak_plan(2085.0, 120, 4, False, 3) if "memory" in (fault.fault, fault.point)]


@pytest.mark.soak
def test_random_faults_leave_the_bits_of_the_undisturbed_run(work, tmp_path):
    from tests.train.conftest import small_config

    minutes, every = int(os.environ.get("SOAK_MINUTES", "30")), int(os.environ.get("SOAK_EVERY", "120"))
    config = small_config(
        model={"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
        train={"steps": 10_000_000},
        checkpoint={"every_steps": 500},
        eval={"every_steps": 0, "valid_tokens_per_source": 128},
        parallel={"device": "cpu", "cpu_threads": 1, "processes": min(4, os.cpu_count() or 1)},
        resilience={"supervise": True, "limits": LIMITS, "memory_every_steps": 50},
    )
    path = tmp_path / "soak.yaml"
    path.write_text(config_yaml(config))
    words = ["chaos", "soak", path, "--work", work.root, "--minutes", minutes, "--every", every]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "Z2A_LANG": "en"}
    command = [sys.executable, "-m", "zero2all", *map(str, words)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, [path.read_text()[-3000:] for path in Path(work.root).glob("chaos/*/*.log")]
    assert "bit by bit" in done.stdout
