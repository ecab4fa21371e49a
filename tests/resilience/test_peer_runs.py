"""`z2a train --nodes 2` with copies in the memory of the other machine: one machine is switched off and replaced."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from zero2all.common.fault import FAULTS, flip_byte
from zero2all.resilience.copies import PEER_FOLDER, whole_saves
from zero2all.resilience.slots import PAGE
from zero2all.track.reader import read_run

pytestmark = pytest.mark.slow
STEPS = 14
SECTIONS = {
    "train": {"steps": STEPS},
    "checkpoint": {"every_steps": 5},
    "validation": {"every_steps": 0, "tokens_per_source": 128},
    "parallel": {"device": "cpu", "cpu_threads": 1, "processes": 1, "zero": 1},
    "resilience": {"supervise": True, "peers": 1, "memory_every_steps": 2},
}


class Pair:
    """Two machines: each has its own host name and its own /dev/shm, which is lost with it."""

    def __init__(self, config: Path, root: Path) -> None:
        self.config, self.root, self.started = config, root, dict[int, subprocess.Popen]()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    def start(self, node: int, name: str, faults: tuple[dict, ...] = ()) -> None:
        words = [sys.executable, "-m", "zero2all", "train", str(self.config), "--work", str(self.root)]
        words += ["--train.name", name, "--nodes", "2", "--node-rank", str(node), "--interface", "lo"]
        words += ["--rendezvous", f"127.0.0.1:{self.port}"]
        own = f"hostname node{node}; mount -t tmpfs tmpfs /dev/shm; exec {shlex.join(words)}"
        plan = self.root / f"{name}.json"
        plan.write_text(json.dumps(faults))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "Z2A_LANG": "en", FAULTS: str(plan)}
        with (self.root / f"{name}-{node}.log").open("a") as log:
            line = ["unshare", "--uts", "--mount", "sh", "-c", own]
            self.started[node] = subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, node: int) -> None:
        process = self.started.pop(node)
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
        process.wait()

    def said(self, name: str) -> str:
        return "\n---\n".join((self.root / f"{name}-{node}.log").read_text() for node in (0, 1))

    def copies_on_machine_0(self) -> dict:
        home = Path(f"/proc/{self.started[0].pid}/root/dev/shm/zero2all-{os.getuid()}")
        folders = list(home.iterdir()) if home.exists() else []
        return whole_saves(folders[0] / PEER_FOLDER, [1]) if folders else {}

    def until(self, holds: Callable[[], bool], name: str) -> None:
        wait_until(holds, why=lambda: self.said(name))

    def ended_well(self, name: str) -> None:
        self.until(lambda: all(one.poll() is not None for one in self.started.values()), name)
        assert {one.returncode for one in self.started.values()} == {0}, self.said(name)


@pytest.fixture
def pair(work, config_file) -> Iterator[Pair]:
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("own mounts and host names (unshare) need root")
    found = Pair(config_file(**SECTIONS), work.root)
    yield found
    for node in list(found.started):
        found.kill(node)


def test_a_replaced_machine_continues_from_the_memory_of_the_other_or_from_the_disk(pair, work):
    """On disk is step 5 when machine 1 stops before step 10; in memory are 6 and 8."""
    for node in (0, 1):
        pair.start(node, "whole")
    pair.ended_well("whole")
    losses = read_run(work.run("whole")).series["loss"].value.tolist()
    for name, step in (("replaced", 8), ("damaged", 5)):
        for node in (0, 1):
            pair.start(node, name, ({"fault": "stop", "rank": 1, "step": 10, "point": "step"},))
        pair.until(lambda: 8 in [save[0] for save in pair.copies_on_machine_0()], name)
        if name == "damaged":
            for (found,) in pair.copies_on_machine_0().values():
                flip_byte(found.path, PAGE + 100)
        pair.kill(1)
        pair.start(1, name)
        pair.ended_well(name)
        assert ("step 8 was fetched from the memory of machine 0" in pair.said(name)) is (name == "replaced")
        assert ("crc32c differs" in pair.said(name)) is (name == "damaged")
        files = sorted(work.run(name).glob("metrics/train-*.jsonl"))
        starts = [json.loads(path.open().readline())["data"]["resumed_from"] for path in files]
        assert starts == [None, step], pair.said(name)
        assert read_run(work.run(name)).series["loss"].value.tolist() == losses
