"""The machines of a run share its folder, or the run is refused before its first step."""

import threading
from pathlib import Path

import pytest

from zero2all.common.errors import BadInputError
from zero2all.parallel.world import World
from zero2all.train import run
from zero2all.train.checkpoints.run_lock import LOCK_NAME, RunLock, hold_run


def test_a_rank_that_does_not_see_the_lock_of_rank_0_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "SHARED_SECONDS", 0.3)
    with hold_run(tmp_path / "here") as lock:
        run.require_shared(World(), lock)
        for path in (tmp_path / "there" / LOCK_NAME, lock.path):  # no folder; and a folder with a lock of its own
            with pytest.raises(BadInputError, match=r"do not share the folder of the run.*not seen by rank 0 on"):
                run.require_shared(World(), RunLock(path, lock.token if path != lock.path else "another", []))


def test_a_file_that_is_seen_late_is_waited_for(tmp_path: Path):
    with hold_run(tmp_path / "here") as lock:
        late = RunLock(tmp_path / "late", lock.token, [])
        threading.Timer(0.5, lambda: late.path.write_bytes(lock.path.read_bytes())).start()
        run.require_shared(World(), late)
