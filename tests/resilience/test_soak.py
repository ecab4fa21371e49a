"""Random faults for a time, then the same steps without faults: all bits are equal. `make soak`: SOAK_MINUTES (30), one
fault in SOAK_EVERY seconds (120), up to 4 ranks."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.conftest import small_config
from zero2all.common.errors import PreemptedError
from zero2all.common.fault import FAULTS
from zero2all.config import config_yaml
from zero2all.resilience.chaos import PlannedFault, happened, install_plan
from zero2all.track.goodput import run_goodput
from zero2all.track.reader import RunReader
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.checkpoints.load import verified_checkpoint

LIMITS = {"start": 120.0, "first_step": 10.0, "step": 5.0, "data": 5.0, "save": 30.0}
"""Seconds; the learned ones begin at 60, and the first steps after a start may take 1800."""
PLAIN_FAULTS = ["segfault", "raise", "stop", "sleep", "hold_gil"]
PLAIN_FAULTS += ["slow", "disk_full", "io_error", "flip_file", "store_lost"]
RECOVERY_SECONDS = 45.0  # there is no fault so shortly before the end


def soak_plan(seconds: float, every: float, ranks: int, has_memory: bool, seed: int) -> list[PlannedFault]:
    """Random faults, one in each interval of `every` seconds, of the kinds after which a run of the same size has the
    same bits. All kinds come before one comes again. Damage is followed by a kill, so that the restart meets it."""
    rng = random.Random(seed)
    kinds: list[tuple[str, str | None]] = [("kill", point) for point in ("step", "update", "file", "rename", "delete")]
    kinds += [(fault, None) for fault in PLAIN_FAULTS]
    kinds += [("kill", "memory"), ("flip_memory", None)] if has_memory else []
    left, faults = list[tuple[str, str | None]](), []
    end = seconds - RECOVERY_SECONDS  # also of a fault that waits for a save: the last one would be that of the end
    for number in range(int(seconds // every)):
        left = left or rng.sample(kinds, len(kinds))
        fault, point = left.pop()
        # Rank 0 alone commits, deletes and serves the store.
        rank = 0 if point in ("rename", "delete") or fault == "store_lost" else rng.randrange(ranks)
        after = round((number + rng.uniform(0.1, 0.3)) * every, 1)  # early: in a short soak the last one can be seen
        if after > end:
            break
        lasts = 3.0 if fault == "slow" else None
        faults.append(PlannedFault(fault, rank, point=point, after=after, before=end, seconds=lasts))
        if fault.startswith("flip_"):
            faults.append(PlannedFault("kill", rank, after=after, before=end))
    return faults


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
    minutes, every = int(os.environ.get("SOAK_MINUTES", "30")), int(os.environ.get("SOAK_EVERY", "120"))
    config = small_config(
        model={"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
        train={"steps": 10_000_000},
        checkpoint={"every_steps": 500},
        validation={"every_steps": 0, "tokens_per_source": 128},
        parallel={"device": "cpu", "cpu_threads": 1, "processes": min(4, os.cpu_count() or 1)},
        resilience={"supervise": True, "limits": LIMITS, "memory_every_steps": 50},
    )
    path = tmp_path / "soak.yaml"
    path.write_text(config_yaml(config))
    seconds = minutes * 60.0
    faults = soak_plan(seconds, every, config.parallel.processes, has_memory=True, seed=0)
    ends = ("--resilience.supervise", "true", "--resilience.deadline", str(seconds))
    code, marks, log = trained(work, path, "soak", faults, *ends)
    soaked, newest = work.run("soak"), newest_checkpoint(work.run("soak"))
    assert code in (0, PreemptedError.exit_code), log.read_text()[-3000:]
    assert newest is not None, log.read_text()[-3000:]
    print(f"{len(faults)} faults planned, {len(marks)} happened; goodput {run_goodput(RunReader(soaked))}")
    save = ("--checkpoint.every_steps", str(newest.step), "--resilience.memory_every_steps", "0", "--no-supervisor")
    trained(work, path, "undisturbed", [PlannedFault("terminate", 0, step=newest.step)], *save)
    assert bits(soaked, newest.step) == bits(work.run("undisturbed"), newest.step)


def trained(work, config: Path, name: str, plan: Sequence[PlannedFault], *words: str) -> tuple[int, dict, Path]:
    """The exit code of a run under a plan, the faults that happened, and the file with its output."""
    path = install_plan(plan, work.root / "chaos", work.run(name), None, fresh=True)
    command = [sys.executable, "-m", "zero2all", "train", str(config), "--work", str(work.root), "--fresh"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "Z2A_LANG": "en", FAULTS: str(path)}
    log = path.with_suffix(".log")
    command += ["--train.name", name, *words]
    with open(log, "wb") as output:
        done = subprocess.run(command, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
    return done.returncode, happened(path), log


def bits(run: Path, step: int) -> dict[str, str]:
    """The checksums of all tensors of a checkpoint that was verified."""
    files = verified_checkpoint(checkpoint_folder(run, step)).manifest["files"].items()
    return {name: facts["crc32c"] for name, facts in files if name.endswith(".safetensors")}
