"""Real processes, killed or asked to stop: a run interrupted anywhere ends with the same bits as one left alone, and a
request to stop is one request, however many signals it takes."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import Z2A
from tests.train.states import bits
from zero2all.common.signals import TOGETHER_SECONDS, StopRequest, stop_requests
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints

STEPS = 18
LENGTH = {"train": {"steps": STEPS}, "checkpoint": {"every_steps": 3}, "validation": {"every_steps": 8}}
NO_SAVES = {**LENGTH, "checkpoint": {"every_steps": 0}}
LONG = {"train": {"steps": 100_000}, "checkpoint": {"every_steps": 0}, "validation": {"every_steps": 0}}
SUPERVISED = {"resilience": {"supervise": True}}  # as `z2a train` is by default
# The limit holds the optimizer's file back, not the weights': the save fails in its middle.
SMALL_FILES = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000)); {Z2A}"
TERMINAL_GONE = f"""
import os
from zero2all.common import progress
progress.LOG_EVERY_SECONDS = 0.0
reading, writing = os.pipe()
os.dup2(writing, 2)
os.close(reading)
os.close(writing)
{Z2A}
"""
FOLDER_REMOVED = """
import shutil, sys
from pathlib import Path
from zero2all.cli import main
from zero2all.train import trainer
train_step, run = trainer.train_step, Path(sys.argv.pop())
def step(state, *arguments):
    while state.step == 5 and run.exists():  # a save that is going on makes files again
        shutil.rmtree(run, ignore_errors=True)
    return train_step(state, *arguments)
