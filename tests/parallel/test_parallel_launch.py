"""What the command that started the processes says of those that could not speak for themselves."""

from __future__ import annotations

import signal

from zero2all.parallel.launch import unusual_ends


def test_processes_that_ended_by_themselves_have_said_what_there_is_to_say():
    assert unusual_ends([0, 0], 60.0) == []
    assert unusual_ends([12, 1], 60.0) == []


def test_a_process_that_was_killed_is_named_with_its_signal_and_the_way_on():
    killed, way_on = unusual_ends([1, -signal.SIGKILL], 60.0)
    assert "rank 1 was ended by SIGKILL" in killed
    assert "memory" in killed
    assert "run the same command again" in way_on


def test_a_process_that_nccl_ended_points_at_the_others():
    assert "another process is gone or does not answer" in unusual_ends([-signal.SIGABRT, 137], 60.0)[0]


def test_processes_that_had_to_be_stopped_are_named():
    assert "within 5 s: rank 1, 2." in unusual_ends([1, None, None], 5.0)[0]
