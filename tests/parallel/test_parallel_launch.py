"""What the command that started the processes says of those that could not speak for themselves."""

import os
import signal
import sys
import threading
import time

import pytest

from tests.waiting import wait_until
from zero2all.parallel.launch import run_processes
from zero2all.resilience.supervisor import Watch


@pytest.fixture
def in_each_process(tmp_path, monkeypatch):
    """Lines of shell that run in place of `python -m zero2all …`."""

    def become(*lines: str) -> None:
        script = tmp_path / "python"
        script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return become


def test_the_command_ends_with_the_code_of_the_process_that_was_killed_not_of_others(in_each_process, tmp_path, capfd):
    killed = tmp_path / "killed"
    notice = f"while [ ! -e {killed} ] || kill -0 $(cat {killed}); do sleep 0.05; done 2> {tmp_path}/gone"
    kill = f'if [ "$RANK" = 1 ]; then echo $$ > {killed}.new; mv {killed}.new {killed}; kill -KILL $$; fi'
    in_each_process(kill, notice, "exit 1")
    assert run_processes(3, []) == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    for words in ("z2a: Rank 1 was killed by SIGKILL", "memory", "Run the same command again"):
        assert words in said


def test_a_process_that_does_not_end_is_stopped_and_named_but_those_that_were_asked_may_save(in_each_process, capfd):
    in_each_process('if [ "$RANK" = 0 ]; then exec sleep 600; fi', "exit 12")
    assert run_processes(2, [], Watch(grace_seconds=0.2)) == 12
    assert "Rank 0 did not end within 0.2 s" in capfd.readouterr().err
    in_each_process('if [ "$RANK" = 0 ]; then sleep 0.6; fi', "exit 10")
    assert (run_processes(2, [], Watch(grace_seconds=0.1)), capfd.readouterr().err) == (10, "")


def test_modules_in_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "argparse.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    assert run_processes(1, ["--version"]) == 0
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # `python -m zero2all` looks there itself
    assert run_processes(1, ["--version"]) == 3


@pytest.fixture
def sighup_as_in_a_terminal():
    """Its default, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_reaches_every_process(in_each_process, sighup_as_in_a_terminal, tmp_path, number):
    name = number.name.removeprefix("SIG")
    in_each_process(f"trap 'exit 10' {name}", f"touch {tmp_path}/ready-$RANK", "while :; do sleep 0.05; done")

    def send():
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    assert run_processes(2, []) == 10


def test_processes_that_a_signal_ends_before_they_can_handle_it_had_nothing_to_save(in_each_process, capfd):
    in_each_process('if [ "$RANK" = 0 ]; then kill -TERM $PPID; fi', "exec sleep 100")
    begun = time.monotonic()
    assert run_processes(30, []) == 10
    assert time.monotonic() - begun < 90, "a process that was started after the signal did not get it"
    assert capfd.readouterr().err == ""


def test_under_nohup_the_command_and_its_processes_ignore_a_lost_terminal(in_each_process, sighup_as_in_a_terminal):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    in_each_process("kill -HUP $$", "kill -HUP $PPID", "exit 7")
    assert run_processes(2, []) == 7
