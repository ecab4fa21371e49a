"""Buffers in memory under damage, kills and too little room: nothing that is not whole is ever taken."""

import inspect
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest

from tests.processes import Program
from zero2all.common.errors import BadInputError
from zero2all.common.fault import flip_byte
from zero2all.resilience import slots

VALUES = 500


def save(folder, step):
    """What a rank does at a save: the older of its two buffers takes every value of the step."""
    path = slots.slot_paths(folder, 0)[step % 2]
    slot = slots.Slot(path, VALUES * 8)
    slot.begin(step)
    np.frombuffer(slot.data, dtype=np.int64)[:] = np.arange(VALUES) * step
    slot.finish(step, {"step": step})
    slot.close()


def newest(folder):
    """The newest step that is whole, every byte of it checked; -1: none. Its values must be those of that step."""
    steps = [-1]
    for path in slots.slot_paths(folder, 0):
        try:
            found = slots.read_slot(path, with_data=True)
        except BadInputError:
            continue
        values = np.frombuffer(path.read_bytes()[slots.PAGE :][: found.data_bytes], dtype=np.int64)
        assert (values == np.arange(VALUES) * found.step).all()
        assert found.about == {"step": found.step}
        steps.append(found.step)
    return max(steps)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "ram").mkdir()
    (tmp_path / "run").mkdir()
    name = slots.run_id(tmp_path / "run", create=True)
    folder = slots.make_run_folder(slots.ram_home(tmp_path / "ram"), name, tmp_path / "run")
    os.close(slots.lock_folder(folder, is_first=True))
    for step in (1, 2):
        save(folder, step)
    return tmp_path / "run"


@pytest.fixture
def two_steps(run, tmp_path):
    return slots.ram_home(tmp_path / "ram") / slots.run_id(run)


def path_of(folder, step):
    return next(found.path for found in slots.whole_slots(folder) if found.step == step)


def test_of_500_byte_flips_none_is_accepted_and_the_older_state_is_used(two_steps):
    assert newest(two_steps) == 2
    path, rng = path_of(two_steps, 2), random.Random(0)
    whole = path.read_bytes()
    for _ in range(500):
        place, flip = rng.randrange(len(whole)), rng.randrange(1, 256)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        assert newest(two_steps) == 1, place
    for size in (0, 100, slots.PAGE, 5000):
        path.write_bytes(whole[:size])
        assert newest(two_steps) == 1, "cut short"


def test_a_link_in_the_place_of_a_buffer_is_not_followed(two_steps, tmp_path):
    path = path_of(two_steps, 2)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match="cannot be read"):
        slots.read_slot(path)


KILLED = f"""
import sys
from pathlib import Path
import numpy as np
from zero2all.resilience import slots
VALUES = {VALUES}
{inspect.getsource(save)}
step = int(sys.argv[2])
while True:
    step += 1
    print("begun", flush=True)
    save(Path(sys.argv[1]), step)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_during_the_copy_leaves_a_whole_state(tmp_path, two_steps, warm, kills):
    rng, last = random.Random(kills), 2
    for number in range(kills):
        program = Program(warm, KILLED, [str(two_steps), str(last)], tmp_path / f"output-{number}.txt")
        saves = rng.randint(3, 6)  # one is begun when the one before is finished
        program.wait_until(lambda one=program, saves=saves: one.text().count("begun") >= saves)
        time.sleep(rng.uniform(0.0, 0.005))
        program.signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL, program.text()
        found = newest(two_steps)
        assert found > last
        last = found


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
    def refused() -> str:
        with pytest.raises(slots.NoMemoryFolderError) as caught:
            slots.ram_home(tmp_path)
        return str(caught.value)

    home = tmp_path / f"zero2all-{os.getuid()}"
    home.mkdir()
    home.chmod(0o755)
    assert "not a folder of this user alone" in refused()
    if os.geteuid() == 0:  # only root can give a folder to another user
        home.chmod(0o700)
        os.chown(home, 12345, 12345)
        assert "not a folder of this user alone" in refused()
    home.rmdir()
    home.symlink_to("/tmp")
    assert "not a folder of this user alone" in refused()


def test_folders_of_runs_that_are_gone_are_removed_unless_in_use(run, two_steps, monkeypatch):
    home = two_steps.parent
    held = slots.lock_folder(two_steps, is_first=True)
    monkeypatch.setattr(slots, "LOCK_SECONDS", 0.0)
    os.close(slots.lock_folder(two_steps, is_first=False))
    with pytest.raises(slots.NoMemoryFolderError, match="another process uses"):
        slots.lock_folder(two_steps, is_first=True)
    shutil.rmtree(run)
    assert slots.sweep_stale(home, "other") == []
    os.close(held)
    assert slots.sweep_stale(home, "other") == [str(run)]
    assert not two_steps.exists()


def test_a_copy_of_a_run_does_not_take_the_memory_of_the_first_which_can_be_removed(run, two_steps, tmp_path):
    shutil.copytree(run, run.with_name("copy"))
    assert slots.run_id(run.with_name("copy")) is None
    assert slots.run_id(run) is not None
    slots.remove(run, tmp_path / "ram")
    assert not two_steps.exists()


def test_a_folder_or_a_buffer_that_another_process_removes_is_passed_over(two_steps):
    found = slots.whole_slots(two_steps)
    first = next(found)
    for path in two_steps.iterdir():
        path.unlink()
    assert list(found) == []  # the names were known before
    two_steps.rmdir()
    assert list(slots.whole_slots(two_steps)) == []
    assert first.step in (1, 2)
