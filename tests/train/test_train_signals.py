"""What a signal does to a run: one request, however many signals it takes, and a save before the end."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from zero2all.common.signals import TOGETHER_SECONDS, StopRequest, stop_requests
from zero2all.train.checkpoints.find import newest_checkpoint

LONG = {"train": {"steps": 100_000}, "checkpoint": {"every_steps": 0}, "validation": {"every_steps": 0}}
SUPERVISED = {"resilience": {"supervise": True}}  # as `z2a train` is by default


def rows_in(run: Path) -> int:
    path = run / "metrics/train-1.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ---- the request ----


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_come_together_are_one_request(number):
    clock = Clock()
    request = StopRequest(clock)
    request(number, None)
    assert request.requested
    for _ in range(3):  # a service manager, a launcher and a shell may all pass the same one on
        clock.now += 0.3 * TOGETHER_SECONDS
        request(number, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_request_is_not_held_back(number):
    clock = Clock()
    request = StopRequest(clock)
    request(signal.SIGHUP, None)
    clock.now += 1.1 * TOGETHER_SECONDS
    with pytest.raises(KeyboardInterrupt):
        request(number, None)


def test_losing_the_terminal_never_means_at_once():
    clock = Clock()
    request = StopRequest(clock)
    request(signal.SIGTERM, None)
    clock.now += 60.0
    request(signal.SIGHUP, None)


def test_handlers_are_put_back_and_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is request
            assert not request.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- real runs ----

# The child takes the other end of the terminal for its own, as a login shell does.
IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
path = sys.argv.pop(1)
os.setsid()
terminal = os.open(path, os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for number in (0, 1, 2):
    os.dup2(terminal, number)
os.close(terminal)
from zero2all.cli import main
code = main()
sys.stdout.flush()
sys.exit(code)
"""


def test_a_run_whose_terminal_is_gone_saves_and_ends_with_code_10(start, work, config_file):
    ours, theirs = os.openpty()
    words = ["train", config_file(**LONG, **SUPERVISED), "--work", work.root]
    trainer = start(os.ttyname(theirs), *words, code=IN_A_TERMINAL)
    os.set_blocking(ours, False)
    seen = b""

    def read() -> bool:
        nonlocal seen
        with suppress(OSError):  # nothing to read
            seen += os.read(ours, 1 << 16)
        return rows_in(work.run("run")) > 4 or trainer.poll() is not None

    trainer.wait_until(read)
    os.close(theirs)
    os.close(ours)
    assert trainer.wait() == 10, seen.decode()
    assert newest_checkpoint(work.run("run")).step > 0


UNDER_NOHUP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from zero2all.cli import main
sys.exit(main())
"""


def test_a_run_under_nohup_goes_on_without_its_terminal(start, work, config_file):
    run = work.run("run")
    trainer = start("train", config_file(**LONG, **SUPERVISED), "--work", work.root, code=UNDER_NOHUP)
    trainer.wait_until(lambda: rows_in(run) > 4)
    trainer.signal(signal.SIGHUP)
    time.sleep(0.1)
    rows = rows_in(run)
    trainer.wait_until(lambda: rows_in(run) > rows + 4)
    trainer.signal(signal.SIGTERM)
    assert trainer.wait() == 10, trainer.text()
    assert "SIGHUP" not in trainer.text()


@pytest.mark.parametrize(("sections", "number"), [({}, signal.SIGTERM), (SUPERVISED, signal.SIGINT)])
def test_signals_after_the_run_was_stopped_and_saved_do_not_change_its_exit_code(work, config_file, sections, number):
    command = [sys.executable, "-m", "zero2all", "train", config_file(**LONG, **sections), "--work", work.root]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trainer:
        while rows_in(work.run("run")) < 4 and trainer.poll() is None:
            time.sleep(0.01)
        trainer.send_signal(number)
        for line in trainer.stderr:
            if "was stopped and saved" in line:
                break
        while trainer.poll() is None:
            trainer.send_signal(number)
            time.sleep(0.002)
        rest = trainer.stderr.read()
    assert (trainer.returncode, rest) == (10, "")
