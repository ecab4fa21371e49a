"""Several machines in one run, as processes on this one: each has its supervisor, and all of them meet."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.waiting import wait_until
from zero2all.common.fault import FAULTS

LOOP = """
    import itertools, os, pathlib, signal, socket, sys, time
    from zero2all.common.errors import PeerFailureError
    from zero2all.common.fault import fault_point
    from zero2all.resilience import heartbeat

    rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
    heartbeat.attach()
    if rank == 1 and (folder / "late").exists():
        (folder / "late").unlink()
        time.sleep(60)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))

    # Rank 0 counts the steps; the others hear of each over the port of the coordinator, as ranks reach their store.
    world = int(os.environ["WORLD_SIZE"])
    done = folder / "done"
    first = int(done.read_text()) if done.exists() else 0
    with open(folder / "attempts", "a") as file:
        file.write(f"{rank}/{world} {os.environ['Z2A_ATTEMPT']} from {first}\\n")
    if rank == 0:
        listener = socket.socket(fileno=int(os.environ["Z2A_STORE_SOCKET"]))
        others = [listener.accept()[0] for _ in range(world - 1)]
        assert sorted(int(other.recv(1)) for other in others) == list(range(1, world))
    else:
        store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        store.sendall(str(rank).encode())
    def peer_failed():
        heartbeat.failed(PeerFailureError("the other is gone"))
        sys.exit(1)

    for step in itertools.count(first):
        heartbeat.beat("step", step)
        fault_point("step", step + 1)
        if rank == 0:
            time.sleep(0.02)
            done.with_suffix(".new").write_text(str(step + 1))
            done.with_suffix(".new").replace(done)
            said = [other.recv(1) for other in others]
            if b"" in said: peer_failed()
            word = b"s" if asked or b"s" in said else b"e" if (folder / "enough").exists() else b"."
            for other in others: other.sendall(word)
        else:
            if (folder / "bad").exists(): sys.exit(16)  # as the health check does
            store.sendall(b"s" if asked else b".")
            word = store.recv(1)
            if not word: peer_failed()
        if word == b"s": sys.exit(10)
        if word == b"e": break
    heartbeat.beat("end", step)
"""
MACHINE = """
    import sys
    from zero2all.common.progress import show_log
    from zero2all.common.secret import run_secret
    from zero2all.parallel.launch import run_processes
    from zero2all.parallel.nodes import Nodes
    from zero2all.resilience.config import ResilienceConfig
    from zero2all.resilience import coordinator, member
    from zero2all.resilience.supervisor import Watch
    import json, pathlib

    show_log()
    job = json.loads(sys.argv[1])
    folder = pathlib.Path(job["folder"])
    usual = {"limits": {"step": 60.0}, "node_silence_seconds": 20.0, "join_after_seconds": 0.5}
    settings = ResilienceConfig(**{**usual, **job["settings"]})
    coordinator.NEWCOMER_SECONDS, coordinator.START_SECONDS = 0.5, job["start"]
    coordinator.FLAPS, coordinator.FLAP_SECONDS = 2, 8.0
    coordinator.NOTICE_SECONDS = member.NOTICE_SECONDS = 1.0
    rules = member.Rules("run", job["least"], job["most"], lambda world: world != 3, settings, job["join"], True,
                         run_secret(folder / "run"))
    nodes = Nodes(job["most"], job["node"], "127.0.0.1", job["port"], "127.0.0.1", job["port"], job["least"])
    words = [sys.executable, str(folder / "loop.py"), str(folder)]
    sys.exit(run_processes(1, words, Watch(settings, folder / "run", True), nodes, False, rules))
