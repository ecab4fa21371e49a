"""No socket of the package waits at all addresses of a machine, unless the user asks for it."""

import ast
import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import zero2all
from benchmarks.two_machines import ADDRESSES, two_machines, why_not
from tests.ports import free_port
from tests.train.conftest import config_file, shared_work, work  # noqa: F401

PACKAGE = Path(zero2all.__file__).parent
ANY = ("", "0.0.0.0", "::")
LISTENING = "0A"
OPENERS = ("create_server", "bind", "listen", "start_server", "HTTPServer", "TCPServer", "Listener")


def test_no_call_that_opens_a_port_names_all_addresses():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if not any(opener in source for opener in OPENERS):  # to parse all files takes seconds
            continue
        for node in ast.walk(ast.parse(source)):
            called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if called in OPENERS:
                constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
                found += [f"{path.name}:{each.lineno}" for each in constants if each.value in ANY]
    assert found == []


def sockets_of(programs: list[subprocess.Popen]) -> Iterator[str]:
    """The addresses at which these processes and their children wait."""
    for program in programs:
        for process in [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]:
            links = [str(each.readlink()) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            own = {link[8:-1] for link in links if link.startswith("socket:[")}
            for name, size in (("tcp", 4), ("tcp6", 16)):
                for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
                    _, place, _, state, *_, inode = line.split()[:10]
                    if state == LISTENING and inode in own:
                        words = bytes.fromhex(place.partition(":")[0])
                        address = b"".join(words[part : part + 4][::-1] for part in range(0, size, 4))
                        yield str(ipaddress.ip_address(address))


def watched(programs: list[subprocess.Popen]) -> set[str]:
    """All addresses at which they waited until they ended; each must have ended well."""
    found: set[str] = set()
    while any(program.poll() is None for program in programs):
        with suppress(OSError, psutil.Error):  # a process has just ended
            found |= set(sockets_of([program for program in programs if program.poll() is None]))
        time.sleep(0.1)
    texts = [program.communicate()[0] for program in programs]
    assert [program.returncode for program in programs] == [0] * len(programs), "\n".join(texts)
    return found


def start(*words: str, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(words, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)


def test_a_run_on_one_machine_waits_on_loopback_only(work, config_file):  # noqa: F811
    train = ["-m", "zero2all", "train", str(config_file()), "--work", str(work.root), "--parallel.processes", "2"]
    found = watched([start(sys.executable, *train)])
    assert found
    assert all(ipaddress.ip_address(each).is_loopback for each in found), found


def test_two_machines_wait_at_the_address_of_their_network_and_on_loopback(work, config_file):  # noqa: F811
    if problem := why_not():
        pytest.skip(problem)
    config, port = str(config_file()), str(free_port())
    words = ["--nodes", "2", "--rendezvous", f"{ADDRESSES[0]}:{port}", "--resilience.peers", "true"]
    words += ["--resilience.memory_every_steps", "2", "--resilience.supervise", "true"]
    with two_machines() as machines:
        train = [sys.executable, "-m", "zero2all", "train", config, "--work", str(work.root), *words, "--node-rank"]
        programs = [start(*machines.command(node, *train, str(node))) for node in (0, 1)]
        found = watched(programs)
    assert {each for each in found if not ipaddress.ip_address(each).is_loopback} == set(ADDRESSES)


def test_the_watch_of_sockets_sees_one_that_waits_everywhere():
    code = "import socket, time; s = socket.create_server(('', 0)); print('up', flush=True); time.sleep(60)"
    with start(sys.executable, "-c", code) as program:
        assert program.stdout.readline() == "up\n"
        assert list(sockets_of([program])) == ["0.0.0.0"]
        program.kill()
