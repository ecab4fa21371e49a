"""Buffers in memory under damage, kills and too little room: nothing that is not whole is ever taken."""

from __future__ import annotations

import inspect
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.common.fault import flip_byte
from zero2all.resilience import slots
from zero2all.resilience.library import MemoryCheckpoint

ROOT = Path(__file__).parents[2]


def state_of(step):
    values = torch.arange(500, dtype=torch.float32) * step  # every value follows from the step
    return {"model": {"weight": values}, "optimizer": {0: {"step": step, "betas": (0.9, 0.95)}}, "empty": [None, ""]}


def equal(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture
def two_steps(tmp_path):
    """A run with steps 1 and 2 in memory; its folder there."""
    (tmp_path / "ram").mkdir()
    memory = MemoryCheckpoint(tmp_path / "run", tmp_path / "ram")
    for step in (1, 2):
        assert memory.save(step, state_of(step))
        memory.wait()
    memory.close()
    return next((tmp_path / "ram").glob("zero2all-*/*"))


def loaded(tmp_path):
    memory = MemoryCheckpoint(tmp_path / "run", tmp_path / "ram")
    try:
        return memory.load()
    finally:
        memory.close()


def test_of_500_byte_flips_none_is_accepted_and_the_older_state_is_used(tmp_path, two_steps):
    newest = next(found.path for found in slots.whole_slots(two_steps) if found.step == 2)
    whole, rng = newest.read_bytes(), random.Random(0)
    memory = MemoryCheckpoint(tmp_path / "run", tmp_path / "ram")
    assert memory.load()[0] == 2
    for _ in range(500):
        place, flip = rng.randrange(len(whole)), rng.randrange(1, 256)
        newest.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        step, state = memory.load()
        assert step == 1, place
    assert equal(state, state_of(1))
    memory.close()


@pytest.mark.parametrize("size", [0, 100, slots.PAGE, 5000])
def test_a_file_cut_short_is_not_accepted(tmp_path, two_steps, size):
    newest = next(found.path for found in slots.whole_slots(two_steps) if found.step == 2)
    os.truncate(newest, size)
    assert loaded(tmp_path)[0] == 1


KILLED = f"""
import sys
import torch
{inspect.getsource(state_of)}
from zero2all.resilience.library import MemoryCheckpoint
memory = MemoryCheckpoint(sys.argv[1], sys.argv[2])
found = memory.load()
step = 0 if found is None else found[0]
while True:
    if memory.save(step + 1, state_of(step + 1)):
        step += 1
        print("begun", flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_during_the_copy_leaves_a_whole_state(tmp_path, warm, kills):
    from tests.processes import Program

    (tmp_path / "ram").mkdir()
    rng, last = random.Random(kills), 0
    for number in range(kills):
        arguments = [str(tmp_path / "run"), str(tmp_path / "ram")]
        program = Program(warm, KILLED, arguments, tmp_path / f"output-{number}.txt")
        saves = rng.randint(2, 6)  # one is begun when the one before is finished
        program.wait_until(lambda one=program, saves=saves: one.text().count("begun") >= saves)
        time.sleep(rng.uniform(0.0, 0.005))
        program.signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL, program.text()
        found = loaded(tmp_path)
        assert equal(found[1], state_of(found[0]))
        assert found[0] > last
        last = found[0]


TOGETHER = f"""
import sys
import torch, torch.distributed as dist
{inspect.getsource(state_of)}
from zero2all.resilience.library import MemoryCheckpoint
rank = int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[4], 2), rank=rank, world_size=2)
memory = MemoryCheckpoint(sys.argv[1], sys.argv[2])
for step in (1, 2):
    assert memory.save(step, state_of(step))
    memory.wait()
newest = max(memory._steps(), key=memory._steps().get)
if rank == 1:
    newest.write_bytes(b"")  # so that this rank has step 1 only
