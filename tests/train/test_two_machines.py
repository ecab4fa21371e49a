"""Two network namespaces as two machines: they meet, train, and name each mistake of a start."""

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

import zero2all
from benchmarks.two_machines import ADDRESSES, WIRE, two_machines, why_not
from tests.ports import free_port
from tests.processes import Program
from tests.track.sshd import start_sshd
from zero2all.common.workspace import Workspace

PORT = 29500
NAMED_SECONDS = 120.0
CODE = "from tests.train.test_two_machines import enter; enter()"
FORWARDED = ["--rendezvous", f"{ADDRESSES[0]}:30846", "--rendezvous-bind", "localhost:9527"]
DROPPED = {
    str(PORT): ("waiting for rank 1 of 2", "no answer: a firewall drops the packets"),
    "30000-65000": ("cannot connect to each other for data", f"rank 0 at {ADDRESSES[0]}: no answer"),
}


def enter() -> None:
    """In a forked process: move to a machine and be `z2a WORDS…` there, as sys.argv[1] describes."""
    job = json.loads(sys.argv[1])
    space = os.open(f"/run/netns/{job['space']}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(space, 0) == 0, os.strerror(ctypes.get_errno())
    os.environ |= job["environment"]
    from zero2all.cli import main

    sys.exit(main(job["words"]))


@pytest.fixture
def machines():
    if problem := why_not():
        pytest.skip(problem)
    with two_machines() as both:
        yield both


@pytest.fixture
def start(machines, work, config_file, warm, tmp_path):
    """Start one rank on one machine, with more words and other variables than usual."""
    started: list[Program] = []
    config = config_file()

    def begin(machine: int, *words: str, root: Path = work.root, **environment: str | int) -> Program:
        usual = {"RANK": machine, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
        usual |= {"MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": 1}
        variables = {name: str(value) for name, value in {**usual, **environment}.items()}
        job = {"space": machines.spaces[machine], "environment": variables}
        job["words"] = ["train", str(config), "--work", str(root), "--interface", WIRE, *words]
        started.append(Program(warm, CODE, [json.dumps(job)], tmp_path / f"output-{len(started)}.txt"))
        return started[-1]

    yield begin
    for program in started:
        program.signal(signal.SIGKILL)
        program.wait()


def test_two_machines_meet_over_their_cable_and_train(start, machines):
    machines.limit(20e6)
    programs = [start(0), start(1)]
    assert [program.wait() for program in programs] == [0, 0], "\n".join(program.text() for program in programs)
    assert "run: step 8" in programs[0].text()


@pytest.fixture
def pair(machines, work, config_file):
    """Start `z2a train` on one machine of two; `launcher`: what stands before it."""
    started: list[subprocess.Popen] = []

    def begin(machine: int, *words: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        train = ["-m", *launcher, "zero2all", "train", str(config_file()), "--work", str(work.root), *words]
        variables = {**os.environ, "Z2A_LANG": "en", **environment}
        command = machines.command(machine, sys.executable, *train)
        started.append(subprocess.Popen(command, env=variables, stdout=-1, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield begin
    for program in started:
        program.kill()
        program.communicate()


def said_by(*programs: subprocess.Popen, code: int = 0) -> list[str]:
    """What programs said that ended with this code."""
    said = [program.communicate(timeout=180)[0] for program in programs]
    assert [program.returncode for program in programs] == [code] * len(programs), "\n".join(said)
    return said


def numbered(rank: int) -> list[str]:
    return ["--nodes", "2", "--node-rank", str(rank)]


@pytest.mark.chaos
@pytest.mark.parametrize("supervise", ["true", "false"])
def test_a_forwarded_port_and_a_bind_to_loopback_need_no_interface(machines, pair, supervise):
    """The container case: machine 0 listens where the other cannot see it, behind a port that is forwarded."""
    machines.forward(0, 30846, "127.0.0.1:9527")
    words = [*FORWARDED, "--parallel.processes", "2", "--resilience.supervise", supervise]
    assert "run: step 8" in said_by(*(pair(rank, *words, *numbered(rank)) for rank in (0, 1)))[0]


@pytest.mark.chaos
def test_where_data_cannot_flow_cause_and_remedy_stand_in_both_terminals(machines, pair):
    machines.forward(0, 30846, "127.0.0.1:9527")
    words = [*FORWARDED, "--interface", "lo", "--resilience.supervise", "true"]
    for text in said_by(*(pair(rank, *words, *numbered(rank)) for rank in (0, 1)), code=2):
        assert "from rank 1 to rank 0 at 127.0.0.1: refused: that address is another machine" in text
        assert "choose the network with --interface" in text
        assert "not there yet" not in text


@pytest.mark.chaos
def test_slurm_and_torchrun_start_the_machines_of_a_run(pair):
    step = {"SLURM_STEP_NODELIST": ",".join(ADDRESSES), "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "70123"}
    said_by(*(pair(machine, "--nodes", "2", **step, SLURM_NODEID=str(machine)) for machine in (0, 1)))
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    launchers = [(*torchrun, "--node-rank", str(machine), "-m") for machine in (0, 1)]
    assert "run: step 8" in said_by(*(pair(machine, "--fresh", launcher=launchers[machine]) for machine in (0, 1)))[0]


@pytest.mark.chaos
def test_machines_meet_over_ipv6_and_a_name_that_means_loopback_on_machine_0(machines, pair):
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
        said = said_by(*(pair(rank, "--rendezvous", rendezvous, "--fresh", *numbered(rank)) for rank in (0, 1)))
    assert f"head means loopback on this machine, which no other one reaches: it listens on {ADDRESSES[0]}" in said[0]


@pytest.mark.slow
def test_two_hosts_over_ssh_with_a_virtual_environment_at_a_very_long_path(work, config_file, tmp_path):
    """Longer than the 256 characters at which the kernel cuts the first line of a script."""
    place = tmp_path / "/".join(["environment-at-a-very-long-path"] * 9)
    venv.create(place, symlinks=True)
    packages = next(place.glob("lib/python3*/site-packages"))
    (packages / "more.pth").write_text(f"{Path(zero2all.__file__).parents[1]}\n{sysconfig.get_path('purelib')}\n")
    python = str(place / "bin" / "python")
    assert len(python) > 256
    (tmp_path / "sshd").mkdir()
    with start_sshd(tmp_path / "sshd") as sshd:
        words = ["launch", "ssh", str(config_file()), "--work", str(work.root), "--parallel.processes", "2"]
        words += ["--hosts", f"{sshd.alias},root@{sshd.alias}", "--rendezvous", f"127.0.0.1:{free_port()}"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["Z2A_SSH"] = shlex.join(sshd.command)
        command = [python, "-m", "zero2all", *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180)
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


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(start):
    named([start(0)], "waiting for rank 1 of 2, until parallel.join_seconds")


def test_a_second_machine_with_the_number_0_is_refused_at_once(pair):
    (text,) = said_by(pair(1, *numbered(0), "--rendezvous", f"{ADDRESSES[0]}:{PORT}"), code=2)
    assert f"{ADDRESSES[0]} of --rendezvous is no address of this machine, which has --node-rank 0" in text
    assert f"--rendezvous-bind {ADDRESSES[1]}:{PORT}" in text


@pytest.mark.slow
def test_a_wrong_port_and_one_of_another_program_are_named(start, machines):
    named([start(0), start(1, MASTER_PORT=PORT + 1)], "waiting for rank 1 of 2", "nothing listens on that port")
    machines.forward(0, PORT + 2, f"{ADDRESSES[0]}:1")
    named([start(1, MASTER_PORT=PORT + 2)], "it is not the store of a run")


@pytest.mark.slow
@pytest.mark.parametrize("ports", DROPPED)
def test_a_firewall_is_named(start, machines, ports):
    machines.block(0, ports)
    named([start(0), start(1)], *DROPPED[ports])


@pytest.mark.slow
def test_other_data_is_named(start, work, tmp_path, repack):
    other = shutil.copytree(work.root, tmp_path / "other-work")
    repack(Workspace(other), 7)
    work.runs.mkdir(exist_ok=True)
    (other / "runs").symlink_to(work.runs)
    named([start(0), start(1, root=other)], "read different data", "")
