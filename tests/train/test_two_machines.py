"""Two network namespaces as two machines: they meet, train, and name each mistake of a start."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zero2all
from benchmarks.two_machines import ADDRESSES, WIRE, Machines, two_machines, why_not
from tests.processes import Program, WarmProcess
from tests.track.sshd import start_sshd
from zero2all.common.workspace import Workspace

PORT = 29500
NAMED_SECONDS = 120.0
CODE = "from tests.train.test_two_machines import enter; enter()"


def enter() -> None:
    """In a forked process: move to a machine and be `z2a WORDS…` there, as sys.argv[1] describes."""
    job = json.loads(sys.argv[1])
    space = os.open(f"/run/netns/{job['space']}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(space, 0) == 0, os.strerror(ctypes.get_errno())
    os.environ |= job["environment"]
    from zero2all.cli import main

    sys.exit(main(job["words"]))


@pytest.fixture
def machines() -> Iterator[Machines]:
    if problem := why_not():
        pytest.skip(problem)
    with two_machines() as both:
        yield both


Start = Callable[..., Program]


@pytest.fixture
def start(machines: Machines, work: Workspace, config_file: Any, warm: WarmProcess, tmp_path: Path) -> Iterator[Start]:
    """Start one rank on one machine, with more words and other variables than usual."""
    started: list[Program] = []
    config = config_file()

    def begin(machine: int, *words: str, root: Path = work.root, code: str = CODE, **environment: str | int) -> Program:
        usual = {"RANK": machine, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
        usual |= {"MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": 1}
        variables = {name: str(value) for name, value in {**usual, **environment}.items()}
        job = {"space": machines.spaces[machine], "environment": variables}
        job["words"] = ["train", str(config), "--work", str(root), "--interface", WIRE, *words]
        started.append(Program(warm, code, [json.dumps(job)], tmp_path / f"output-{len(started)}.txt"))
        return started[-1]

    yield begin
    for program in started:
        program.signal(signal.SIGKILL)
        program.wait()


def test_two_machines_meet_over_their_cable_and_train(start: Start, machines: Machines):
    machines.limit(20e6)
    programs = [start(0), start(1)]
    assert [program.wait() for program in programs] == [0, 0], "\n".join(program.text() for program in programs)
    assert "run: step 8" in programs[0].text()


@pytest.mark.slow
def test_the_command_on_each_machine_with_a_forwarded_port(machines: Machines, work: Workspace, config_file: Any):
    """The container case: machine 0 listens where the other cannot see it, behind a port that is forwarded."""
    machines.forward(0, 7000, "127.0.0.1:7001")
    meeting = ["--nodes", "2", "--rendezvous", f"{ADDRESSES[0]}:7000", "--rendezvous-bind", "127.0.0.1:7001"]
    words = ["-m", "zero2all", "train", str(config_file()), "--work", str(work.root), *meeting, "--interface", WIRE]
    words += ["--parallel.processes", "2"]
    programs = [
        subprocess.Popen(
            machines.command(rank, sys.executable, *words, "--node-rank", str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [program.communicate(timeout=120)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], "\n".join(said)
    assert "run: step 8" in said[0]


@pytest.mark.slow
def test_two_hosts_over_ssh_with_a_virtual_environment_at_a_very_long_path(
    work: Workspace, config_file: Any, tmp_path: Path
):
    """Longer than the 256 characters at which the kernel cuts the first line of a script."""
    place = tmp_path / "/".join(["environment-at-a-very-long-path"] * 9)
    venv.create(place, symlinks=True)
    packages = next(place.glob("lib/python3*/site-packages"))
    (packages / "more.pth").write_text(f"{Path(zero2all.__file__).parents[1]}\n{sysconfig.get_path('purelib')}\n")
    python = str(place / "bin" / "python")
    assert len(python) > 256
    (tmp_path / "sshd").mkdir()
    with start_sshd(tmp_path / "sshd") as sshd, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        words = ["launch", "ssh", str(config_file()), "--work", str(work.root), "--parallel.processes", "2"]
        words += ["--hosts", f"{sshd.alias},root@{sshd.alias}", "--rendezvous", f"127.0.0.1:{port}"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, "-m", "zero2all", *words],
            env={**environment, "Z2A_SSH": shlex.join(sshd.command)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sshd.alias}: run: step 8" in done.stdout, done.stdout


def named(programs: list[Program], *texts: str) -> None:
    """Each program says its text in time; the seconds are printed."""
    begun = time.monotonic()
    waiting = list(zip(programs, texts, strict=True))
    while waiting := [(program, text) for program, text in waiting if text not in program.text()]:
        said = "\n---\n".join(program.text() for program in programs)
        assert time.monotonic() - begun < NAMED_SECONDS, f"not named: {waiting[0][1]!r} in\n{said}"
        time.sleep(0.1)
    print(f"{time.monotonic() - begun:.1f} s: {texts[-1]}")


def test_other_settings_and_a_rank_that_comes_twice_are_named_at_once(start: Start):
    named([start(0), start(1, "--optim.lr_max", "0.02")], *["rank 1 on ", "optim.lr_max 0.02 instead of 0.01"])
    one, other = start(1, WORLD_SIZE=3, MASTER_PORT=PORT + 1), start(1, WORLD_SIZE=3, MASTER_PORT=PORT + 1)
    named([start(0, WORLD_SIZE=3, MASTER_PORT=PORT + 1), one, other], *["Rank 1 came twice: from "] * 3)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(start: Start):
    named([start(0)], "waiting for rank 1 of 2, until parallel.join_seconds")


@pytest.mark.slow
def test_two_machines_with_the_number_0_are_named(machines: Machines, work: Workspace, config_file: Any):
    words = [
        "-m",
        "zero2all",
        "train",
        str(config_file()),
        "--work",
        str(work.root),
        "--nodes",
        "2",
        "--node-rank",
        "0",
    ]
    words += ["--rendezvous", f"{ADDRESSES[0]}:{PORT}", "--interface", WIRE]
    programs = [
        subprocess.Popen(machines.command(each, sys.executable, *words), stderr=subprocess.PIPE, text=True)
        for each in (0, 1)
    ]
    said = [program.communicate(timeout=300)[1] for program in programs]
    assert [program.returncode for program in programs] == [2, 2], "\n".join(said)
    assert all("Rank 0 came twice: from " in text for text in said), said


@pytest.mark.slow
def test_a_wrong_port_is_named(start: Start):
    first = start(0)
    named([first, start(1, MASTER_PORT=PORT + 1)], "waiting for rank 1 of 2", "nothing listens on that port")


@pytest.mark.slow
def test_a_port_of_another_program_is_named(start: Start, machines: Machines):
    machines.forward(0, PORT + 1, f"{ADDRESSES[0]}:1")
    named([start(1, MASTER_PORT=PORT + 1)], "it is not the store of a run")


@pytest.mark.slow
def test_a_firewall_before_the_store_is_named(start: Start, machines: Machines):
    machines.block(0, str(PORT))
    named([start(0), start(1)], "waiting for rank 1 of 2", "no answer: a firewall drops the packets")


@pytest.mark.slow
def test_a_firewall_before_the_data_connections_is_named(start: Start, machines: Machines):
    machines.block(0, "30000-65000")
    text = f"from rank 1 to rank 0 at {ADDRESSES[0]}: no answer"
    named([start(0), start(1)], "cannot connect to each other for data", text)


@pytest.mark.slow
def test_other_code_is_named(start: Start, machines: Machines, work: Workspace, config_file: Any, tmp_path: Path):
    package = Path(zero2all.__file__).parent
    shutil.copytree(package, tmp_path / "other" / "zero2all")
    with (tmp_path / "other" / "zero2all" / "model" / "rope.py").open("a") as file:
        file.write("# changed\n")
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0]}
    environment |= {"MASTER_PORT": str(PORT), "PYTHONPATH": str(tmp_path / "other")}
    first = start(0)
    words = ["-m", "zero2all", "train", str(config_file()), "--work", str(work.root), "--interface", WIRE]
    other = subprocess.Popen(
        machines.command(1, sys.executable, *words), env={**os.environ, **environment}, cwd=tmp_path
    )
    named([first], "code of zero2all '")
    assert other.wait(120) == 2


@pytest.mark.slow
def test_other_data_is_named(start: Start, work: Workspace, tmp_path: Path, repack: Any):
    other = shutil.copytree(work.root, tmp_path / "other-work")
    repack(Workspace(other), 7)
    work.runs.mkdir(exist_ok=True)
    (other / "runs").symlink_to(work.runs)
    named([start(0), start(1, root=other)], "read different data", "")


@pytest.mark.slow
def test_a_folder_of_the_run_that_is_not_shared_is_named(start: Start, work: Workspace, tmp_path: Path):
    other = shutil.copytree(work.root, tmp_path / "other-work")
    named([start(0), start(1, root=other)], "do not share the folder of the run", "")