trainer.train_step = step
sys.exit(main())
"""
# The child takes the other end of the terminal for its own, as a login shell does.
IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
path = sys.argv.pop()
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
UNDER_NOHUP = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {Z2A}"


@pytest.fixture
def training(start, work, config_file):
    return lambda *words, code=Z2A, **sections: start(
        "train", config_file(**sections), "--work", work.root, *words, code=code
    )


def rows_in(run: Path, attempt: int = 1) -> int:
    path = run / "metrics" / f"train-{attempt}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def signalled(step: int, number: int, after: float = 0.0) -> str:
    """Code of a command that gets a signal in that step."""
    return f"from tests.moments import signal_in_step; signal_in_step({step}, {number}, {after}); {Z2A}"


@pytest.fixture(scope="module")
def left_alone(ranks, lab, config):
    ranks.finished(config(**LENGTH))
    return bits(lab.run("run"), STEPS)


def test_a_run_killed_at_random_points_equals_the_run_left_alone(training, work, left_alone):
    rng, run, kills = random.Random(1), work.run("run"), 0
    for _ in range(4):
        code = signalled(rng.randint(2, 9), signal.SIGKILL, rng.uniform(0, 0.02))
        kills += training(**LENGTH, code=code).wait() == -signal.SIGKILL
        if list_checkpoints(run):
            newest_checkpoint(run)  # raises when something under a final name is damaged
    assert kills >= 2
    trainer = training(**LENGTH)
    assert trainer.wait() == 0, trainer.text()
    assert bits(run, STEPS) == left_alone
    kept = [path.name for path in sorted((run / "checkpoints").iterdir()) if path.is_dir()]
    # A start that is killed before eight steps have proven its state deletes no good checkpoint.
    assert kept[-2:] == [f"step-{step:08d}" for step in (STEPS - 3, STEPS)]
    assert len(kept) <= 5, "twice keep_last, and one"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_asked_to_stop_saves_and_says_so_and_its_rerun_ends_with_the_same_bits(
    training, work, left_alone, number
):
    trainer, run = training(**NO_SAVES, code=signalled(3, number)), work.run("run")
    assert trainer.wait() == 10, trainer.text()
    assert number.name in trainer.text()
    stopped_at = newest_checkpoint(run).step
    assert 3 <= stopped_at < STEPS
    assert f"stopped and saved at step {stopped_at}. Run the same command again" in trainer.text()
    again = training(**NO_SAVES)
    assert again.wait() == 0, again.text()
    assert f"resumed run at step {stopped_at}" in again.text()
    assert bits(run, STEPS) == left_alone


def test_a_run_asked_to_stop_without_saving_does_not_save(training, work):
    trainer = training(**NO_SAVES, resilience={"save_on_signal": False}, code=signalled(3, signal.SIGTERM))
    assert trainer.wait() == 10
    assert "stopped without a save (resilience.save_on_signal is false)" in trainer.text()
    assert list_checkpoints(work.run("run")) == []


def test_a_second_process_on_the_same_run_is_refused_and_a_dead_one_holds_nothing(training, work):
    settings, run = {**LONG, "checkpoint": {"every_steps": 50}}, work.run("run")
    first = training(**settings)
    first.wait_until(lambda: rows_in(run) >= 2)
    second = training(**settings)
    assert second.wait() == 13
    assert f"process {first.pid} on " in second.text()
    assert first.poll() is None
    first.signal(signal.SIGKILL)
    first.wait()
    training(**settings).wait_until(lambda: rows_in(run, 2) >= 2)


def test_a_disk_that_is_full_in_the_middle_of_a_save_leaves_no_half_and_the_rerun_finishes(training, work, left_alone):
    assert len(left_alone["model-00000-00000.safetensors"]) > 90_000
    trainer = training(**LENGTH, code=SMALL_FILES)
    assert trainer.wait() == 4, trainer.text()
    assert "The checkpoint of step 3 was not saved" in trainer.text()
    assert "If the disk is full, free some space. Run the same command again" in trainer.text()
    assert "Traceback" not in trainer.text()
    assert list_checkpoints(work.run("run")) == []
    assert not [path for path in (work.run("run") / "checkpoints").rglob("*") if path.is_file()]
    again = training(**LENGTH)
    assert again.wait() == 0, again.text()
    assert bits(work.run("run"), STEPS) == left_alone


def test_a_terminal_that_goes_away_does_not_stop_the_run(training, work):
    training(code=TERMINAL_GONE).wait()
    assert newest_checkpoint(work.run("run")).step == 8


def test_a_run_whose_folder_is_removed_says_so_and_promises_nothing(training, work):
    removed = training(work.run("run"), code=FOLDER_REMOVED)
    assert removed.wait() == 14, removed.text()
    assert f"The folder of the run, {work.run('run')}, is gone, and its checkpoints with it." in removed.text()
    assert "newest checkpoint" not in removed.text()


@pytest.fixture
def clock():
    """The time now, in seconds, in a list."""
    return [100.0]


def test_signals_that_come_together_are_one_request(clock):
    request = StopRequest(lambda: clock[0])
    request(signal.SIGTERM, None)
    assert request.requested
    for _ in range(3):  # a service manager, a launcher and a shell may all pass the same one on
        clock[0] += 0.3 * TOGETHER_SECONDS
        request(signal.SIGTERM, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_request_is_not_held_back_but_losing_the_terminal_never_means_at_once(clock, number):
    request = StopRequest(lambda: clock[0])
    for _ in range(2):
        request(signal.SIGHUP, None)
        clock[0] += 1.1 * TOGETHER_SECONDS
    with pytest.raises(KeyboardInterrupt):
        request(number, None)


def test_handlers_are_put_back_and_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            with stop_requests() as request:
                assert signal.getsignal(signal.SIGTERM) is request
                os.kill(os.getpid(), signal.SIGHUP)
                assert request.requested == (handler is signal.SIG_DFL)
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_whose_terminal_is_gone_saves_and_ends_with_code_10(training, work):
    ours, theirs = os.openpty()
    trainer = training(os.ttyname(theirs), **LONG, **SUPERVISED, code=IN_A_TERMINAL)
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


def test_a_run_under_nohup_goes_on_without_its_terminal(training, work):
    run, trainer = work.run("run"), training(**LONG, **SUPERVISED, code=UNDER_NOHUP)
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
