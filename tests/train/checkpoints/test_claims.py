"""Claims: one reader to a checkpoint, retention waits for it, and a dead reader holds nothing."""

import os
import socket
import time
from pathlib import Path

import pytest

from zero2all.common.files import read_json, write_json
from zero2all.common.lock import boot_id, this_process
from zero2all.train.checkpoints.retention import claim_step, claimed_steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def claim_path(run: Path) -> Path:
    return run / "checkpoints" / "claims" / "step-00000007.json"


def leave_claim(run: Path, **facts: object) -> None:
    """A claim of a process that is not this one."""
    write_json(claim_path(run), {**this_process(), "token": "theirs", **facts})


def test_one_reader_at_a_time_and_nothing_left_behind(run):
    with claim_step(run, 7) as claim:
        assert claim is not None
        assert claim.is_held()
        assert claimed_steps(run) == {7}
        assert read_json(claim_path(run))["pid"] == os.getpid()
        with claim_step(run, 7) as second:
            assert second is None
        with claim_step(run, 8) as other:
            assert other is not None
        assert claim.is_held()
    assert claimed_steps(run) == set()
    assert list(claim_path(run).parent.iterdir()) == []


@pytest.mark.parametrize(
    "facts",
    [{"pid": 2**22 + 1}, {"started": 1.0}],
    ids=["the process is gone", "its number belongs to a younger process"],
)
def test_the_claim_of_a_dead_process_of_this_host_is_taken_over(run, facts):
    leave_claim(run, **facts)
    assert claimed_steps(run) == set()
    with claim_step(run, 7) as claim:
        assert claim is not None


@pytest.mark.parametrize("facts", [{"host": "elsewhere"}, {"boot": "another"}], ids=["other host", "before a reboot"])
def test_a_claim_from_elsewhere_counts_while_its_heartbeat_is_fresh(run, facts):
    leave_claim(run, **facts)
    with claim_step(run, 7) as claim:
        assert claim is None
    assert claimed_steps(run) == {7}
    os.utime(claim_path(run), (1.0, 1.0))
    assert claimed_steps(run) == set()
    with claim_step(run, 7) as claim:
        assert claim is not None


@pytest.mark.parametrize(("content", "seconds"), [("", 6), ("damaged", 61)], ids=["killed before it wrote", "damaged"])
def test_a_claim_that_names_nobody_counts_while_it_is_fresh(run, content, seconds):
    claim_path(run).parent.mkdir()
    claim_path(run).write_text(content)
    for age, is_free in ((0, False), (seconds - 2, False), (seconds, True)):
        os.utime(claim_path(run), (time.time() - age,) * 2)
        with claim_step(run, 7) as claim:
            assert (claim is not None) == is_free


def test_a_reader_that_lost_its_claim_knows_and_leaves_the_new_one_alone(run):
    with claim_step(run, 7) as claim:
        leave_claim(run, host=socket.gethostname(), boot=boot_id())
        assert claim is not None
        assert not claim.is_held()
    assert read_json(claim_path(run))["token"] == "theirs"


IN_CONTAINER = """
import sys, time
from pathlib import Path
from zero2all.train.checkpoints.retention import claim_step
with claim_step(Path(sys.argv[1]), 7):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_reader_in_another_container_of_this_machine_keeps_its_claim_and_its_checkpoint(run, in_pid_namespace):
    """Host network, so the host's name and boot are the same, and process 1 there is another one here."""
    in_pid_namespace(IN_CONTAINER, run)
    holder = read_json(claim_path(run))
    assert (holder["host"], holder["boot"]) == (socket.gethostname(), boot_id())
    assert claimed_steps(run) == {7}, "prune leaves the checkpoint alone"
    with claim_step(run, 7) as claim:
        assert claim is None
    os.utime(claim_path(run), (1.0, 1.0))
    assert claimed_steps(run) == set(), "silent for a minute"


def test_the_heartbeat_keeps_a_claim_fresh(run):
    with claim_step(run, 7, heartbeat_seconds=0.01):
        os.utime(claim_path(run), (1.0, 1.0))
        while claim_path(run).stat().st_mtime == 1.0:
            pass
