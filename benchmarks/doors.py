"""What a stranger costs a run of two machines, and what the proof of the secret costs.

    python benchmarks/doors.py --work quickstart --config quickstart      some 6 minutes on an idle machine

WORK is a workspace with packed data. Two supervisors on this machine hold a run of two ranks on the CPU.

attack: 5,000 idle and 200 hostile connections (random bytes, halves of a greeting, huge lengths, resets) at the port of
the meeting. Printed: steps per second in the 30 s before and in 60 s of the attack; the largest memory, descriptors and
threads of the supervisors before and during.
cost: the median time of a step of runs whose ranks reach their store through the proof, by turns with runs that torch's
own variables start, without supervisors or proof; the seconds of one connection with the proof and of a plain one.
proofs: how many proofs a run of 50 steps and one of 200 make. The proof costs a run connections x seconds and nothing a
step, so this is sharper than the ratio of two noisy times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.common import connections
from zero2all.track.reader import read_run

IDLE, HOSTILE = 5_000, 200
QUIET_SECONDS, ATTACK_SECONDS = 30.0, 60.0
STEPS, PAIRS, FIRST_STEPS = 150, 6, 30
SECRET = "the secret of this benchmark"
COUNTING = """
from pathlib import Path
import zero2all.common.connections as connections
made = connections._proof
def counted(*arguments):
    with (Path(__file__).parent / "proofs").open("a") as file:
        file.write("p")
    return made(*arguments)
connections._proof = counted
"""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--only", choices=PARTS, help="one part, and save nothing")
    parser.add_argument("--flood", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        flood(arguments.flood)
        return
    results = {part: measure(arguments) for part, measure in PARTS.items() if arguments.only in (None, part)}
    print(json.dumps(results, indent=1))
    if arguments.only is None:
        save_result("doors", results)


def attack(arguments: argparse.Namespace) -> dict[str, Any]:
    """A run, left alone and then attacked."""
    port, run = _free_port(), arguments.work / "runs" / "doors"
    programs = _start(arguments, "doors", 100_000, port)
    try:
        _wait_for_step(run, FIRST_STEPS, programs)
        before = _watch(run, programs, QUIET_SECONDS)
        flooding = subprocess.Popen([sys.executable, __file__, "--work", ".", "--flood", str(port)])
        time.sleep(5)  # until all are connected
        during = _watch(run, programs, ATTACK_SECONDS)
        assert flooding.poll() is None, "the attack ended early"
        flooding.kill()
        said = "".join(path.read_text() for path in (run.parent / f"doors-{node}.log" for node in (0, 1)))
        return {"before": before, "during": during, "refusals in the log": said.count("was refused")}
    finally:
        for program in programs:
            program.kill()


def flood(port: int) -> None:
    """Until it is killed: idle connections, opened again when they are closed, and hostile ones."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, IDLE + HOSTILE + 100), hard))
    for number in range(HOSTILE):
        threading.Thread(target=_be_hostile, args=(port, number), daemon=True).start()
    while True:
        idle: list[socket.socket] = []
        with suppress(OSError):
            while len(idle) < IDLE:
                idle += [socket.create_connection(("127.0.0.1", port), 5)]
        time.sleep(5)
        for each in idle:
            each.close()


def _be_hostile(port: int, number: int) -> None:
    rng = random.Random(number)
    greeting = connections.MAGIC + bytes(64)
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            data = (
                rng.randbytes(100_000),
                greeting[: rng.randrange(80)],
                greeting + b"\xff" * 4096,
                b"GET / HTTP/1.1\r\n",
            )
            one.sendall(rng.choice(data))
            one.settimeout(rng.uniform(0, 1))
            while one.recv(100):
                pass
        time.sleep(0.1)