"""


class Machines:
    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen]()
        for name, text in (("loop.py", LOOP), ("machine.py", MACHINE)):
            (folder / name).write_text(textwrap.dedent(text))
        self.port = free_port()
        self.faults: list[dict] = []

    def start(self, node: int, least: int = 1, most: int = 2, join: float = 60, start=60, secret="", **settings):
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps([{"point": "step", **fault} for fault in self.faults]))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), FAULTS: str(plan), "Z2A_LANG": "en"}
        env |= {"Z2A_SECRET": secret} if secret else {}
        job = {"folder": str(self.folder), "port": self.port, "node": node, "least": least, "most": most, "join": join}
        job |= {"settings": settings, "start": start}
        words = [sys.executable, str(self.folder / "machine.py"), json.dumps(job)]
        path = self.folder / f"output-{len(self.started)}"
        with path.open("w") as output:
            process = subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT)
        process.said = path.read_text
        self.started.append(process)
        return process

    def step(self) -> int:
        return int((self.folder / "done").read_text()) if (self.folder / "done").exists() else 0

    def attempts(self) -> list[list[str]]:
        """By attempt: rank/world of those that took part."""
        path, found = self.folder / "attempts", dict[str, list[str]]()
        for line in path.read_text().splitlines() if path.exists() else ():
            found.setdefault(line.split()[1], []).append(line.split()[0])
        return [sorted(ranks) for ranks in found.values()]

    def ended_well(self, attempts: list[list[str]], *processes: subprocess.Popen) -> None:
        """The run comes to its end, and these were its attempts."""
        (self.folder / "enough").touch()
        assert codes(*processes) == [0] * len(processes), "\n---\n".join(process.said() for process in processes)
        assert self.attempts() == attempts

    def until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, why=lambda: "\n---\n".join(process.said() for process in self.started))

    def pages(self) -> list[str]:
        return [json.loads(path.read_text())["text"] for path in sorted(self.folder.glob("run/incidents/*.json"))]


def codes(*processes: subprocess.Popen) -> list[int]:
    return [process.wait(180) for process in processes]


@pytest.fixture
def machines(tmp_path):
    found = Machines(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.wait()


def test_a_rank_that_fails_ends_the_attempt_on_both_machines_and_strangers_and_idle_connections_harm_nobody(machines):
    machines.faults = [{"fault": "kill", "rank": 1, "step": 20}]
    first, stranger = machines.start(0, least=2), machines.start(1, least=2, secret="not the secret of this run")
    assert codes(stranger) == [2]
    assert f"Machine 0 at 127.0.0.1:{machines.port} has another secret than this machine" in stranger.said()
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", machines.port)))
        second = machines.start(1, least=2)
        machines.until(lambda: machines.step() > 25)
        secret = (machines.folder / "run.secret").read_text().strip()
        for process in (first, second, *psutil.Process(first.pid).children(recursive=True)):
            found = psutil.Process(process.pid)
            assert found.num_fds() < 400
            assert secret not in " ".join(found.cmdline())
    machines.ended_well([["0/2", "1/2"], ["0/2", "1/2"]], first, second)
    (page,) = machines.pages()
    assert page.startswith(f"Machine 1 ({socket.gethostname()}): Rank 1 ended in phase step after step 19: killed by")
    assert page in first.said()
    assert 0 < first.said().count("z2a: coordinator: a connection from 127.0.0.1 was refused") < 5
    said = [path.read_text() for path in machines.folder.rglob("*") if path.is_file() and path.suffix != ".secret"]
    assert len(said) > 5
    assert not any(secret in text for text in said), "its secret is not shown anywhere"


def test_a_machine_that_is_lost_is_left_out_and_taken_in_again_when_it_comes_back(machines):
    first, second = machines.start(0), machines.start(1)
    machines.until(lambda: machines.step() > 10)
    second.kill()
    machines.until(lambda: len(machines.attempts()) == 2)
    third = machines.start(1)
    machines.until(lambda: len(machines.attempts()) == 3)
    machines.ended_well([["0/2", "1/2"], ["0/1"], ["0/2", "1/2"]], first, third)
    assert "goes on with it" in first.said()
    (page,) = machines.pages()
    assert [words for words in ("Machine 1", "its connection was closed") if words not in page] == []


@pytest.mark.slow
def test_a_run_trains_a_while_before_it_is_interrupted_and_leaves_out_a_machine_that_is_lost_again_and_again(machines):
    first = machines.start(0, join_after_seconds=4.0)
    for count in (1, 3):
        second = machines.start(1, join_after_seconds=4.0)
        machines.until(lambda: machines.attempts()[-1:] == [["0/2", "1/2"]])
        second.kill()
        machines.until(lambda count=count: len(machines.attempts()) == count + 1)
        begun = time.monotonic()
    third = machines.start(1, join_after_seconds=4.0)
    machines.until(lambda: len(machines.attempts()) == 5)
    assert time.monotonic() - begun > 7.0
    assert "was lost 2 times soon after it had come. It is left out for 8 s" in first.said()
    machines.ended_well([["0/2", "1/2"], ["0/1"]] * 2 + [["0/2", "1/2"]], first, third)


@pytest.mark.slow
def test_a_machine_that_the_health_check_found_bad_is_left_out_and_the_others_go_on(machines):
    (machines.folder / "bad").touch()
    first, second = machines.start(0), machines.start(1)
    assert codes(second) == [16], second.said()
    machines.until(lambda: len(machines.attempts()) == 2)
    machines.ended_well([["0/2", "1/2"], ["0/1"]], first)


def test_without_machine_0_the_others_end_their_ranks_and_wait_for_it(machines):
    first, second = machines.start(0), machines.start(1, node_silence_seconds=4.0)
    machines.until(lambda: machines.step() > 10)
    first.send_signal(signal.SIGSTOP)  # silent, with its connections open
    machines.until(lambda: "machine 0 is not reached" in second.said())
    first.kill()
    again = machines.start(0)
    machines.until(lambda: len(machines.attempts()) == 2)
    machines.ended_well([["0/2", "1/2"]] * 2, again, second)
    third = machines.start(1, join=1.0)
    assert codes(third) == [1]
    assert "Machine 0 was not reached at 127.0.0.1" in third.said()


def test_a_signal_to_one_machine_ends_a_fixed_run_everywhere_and_an_elastic_one_only_there(machines):
    first, second = machines.start(0), machines.start(1)
    machines.until(lambda: machines.step() > 10)
    second.terminate()
    assert codes(second) == [10], second.said()
    assert f"joined 127.0.0.1:{machines.port} as machine 1: attempt 1 on 2 machines. Machine 0" in second.said()
    machines.until(lambda: len(machines.attempts()) == 2)
    machines.until(lambda: machines.step() > 30)
    first.terminate()
    assert codes(first) == [10], first.said()
    assert machines.attempts() == [["0/2", "1/2"], ["0/1"]]
    at = machines.step()
    fixed = [machines.start(node, least=2) for node in (0, 1)]
    machines.until(lambda: machines.step() > at)
    fixed[1].terminate()
    assert codes(*fixed) == [10, 10], fixed[0].said() + fixed[1].said()
    assert machines.pages() == []


def test_a_machine_that_leaves_before_it_trains_holds_up_nobody(machines):
    (machines.folder / "late").touch()
    first, second = machines.start(0), machines.start(1)
    machines.until(lambda: not (machines.folder / "late").exists() and machines.attempts() == [["0/2"]])
    second.terminate()
    assert codes(second) == [10], second.said()
    machines.until(lambda: machines.step() > 5)
    machines.ended_well([["0/2"], ["0/1"]], first)
    assert machines.pages() == []


def test_machines_that_do_not_come_are_named_and_the_minimum_starts_without_them(machines):
    others = machines.start(2, least=3, most=4), machines.start(2, least=3, most=4), machines.start(4, least=3, most=5)
    machines.until(lambda: all("machine 0 is not reached" in each.said() for each in others))
    first, (second, twice, other) = machines.start(0, least=3, most=4, join=5.0), others
    assert sorted(codes(first, second, twice, other)) == [1, 1, 2, 2]
    assert "waiting for machine 1, 3 of 4" in first.said()
    assert "did not come within 5 s: 1, 3" in second.said() + twice.said()
    pids = sorted((second.pid, twice.pid))
    twice_said = r"Machine 2 connected twice: from .*process (\d+).* and from .*process (\d+)"
    assert sorted(map(int, re.search(twice_said, second.said() + twice.said()).groups())) == pids
    assert "--node-rank is 4, but machine 0 was started with --nodes 4" in other.said()


def test_below_the_minimum_a_run_that_is_to_stop_saves_first(machines):
    first, second = (machines.start(node, least=2, below_minimum="stop") for node in (0, 1))
    machines.until(lambda: machines.step() > 10)
    second.kill()
    assert codes(first) == [10], first.said()
    assert machines.attempts() == [["0/2", "1/2"], ["0/1"]]
    assert "what memory holds is saved" in first.said()


@pytest.mark.slow
def test_a_number_of_machines_that_does_not_fit_is_not_used(machines):
    """Three ranks do not fit: the third machine waits until there are four."""
    started = [machines.start(node, most=4, start=2) for node in (0, 1, 2)]
    machines.until(lambda: machines.step() > 5)
    assert "1 machine must wait" in started[0].said()
    started.append(machines.start(3, most=4))
    machines.until(lambda: len(machines.attempts()) == 2)
    machines.ended_well([["0/2", "1/2"], [f"{rank}/4" for rank in range(4)]], *started)
