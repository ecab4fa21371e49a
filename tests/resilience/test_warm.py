"""Ranks that start warm: forked by a process that has done the imports."""

import os
import signal
import sys
from contextlib import closing

import psutil
import pytest

from zero2all.resilience.warm import Warm, WarmRank

PROGRAM = """
from zero2all.resilience.warm import serve
serve()
import os, sys, time
descriptor, seconds, code = sys.argv[1:]
os.write(int(descriptor), f"rank {os.environ['RANK']}, imported: {'wave' in sys.modules}".encode())
time.sleep(float(seconds))
sys.exit(int(code))
"""


def warm_with(module: str, program: str = PROGRAM) -> Warm:
    return Warm([sys.executable, "-c", program], os.environ, module)


@pytest.fixture
def warm():
    with closing(warm_with("wave")) as started:  # cheap, and nothing else needs it
        started.wait(300.0, lambda: False)
        yield started


def start(warm: Warm, seconds: float, code: int) -> tuple[WarmRank | None, int]:
    """A rank that writes to its descriptor 77, and where that can be read."""
    read, write = os.pipe()
    rank = warm.start(["77", str(seconds), str(code)], {**os.environ, "RANK": str(code)}, {77: write}, 60.0)
    os.close(write)
    return rank, read


def said(read: int) -> str:
    with os.fdopen(read) as file:
        return file.read()


def test_a_rank_has_command_line_variables_and_descriptors_of_its_order_and_its_exit_code_arrives(warm):
    started = {code: start(warm, 0.0, code) for code in (3, 4)}
    for code, (rank, read) in started.items():
        assert (rank.wait(), said(read)) == (code, f"rank {code}, imported: True")


def test_a_rank_that_a_signal_kills_ends_with_that_signal_and_the_next_order_is_served(warm):
    rank, read = start(warm, 600.0, 0)
    os.killpg(rank.pid, signal.SIGTERM)  # perhaps before it has taken its first step
    assert rank.wait() == -signal.SIGTERM
    os.close(read)
    rank, read = start(warm, 600.0, 0)
    os.read(read, 1)
    assert rank.poll() is None
    assert psutil.Process(rank.pid).name() == "z2a rank 0"
    os.killpg(rank.pid, signal.SIGKILL)
    assert rank.wait() == -signal.SIGKILL
    os.close(read)
    rank.send_signal(signal.SIGTERM)  # nobody is there any more
    assert start(warm, 0.0, 7)[0].wait() == 7


def test_when_the_process_that_forks_is_killed_its_ranks_are_too(warm):
    rank, read = start(warm, 600.0, 0)
    psutil.Process(warm.pid).kill()
    assert rank.wait() == -signal.SIGKILL
    assert said(read) in ("", "rank 0, imported: True")  # it ended: the rank is gone


def test_it_ignores_signals_to_all_and_ends_with_the_supervisor(warm):
    process = psutil.Process(warm.pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    assert start(warm, 0.0, 5)[0].wait() == 5
    process.suspend()
    assert start(warm, 0.0, 6)[0].wait() == 6
    warm.close()
    assert not process.is_running()


@pytest.mark.parametrize("is_over", [False, True], ids=["not importable", "stopped while it imports"])
def test_without_the_imports_there_is_no_warm_rank_and_no_process_stays(is_over):
    warm = warm_with("wave", "import time; time.sleep(600)") if is_over else warm_with("zero2all.no_such_module")
    warm.wait(300.0, lambda: is_over)
    assert warm.is_lost
    rank, read = start(warm, 0.0, 0)
    assert rank is None
    assert said(read) == ""
    assert not psutil.pid_exists(warm.pid)