print("loaded step", memory.load()[0])
"""


def test_two_ranks_load_the_newest_step_that_both_have(tmp_path, warm):
    from tests.processes import Program

    (tmp_path / "ram").mkdir()
    words = [str(tmp_path / "run"), str(tmp_path / "ram")]
    programs = [
        Program(warm, TOGETHER, [*words, str(rank), str(tmp_path / "store")], tmp_path / f"{rank}.txt")
        for rank in range(2)
    ]
    for program in programs:
        assert program.wait() == 0, program.text()
        assert "loaded step 1" in program.text()


def test_a_buffer_that_is_not_mapped_is_written_in_threads_and_checked_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr("zero2all.common.checksum.PIECE_BYTES", 3 * slots.PAGE)
    monkeypatch.setattr(slots, "READ_BYTES", slots.PAGE)
    monkeypatch.setattr(slots, "_threads", lambda: 3)
    path, data = tmp_path / "a-00000", np.random.default_rng(1).integers(0, 256, 10 * slots.PAGE + 5, dtype=np.uint8)
    slot = slots.Slot(path, len(data), is_mapped=False)
    for step in (4, 8):
        slot.begin(step)
        with pytest.raises(BadInputError, match="not finished"):
            slots.read_slot(path)
        slot.finish(step, {"save": str(step)}, data)
        found = slots.read_slot(path, with_data=True)
        assert (found.step, found.about) == (step, {"save": str(step)})
    assert path.read_bytes()[slots.PAGE :][: len(data)] == data.tobytes()
    slot.close()
    flip_byte(path, slots.PAGE + 7 * slots.PAGE)
    with pytest.raises(BadInputError, match="crc32c differs"):
        slots.read_slot(path, with_data=True)


def test_a_folder_of_another_user_or_open_to_others_is_refused(tmp_path):
    home = tmp_path / f"zero2all-{os.getuid()}"
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    with pytest.raises(slots.NoMemoryFolderError, match="not a folder of this user alone"):
        MemoryCheckpoint(tmp_path / "run", tmp_path)
    if os.geteuid() == 0:  # only root can give a folder to another user
        home.chmod(0o700)
        os.chown(home, 12345, 12345)
        with pytest.raises(slots.NoMemoryFolderError, match="not a folder of this user alone"):
            MemoryCheckpoint(tmp_path / "run", tmp_path)
    home.rmdir()
    home.symlink_to("/tmp")
    with pytest.raises(slots.NoMemoryFolderError, match="not a folder of this user alone"):
        MemoryCheckpoint(tmp_path / "run", tmp_path)
    with pytest.raises(slots.NoMemoryFolderError, match="there is no folder"):
        MemoryCheckpoint(tmp_path / "run", tmp_path / "none")


def test_a_link_in_the_place_of_a_buffer_is_not_followed(tmp_path, two_steps):
    newest = next(found.path for found in slots.whole_slots(two_steps) if found.step == 2)
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match="cannot be read"):
        slots.read_slot(newest)
    assert loaded(tmp_path)[0] == 1


def test_folders_of_runs_that_are_gone_are_removed_unless_in_use(tmp_path, two_steps):
    home = two_steps.parent
    held = slots.lock_folder(two_steps, is_first=True)
    shutil.rmtree(tmp_path / "run")
    assert slots.sweep_stale(home, "other") == []
    os.close(held)
    assert slots.sweep_stale(home, "other") == [str(tmp_path / "run")]
    assert not two_steps.exists()


def test_a_copy_of_a_run_does_not_take_the_memory_of_the_first(tmp_path, two_steps):
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    memory = MemoryCheckpoint(tmp_path / "copy", tmp_path / "ram")
    assert memory.load() is None
    memory.close()
    assert loaded(tmp_path)[0] == 2


def test_remove_takes_the_files_of_one_run(tmp_path, two_steps):
    slots.remove(tmp_path / "run", tmp_path / "ram")
    assert not two_steps.exists()
    assert loaded(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize(("example", "steps"), [("memory_plain.py", 20), ("memory_hugging_face.py", 7)])
def test_the_examples_continue_after_a_kill_with_the_same_bits(tmp_path, example, steps):
    if "hugging" in example:
        pytest.importorskip("accelerate")
    (tmp_path / "ram").mkdir()

    def run(name: str, *arguments: str) -> list[str]:
        command = [sys.executable, str(ROOT / "examples" / example), str(tmp_path / name), str(tmp_path / "ram")]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == (-signal.SIGKILL if arguments else 0), done.stderr
        return [line for line in done.stdout.splitlines() if "loss " in line or "weights" in line]

    whole = run("whole")
    run("killed", str(steps))
    resumed = run("killed")
    assert 0 < len(resumed) <= len(whole)
    assert resumed == whole[-len(resumed) :]
    assert list((tmp_path / "ram").glob("zero2all-*/*")) == []


def test_a_folder_or_a_buffer_that_another_process_removes_is_passed_over(two_steps):
    found = slots.whole_slots(two_steps)
    first = next(found)
    for path in two_steps.iterdir():
        path.unlink()
    assert list(found) == []  # the names were known before
    two_steps.rmdir()
    assert list(slots.whole_slots(two_steps)) == []
    assert first.step in (1, 2)
