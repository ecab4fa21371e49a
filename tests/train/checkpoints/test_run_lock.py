"""One writer per run: the living are respected, the dead are taken over, and nobody guesses about other machines."""

import errno
import json
import os
import signal
import socket
import threading
import time

import psutil
import pytest

from tests.waiting import wait_until
from zero2all.common import lock as lock_module
from zero2all.common.errors import BadInputError, LostRunError, RunLockedError
from zero2all.common.lock import this_process
from zero2all.train.checkpoints import run_lock
from zero2all.train.checkpoints.run_lock import hold_run

HOLDING = """
import sys, time
from pathlib import Path
from zero2all.train.checkpoints.run_lock import hold_run
with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
NO_FLOCK = """
import errno, fcntl
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
"""


def write_record(run, age_seconds=0.0, **fields):
    run.mkdir(exist_ok=True)
    record = {"host": "another-host", "boot": "b", "pid": 1, "started": 1.0, "token": "t", **fields}
    (run / "lock").write_text(json.dumps(record))
    then = time.time() - age_seconds
    os.utime(run / "lock", (then, then))


def refuse(*_):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def assert_locked(run, match, **how):
    with pytest.raises(RunLockedError, match=match), hold_run(run, **how):
        pass


def words_of(run, **how):
    """What who takes the lock over is told."""
    with hold_run(run, **how) as lock:
        return " ".join(lock.notes)


def test_a_lock_that_was_given_back_is_free_again_without_a_word(tmp_path):
    with hold_run(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == [], "nothing is left where nothing was written"
    for _ in range(2):
        with hold_run(tmp_path / "run") as lock:
            assert lock.notes == []
            lock.check()
            record = json.loads((tmp_path / "run/lock").read_text())
            assert (record["host"], record["pid"]) == (socket.gethostname(), os.getpid())
            assert record["started"] == psutil.Process().create_time()
            (tmp_path / "run/config.yaml").touch()
    assert (tmp_path / "run/lock").read_bytes() == b""


def test_a_living_holder_is_named_and_respected_and_a_dead_one_taken_over(tmp_path, start):
    holder = start(tmp_path / "run", code=HOLDING)
    holder.wait_until(lambda: "held" in holder.text())
    name = f"process {holder.pid} on {socket.gethostname()}"
    for take_over in (False, True):
        assert_locked(tmp_path / "run", f"{name} is running", take_over=take_over)
    assert RunLockedError.exit_code == 13
    holder.signal(signal.SIGKILL)
    holder.wait()
    assert words_of(tmp_path / "run") == f"took over the lock of {name}, which has ended"


def test_a_writer_in_another_container_keeps_its_run_on_a_disk_without_locks(tmp_path, in_pid_namespace, monkeypatch):
    run = tmp_path / "run"
    in_pid_namespace(NO_FLOCK + HOLDING, run)
    assert_locked(run, r"was last alive \d+ s ago", take_over=True)  # we have the flock; it could not take it
    monkeypatch.setattr("fcntl.flock", refuse)
    assert_locked(run, r"was last alive \d+ s ago", take_over=True)
    os.utime(run / "lock", (1, 1))
    assert "which has ended" in words_of(run), "silent for a minute"


def test_a_writer_killed_in_another_container_is_taken_over_at_once_on_a_disk_with_locks(tmp_path, in_pid_namespace):
    container = in_pid_namespace(HOLDING, tmp_path / "run")
    assert_locked(tmp_path / "run", "is running")
    container.kill()
    assert "which has ended" in words_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("facts", "age_seconds", "refusal"),
    [
        ({}, 0, "is running"),  # written, but not locked: where the disk has no locks
        ({"started": 1.0}, 0, None),  # its number was given to another process
        ({"boot": "before"}, 5, r"was last alive \d+ s ago"),  # before a restart, or on a namesake
        ({"boot": "before"}, 90, None),
    ],
)
def test_a_holder_of_this_host_is_dead_when_its_process_or_its_machine_has_ended(tmp_path, facts, age_seconds, refusal):
    write_record(tmp_path / "run", age_seconds, **{**this_process(), **facts})
    if refusal is not None:
        assert_locked(tmp_path / "run", refusal)
    else:
        assert "which has ended" in words_of(tmp_path / "run")


def test_one_on_another_host_is_taken_over_only_when_it_is_silent_and_a_person_says_so(tmp_path):
    run = tmp_path / "run"
    write_record(run, age_seconds=20)
    assert_locked(run, r"process 1 on another-host was last alive \d+ s ago", take_over=True)
    write_record(run, age_seconds=3600)
    assert_locked(run, r"last alive 36\d\d s ago.*--take-over")
    assert "took over the lock of process 1 on another-host, last alive 36" in words_of(run, take_over=True)


def test_the_next_attempt_of_several_machines_takes_the_lock_of_a_lost_machine_0_once_it_is_silent(tmp_path):
    run = tmp_path / "run"
    write_record(run, age_seconds=3600)
    assert_locked(run, "--take-over", attempt="b")
    write_record(run, attempt="a")
    with hold_run(run, attempt="b", stale_seconds=0.5) as lock:
        assert "took over the lock of process 1 on another-host, last alive" in lock.notes[0]
        assert json.loads((run / "lock").read_text())["attempt"] == "b"
    write_record(run, attempt="a")
    beating = threading.Thread(target=lambda: [time.sleep(0.1), os.utime(run / "lock")])
    beating.start()
    assert_locked(run, "was last alive", attempt="b", stale_seconds=60)
    beating.join()


def test_who_was_taken_over_learns_it_and_leaves_the_new_lock_alone(tmp_path):
    with hold_run(tmp_path / "run") as lock:
        write_record(tmp_path / "run")
        with pytest.raises(LostRunError, match="was taken over by process 1 on another-host"):
            lock.check()
    assert LostRunError.exit_code == 14
    assert json.loads((tmp_path / "run/lock").read_text())["host"] == "another-host"


def test_a_lock_that_was_removed_is_lost_for_good_even_when_it_comes_back(tmp_path):
    with hold_run(tmp_path / "run") as lock:
        content = lock.path.read_bytes()
        assert lock.is_held()
        lock.path.unlink()
        with pytest.raises(LostRunError, match="another process may have written to it"):
            lock.check()
        lock.path.write_bytes(content)
        assert not lock.is_held()
    assert lock.path.read_bytes() == content  # given back by nobody


def test_asking_reads_only_a_changed_lock_and_an_error_of_the_disk_takes_nobodys_run(tmp_path, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, "away")

    with hold_run(tmp_path / "run") as lock:
        lock.check()
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "_holder_in", None)  # nothing to call
            lock.check()
            patch.setattr(lock_module, "_holder_in", fail)
            os.utime(lock.path, (1, 1))  # a heartbeat
            assert lock.is_held()
        lock.check()
        write_record(tmp_path / "run", age_seconds=3600)
        assert not lock.is_held()


def test_the_heartbeat_beats(tmp_path):
    with hold_run(tmp_path / "run", heartbeat_seconds=0.02) as lock:
        os.utime(lock.path, (1, 1))
        wait_until(lambda: lock.path.stat().st_mtime > 2)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[]"])
def test_a_lock_file_that_says_nothing_is_free(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    assert words_of(tmp_path) == ""


def test_a_disk_that_cannot_lock_is_said_and_one_that_cannot_rename_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refuse)
    assert "cannot lock files (Operation not supported)" in words_of(tmp_path / "run")
    monkeypatch.setattr(run_lock.Path, "rename", refuse)
    with pytest.raises(BadInputError, match=r"cannot rename folders \(Operation not"), hold_run(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
