"""Processes that die while they save: what is there afterwards is the old checkpoint or the new one, never a half one.

A child is killed at every single file operation of a save and of the deletion that follows, or of going back. A power
cut also loses what was written but not flushed; the order of flushes and renames is therefore checked on its own.
"""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.train.states import steps_of
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.retention import Retention, VerifiedSteps, pins, prune, sweep
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import write_checkpoint

SAVING = """
import os, signal, sys
from pathlib import Path
import torch
from zero2all.train.checkpoints.retention import Retention
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
run = Path(sys.argv[1])
store = CheckpointStore(run, retention=Retention(keep_last=2))
def save(step, wait=False):
    tensors = {f"{group}/{n}": torch.full((20_000,), float(step)) for group in ("model", "optimizer") for n in range(4)}
    return store.save(step, Snapshot.of_tensors(tensors, {"step": step}), {}, wait)
"""
AT_EVERY_OPERATION = """
import itertools, shutil
operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}
def work_until(operation):
    left = operation
    def count(event, arguments):
        nonlocal left
        if event in operations:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    is_done = work()
    left = -1
    os._exit(0 if is_done else 1)
for operation in itertools.count(1):  # each in a child of its own
    store.run = shutil.copytree(run, run.with_name(f"killed-{operation:03d}"))
    child = os.fork()
    if child == 0:
        work_until(operation)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if exit_code != -signal.SIGKILL:
        sys.exit(exit_code)
"""

SAVE = """
def work():
    result = save(3, wait=True).result
    return result.problem is None and result.deleted_steps == [1]
"""
GO_BACK = """
def work():
    return store.go_back_to(1, "spikes") == [4, 3, 2]
"""


def snapshot(step: int) -> Snapshot:
    return Snapshot.of_tensors({"model/3": torch.full((3,), float(step))}, {"step": step})


def check(run: Path) -> int:
    """The step of the newest checkpoint. At least two are whole, and nothing half is taken for a checkpoint."""
    for folder in list_checkpoints(run):
        checkpoint = verified_checkpoint(folder)  # raises when anything under a final name is damaged
        assert {float(value) for value in checkpoint.tensors("model/")["3"].unique()} == {float(checkpoint.step)}
        assert checkpoint.record == {"step": checkpoint.step}
    assert len(list_checkpoints(run)) >= 2
    newest = newest_checkpoint(run).step
    sweep(run)
    assert not list(run.rglob("*.partial-*"))
    return newest


@pytest.fixture
def place():
    """Memory, where there is some: hundreds of files are fsynced here, and a kill leaves what was written anyway."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def done(start):

    def run(folder: Path, code: str) -> None:
        process = start(folder, code=SAVING + code)
        assert process.wait() == 0, process.text()

    return run


def test_a_power_cut_finds_nothing_renamed_that_was_not_on_the_disk_before(tmp_path, monkeypatch):
    flush, rename, durable, committed = os.fsync, Path.rename, [], []

    def record_flush(handle):
        flush(handle)
        durable.append(Path(f"/proc/self/fd/{handle}").readlink())

    def record_rename(source, target):
        if target.name.startswith("step-"):
            files = {path.name for path in source.iterdir()}
            assert files == {path.name for path in durable if path.parent == source}
            manifest = max(place for place, path in enumerate(durable) if path.name.startswith("manifest.json"))
            assert source in durable[manifest:]  # its name, too
            committed.append(len(durable))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(Path, "rename", record_rename)
    write_checkpoint(tmp_path, 1, Snapshot.of_tensors({"model/a": torch.zeros(3), "optimizer/a": torch.zeros(3)}), {})
    assert len(committed) == 1
    assert durable[committed[0]] == tmp_path / "checkpoints"  # at once after the rename


def test_a_kill_at_every_file_operation_of_a_save_leaves_old_or_new(place, done):
    done(place / "two", "assert all(save(step, wait=True).result.folder for step in (1, 2))")
    done(place / "two", SAVE + AT_EVERY_OPERATION)
    killed = sorted(place.glob("killed-*"))
    left_half = [bool(list(run.rglob("*.partial-*"))) for run in killed]
    newest = [check(run) for run in killed]
    assert newest == sorted(newest)  # once committed, for good
    assert set(newest) == {2, 3}
    assert newest.count(2) > 8
    assert newest.count(3) > 4  # killed while deleting
    assert sum(left_half) > 10
    # and where a save was cut short, the next one is whole
    done(killed[5], "assert save(3, wait=True).result.folder")
    assert newest_checkpoint(killed[5]).step == 3


def test_a_kill_at_every_file_operation_of_going_back_never_costs_the_checkpoint_that_is_gone_back_to(place, done):
    for step in range(1, 5):
        write_checkpoint(place / "four", step, snapshot(step), {})
    done(place / "four", GO_BACK + AT_EVERY_OPERATION)
    moved = []
    for killed in sorted(place.glob("killed-*")):
        left = steps_of(killed)
        moved.append(4 - len(left))
        assert left[-1] == 1
        assert 1 in pins(killed) or left == [4, 3, 2, 1], "pinned before the first is moved"
        sweep(killed)
        for step in (5, 6):  # the run goes on from there
            write_checkpoint(killed, step, snapshot(step), {})
        prune(killed, Retention(keep_last=2), VerifiedSteps())
        assert (killed / "checkpoints/step-00000001").is_dir() or moved[-1] == 0
    assert sorted(set(moved)) == [0, 1, 2, 3]
