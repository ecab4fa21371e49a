"""One writer per run: the living are respected, the dead are taken over, and nobody guesses about other machines."""

import errno
import json
import os
import re
import signal
import socket
import threading
import time

import psutil
import pytest

from zero2all.common import lock as lock_module
from zero2all.common.errors import BadInputError, LostRunError, RunLockedError
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

Z2A_LIKE = """
import sys
from pathlib import Path
from zero2all.common.errors import UserError
from zero2all.train.checkpoints.run_lock import hold_run
try:
    with hold_run(Path(sys.argv[1])):
        pass
except UserError as error:
    sys.exit(error.exit_code)
"""


def write_record(run, age_seconds=0.0, **fields):
    """A lock file as another process would have left it."""
    run.mkdir(exist_ok=True)
    record = {"host": "another-host", "boot": "b", "pid": 1, "started": 1.0, "token": "t", **fields}
    (run / "lock").write_text(json.dumps(record))
    then = time.time() - age_seconds
    os.utime(run / "lock", (then, then))


def test_a_lock_that_was_given_back_is_free_again_without_a_word(tmp_path):
    for _ in range(2):
        with hold_run(tmp_path / "run") as lock:
            assert lock.notes == []
            lock.check()
            record = json.loads((tmp_path / "run/lock").read_text())
            assert (record["host"], record["pid"]) == (socket.gethostname(), os.getpid())
            assert record["started"] == psutil.Process().create_time()
            (tmp_path / "run/config.yaml").touch()
    assert (tmp_path / "run/lock").read_bytes() == b""


def test_a_run_that_was_refused_before_it_wrote_anything_leaves_no_folder(tmp_path):
    with hold_run(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_living_holder_is_named_and_respected_and_a_dead_one_taken_over(tmp_path, start):
    holder = start(tmp_path / "run", code=HOLDING)
    holder.wait_until(lambda: "held" in holder.text())
    for take_over in (False, True):
        with (
            pytest.raises(RunLockedError, match=f"process {holder.pid} on {socket.gethostname()} is running"),
            hold_run(tmp_path / "run", take_over=take_over),
        ):
            pass
    assert start(tmp_path / "run", code=Z2A_LIKE).wait() == 13
    holder.signal(signal.SIGKILL)
    holder.wait()
    with hold_run(tmp_path / "run") as lock:
        assert lock.notes == [f"took over the lock of process {holder.pid} on {socket.gethostname()}, which has ended"]
    assert start(tmp_path / "run", code=Z2A_LIKE).wait() == 0


def own_record(tmp_path):
    with hold_run(tmp_path / "other") as lock:
        return json.loads(lock.path.read_text())


def test_a_living_process_keeps_its_lock_where_the_disk_has_no_locks(tmp_path):
    write_record(tmp_path / "run", **own_record(tmp_path))  # written, but not locked
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} .* is running"), hold_run(tmp_path / "run"):
        pass


NO_FLOCK = """
import errno, fcntl
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
"""


def test_a_writer_in_another_container_of_this_machine_keeps_its_run_where_the_disk_has_no_locks(
    tmp_path, in_pid_namespace, monkeypatch
):
    run = tmp_path / "run"
    in_pid_namespace(NO_FLOCK + HOLDING, run)
    with pytest.raises(RunLockedError, match=r"was last alive \d+ s ago"), hold_run(run, take_over=True):
        pass  # this process has the flock; the other could not take it

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RunLockedError, match=r"was last alive \d+ s ago"), hold_run(run, take_over=True):
        pass
    os.utime(run / "lock", (1, 1))
    with hold_run(run) as lock:
        assert "which has ended" in lock.notes[0], "silent for a minute"


def test_a_writer_that_was_killed_in_another_container_is_taken_over_at_once_where_the_disk_has_locks(
    tmp_path, in_pid_namespace
):
    container = in_pid_namespace(HOLDING, tmp_path / "run")
    with pytest.raises(RunLockedError, match="is running"), hold_run(tmp_path / "run"):
        pass
    container.kill()
    with hold_run(tmp_path / "run") as lock:
        assert "which has ended" in lock.notes[0]


