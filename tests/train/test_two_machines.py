"""Two network namespaces as two machines: they meet, train, and name each mistake of a start."""

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


Pair = Callable[..., subprocess.Popen]


@pytest.fixture
def pair(machines: Machines, work: Workspace, config_file: Any) -> Iterator[Pair]:
    """Start `z2a train` on one machine of two."""
    started: list[subprocess.Popen] = []

    def begin(machine: int, *words: str, **environment: str) -> subprocess.Popen:
        train = ["-m", "zero2all", "train", str(config_file()), "--work", str(work.root), "--nodes", "2", *words]
        variables = {**os.environ, "Z2A_LANG": "en", **environment}
        command = machines.command(machine, sys.executable, *train)
        started.append(subprocess.Popen(command, env=variables, stdout=-1, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield begin
    for program in started:
        program.kill()
        program.communicate()


def said_by(*programs: subprocess.Popen) -> list[str]:
    return [program.communicate(timeout=180)[0] for program in programs]


@pytest.mark.chaos
@pytest.mark.parametrize("supervise", ["true", "false"])
def test_a_forwarded_port_and_a_bind_to_loopback_need_no_interface(machines: Machines, pair: Pair, supervise: str):
    """The container case: machine 0 listens where the other cannot see it, behind a port that is forwarded."""
    machines.forward(0, 30846, "127.0.0.1:9527")
    words = ["--rendezvous", f"{ADDRESSES[0]}:30846", "--rendezvous-bind", "localhost:9527"]
    words += ["--parallel.processes", "2", "--resilience.supervise", supervise]
    programs = [pair(rank, *words, "--node-rank", str(rank)) for rank in (0, 1)]
    said = said_by(*programs)
    assert [program.returncode for program in programs] == [0, 0], "\n".join(said)
    assert "run: step 8" in said[0]


@pytest.mark.chaos
def test_where_data_cannot_flow_cause_and_remedy_stand_in_both_terminals(machines: Machines, pair: Pair):
    machines.forward(0, 30846, "127.0.0.1:9527")
    words = ["--rendezvous", f"{ADDRESSES[0]}:30846", "--rendezvous-bind", "localhost:9527", "--interface", "lo"]
    programs = [pair(rank, *words, "--resilience.supervise", "true", "--node-rank", str(rank)) for rank in (0, 1)]
    said = said_by(*programs)
    assert [program.returncode for program in programs] == [2, 2], "\n".join(said)
    for text in said:
        assert "from rank 1 to rank 0 at 127.0.0.1: refused: that address is another machine" in text
        assert "choose the network with --interface" in text
        assert "not there yet" not in text


@pytest.mark.chaos
def test_a_stranger_at_the_rendezvous_is_refused_and_the_real_machine_joins_after(machines: Machines, pair: Pair):
    words = ["--rendezvous", f"{ADDRESSES[0]}:{PORT}", "--resilience.supervise", "true"]
    first = pair(0, *words, "--node-rank", "0")
    stranger = pair(1, *words, "--node-rank", "1", Z2A_SECRET="not the secret of this run")
    (text,) = said_by(stranger)
    assert stranger.returncode == 2
    assert "has another secret than this machine" in text
    real = pair(1, *words, "--node-rank", "1")
    said = said_by(first, real)
    assert [first.returncode, real.returncode] == [0, 0], "\n".join(said)
    assert said[0].count(f"z2a: coordinator: a connection from {ADDRESSES[1]} was refused") == 1


@pytest.mark.chaos
def test_slurm_and_torchrun_start_the_machines_of_a_run(
    machines: Machines, pair: Pair, work: Workspace, config_file: Any
):
    step = {"SLURM_STEP_NODELIST": ",".join(ADDRESSES), "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "70123"}
    programs = [pair(machine, **step, SLURM_NODEID=str(machine)) for machine in (0, 1)]
    said = said_by(*programs)
    assert [program.returncode for program in programs] == [0, 0], "\n".join(said)
    meeting = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    words = ["-m", "zero2all", "train", str(config_file()), "--work", str(work.root), "--fresh"]
    programs = [
        subprocess.Popen(
            machines.command(
                machine, sys.executable, "-m", "torch.distributed.run", *meeting, "--node-rank", str(machine), *words
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine in (0, 1)
    ]
    said = said_by(*programs)
    assert [program.returncode for program in programs] == [0, 0], "\n".join(said)
    assert "run: step 8" in said[0]


@pytest.mark.chaos
def test_machines_meet_over_ipv6_and_a_name_that_means_loopback_on_machine_0(machines: Machines, pair: Pair):
    """Debian writes the own name of a machine as 127.0.1.1 into /etc/hosts."""
    for machine, space in enumerate(machines.spaces):
        place = ["address", "add", f"fd00:213::{machine + 1}/64", "dev", WIRE, "nodad"]
        subprocess.run(["ip", "-n", space, *place], check=True)
        folder = Path(f"/etc/netns/{space}")
        folder.mkdir(parents=True)
        machines.stack.callback(shutil.rmtree, folder)
        address = ADDRESSES[0] if machine else "127.0.1.1"
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} head\n")
    for rendezvous in ("[fd00:213::1]:29700", "head:29701"):
        words = ["--rendezvous", rendezvous, "--fresh"]
        programs = [pair(rank, *words, "--node-rank", str(rank)) for rank in (0, 1)]
        said = said_by(*programs)
        assert [program.returncode for program in programs] == [0, 0], "\n".join(said)
    assert f"head means loopback on this machine, which no other one reaches: it listens on {ADDRESSES[0]}" in said[0]


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
    named([start(0, WORLD_SIZE=3, MASTER_PORT=PORT + 1), one, other], *["Rank 1 connected twice: from "] * 3)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(start: Start):
    named([start(0)], "waiting for rank 1 of 2, until parallel.join_seconds")


def test_a_second_machine_with_the_number_0_is_refused_at_once(pair: Pair):
    second = pair(1, "--node-rank", "0", "--rendezvous", f"{ADDRESSES[0]}:{PORT}")
    (text,) = said_by(second)
    assert second.returncode == 2
    assert f"{ADDRESSES[0]} of --rendezvous is no address of this machine, which has --node-rank 0" in text
    assert f"--rendezvous-bind {ADDRESSES[1]}:{PORT}" in text


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