def _watch(run: Path, programs: list[subprocess.Popen], seconds: float) -> dict[str, float]:
    """Steps per second, and the most that a supervisor has taken."""
    begun, first = time.monotonic(), _step(run)
    most = {"memory MB": 0.0, "descriptors": 0.0, "threads": 0.0}
    while time.monotonic() < begun + seconds:
        for program in programs:
            process = psutil.Process(program.pid)
            now = (process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())
            most = {name: max(value, each) for (name, value), each in zip(most.items(), now, strict=True)}
        time.sleep(0.2)
    return {"steps per second": (_step(run) - first) / (time.monotonic() - begun), **most}


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs with and without the proof, by turns."""
    medians: dict[str, list[float]] = {"proof": [], "plain": []}
    for number in range(2 * arguments.pairs):
        kind = "proof" if number % 4 in (0, 3) else "plain"
        programs = _start(arguments, "doors", STEPS, _free_port(), is_plain=kind == "plain")
        assert [program.wait() for program in programs] == [0, 0], f"see {arguments.work}/runs/doors-*.log"
        rows = read_run(arguments.work / "runs" / "doors").series["time/step"].value
        medians[kind].append(float(statistics.median(rows[FIRST_STEPS:])))
    ratios = [proof / plain for proof, plain in zip(medians["proof"], medians["plain"], strict=True)]
    return {"seconds per step": medians, "proof / plain": statistics.median(ratios), "connection": _connections()}


def proofs(arguments: argparse.Namespace) -> dict[str, int]:
    """Proofs that a run makes and checks, by its steps."""
    found = {}
    for steps in (50, 200):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sitecustomize.py").write_text(COUNTING)
            os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{Path(__file__).resolve().parent.parent}"
            programs = _start(arguments, "doors", steps, _free_port())
            assert [program.wait() for program in programs] == [0, 0], f"see {arguments.work}/runs/doors-*.log"
            found[f"{steps} steps"] = len((Path(folder) / "proofs").read_text())
    return found


def _connections() -> dict[str, float]:
    """Seconds of a connection on loopback."""
    secret = SECRET.encode()
    with connections.listen("127.0.0.1") as listener:
        address = listener.getsockname()[:2]
        connections.ConnectionListener(listener, secret, lambda connection: connection.close(), "benchmark")
        found: dict[str, float] = {}
        for name in ("plain", "proof"):
            begun = time.perf_counter()
            for _ in range(300):
                if name == "plain":
                    socket.create_connection(address).close()
                else:
                    connections.dial(address, secret, "benchmark", {}).close()
            found[name] = (time.perf_counter() - begun) / 300
        return found


def _start(
    arguments: argparse.Namespace, name: str, steps: int, port: int, is_plain: bool = False
) -> list[subprocess.Popen]:
    shutil.rmtree(arguments.work / "runs" / name, ignore_errors=True)
    (arguments.work / "runs").mkdir(exist_ok=True)
    train = [sys.executable, "-m", "zero2all", "train", arguments.config, "--work", str(arguments.work), "--fresh"]
    train += ["--train.name", name, "--train.steps", str(steps), "--parallel.device", "cpu"]
    train += ["--parallel.cpu_threads", "1", "--validation.every_steps", str(10**9)]
    train += ["--checkpoint.keep_every_steps", "0"]
    programs = []
    for node in (0, 1):
        words, variables = [], {"Z2A_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        if is_plain:
            variables |= {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        else:
            words = ["--nodes", "2", "--node-rank", str(node), "--rendezvous", f"127.0.0.1:{port}"]
            words += ["--parallel.processes", "1"]
        with open(arguments.work / "runs" / f"{name}-{node}.log", "w") as log:
            environment = {**os.environ, **variables}
            programs.append(subprocess.Popen([*train, *words], env=environment, stdout=log, stderr=log))
    return programs


def _step(run: Path) -> int:
    with suppress(Exception):
        return int(read_run(run).series["loss"].step[-1])
    return -1


def _wait_for_step(run: Path, step: int, programs: list[subprocess.Popen]) -> None:
    while _step(run) < step:
        assert all(program.poll() is None for program in programs), f"see {run.parent}/doors-*.log"
        time.sleep(0.5)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


PARTS = {"attack": attack, "cost": cost, "proofs": proofs}

if __name__ == "__main__":
    main()