def test_a_process_number_that_was_given_to_another_process_does_not_deceive(tmp_path):
    record = own_record(tmp_path)
    write_record(tmp_path / "run", **{**record, "started": record["started"] - 1000})
    with hold_run(tmp_path / "run") as lock:
        assert "which has ended" in lock.notes[0]


def test_after_a_restart_of_the_machine_its_old_lock_is_taken_over_but_not_from_a_namesake(tmp_path):
    record = {**own_record(tmp_path), "boot": "before"}
    write_record(tmp_path / "run", age_seconds=5, **record)
    with pytest.raises(RunLockedError, match=r"was last alive \d+ s ago"), hold_run(tmp_path / "run"):
        pass
    write_record(tmp_path / "run", age_seconds=90, **record)
    with hold_run(tmp_path / "run") as lock:
        assert "which has ended" in lock.notes[0]


def test_a_holder_on_another_host_with_a_fresh_heartbeat_cannot_be_taken_over(tmp_path):
    write_record(tmp_path / "run", age_seconds=20)
    for take_over in (False, True):
        with (
            pytest.raises(RunLockedError, match=r"process 1 on another-host was last alive \d+ s ago"),
            hold_run(tmp_path / "run", take_over=take_over),
        ):
            pass


def test_a_silent_one_is_taken_over_only_when_a_person_says_so(tmp_path):
    write_record(tmp_path / "run", age_seconds=3600)
    with pytest.raises(RunLockedError, match=r"last alive 36\d\d s ago.*--take-over"), hold_run(tmp_path / "run"):
        pass
    with hold_run(tmp_path / "run", take_over=True) as lock:
        (note,) = lock.notes
    words = r"took over the lock of process 1 on another-host, last alive 36\d\d s ago \(--take-over\)"
    assert re.fullmatch(words, note)


def test_the_next_attempt_of_several_machines_takes_the_lock_of_a_lost_machine_0_once_it_is_silent(tmp_path):
    run = tmp_path / "run"
    write_record(run, age_seconds=3600)
    with pytest.raises(RunLockedError, match="--take-over"), hold_run(run, attempt="b"):
        pass
    write_record(run, attempt="a")
    with hold_run(run, attempt="b", stale_seconds=0.5) as lock:
        assert "took over the lock of process 1 on another-host, last alive" in lock.notes[0]
        assert json.loads((run / "lock").read_text())["attempt"] == "b"
    write_record(run, attempt="a")
    beating = threading.Thread(target=lambda: [time.sleep(0.3), os.utime(run / "lock")])
    beating.start()
    with pytest.raises(RunLockedError, match="was last alive"), hold_run(run, attempt="b", stale_seconds=60):
        pass
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


def test_asking_reads_the_lock_only_when_it_has_changed(tmp_path, monkeypatch):
    with hold_run(tmp_path / "run") as lock:
        lock.check()
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "_holder_in", None)  # nothing to call
            lock.check()
        os.utime(lock.path, (1, 1))  # a heartbeat
        lock.check()
        write_record(tmp_path / "run", age_seconds=3600)
        assert not lock.is_held()


def test_a_disk_that_is_away_for_a_moment_takes_nobodys_run(tmp_path, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, "away")

    with hold_run(tmp_path / "run") as lock:
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "_holder_in", fail)
            assert lock.is_held()
        assert lock.is_held()


def test_the_heartbeat_beats(tmp_path):
    with hold_run(tmp_path / "run", heartbeat_seconds=0.02) as lock:
        os.utime(lock.path, (1, 1))
        deadline = time.monotonic() + 120
        while lock.path.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[]", b"\x80\x04."])
def test_a_lock_file_that_says_nothing_is_free(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with hold_run(tmp_path) as lock:
        assert lock.notes == []


def test_a_disk_that_cannot_lock_is_said_and_one_that_cannot_rename_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with hold_run(tmp_path / "run") as lock:
        (note,) = lock.notes
    assert "cannot lock files (Operation not supported)" in note
    monkeypatch.setattr(run_lock.Path, "rename", refuse)
    with (
        pytest.raises(BadInputError, match=r"cannot rename folders \(Operation not supported\)"),
        hold_run(tmp_path / "new"),
    ):
        pass
    assert not (tmp_path / "new").exists()
