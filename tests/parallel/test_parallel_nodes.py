"""Which machine of a run this one is, and where the machines meet."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from tests.ports import free_port
from zero2all.common.errors import UsageError
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.launch import run_processes
from zero2all.parallel.nodes import Nodes, find_nodes, first_host, outer_address, read_counts, use_interface
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.member import Rules

STEP = {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "70123"}


def test_flags_win_over_slurm_and_slurm_fills_in_what_they_leave_open():
    assert find_nodes(environment=STEP) == Nodes(2, 1, "gpu03", 20123, "", 20123, 2)
    assert find_nodes((1, 2), 0, "head:5000", "10.0.0.2:6000", STEP) == Nodes(2, 0, "head", 5000, "10.0.0.2", 6000, 1)
    assert find_nodes((3, 3), 2, "[fd00::1]:5000", None, {}) == Nodes(3, 2, "fd00::1", 5000, "", 5000, 3)
    assert find_nodes(environment={}) == Nodes()
    assert find_nodes(environment={**STEP, "SLURM_STEP_NUM_NODES": "1"}) == Nodes()


def test_all_problems_of_the_flags_are_named_at_once():
    here = rf"192.0.2.1 of --rendezvous is no address .*--rendezvous-bind {outer_address()}:5000"
    for arguments, said in (
        ({"counts": (2, 2), "rank": 2}, r"--node-rank is 2: expected 0 to 1.*--rendezvous is missing"),
        ({"rendezvous": "a:1"}, "--rendezvous needs the number of machines"),
        ({"rank": 0}, "--node-rank needs the number of machines"),  # it would train alone
        ({"counts": (2, 2), "rank": 0, "rendezvous": "a:99999"}, "Expected HOST:PORT"),
        ({"environment": {**STEP, "SLURM_STEP_NUM_TASKS": "16"}}, r"16 tasks on 2 machines.*--ntasks-per-node=1"),
        ({"counts": (2, 2), "rank": 0, "rendezvous": "192.0.2.1:5000"}, here),  # of another machine
    ):
        with pytest.raises(UsageError, match=said):
            find_nodes(**{"environment": {}, **arguments})
    with pytest.raises(UsageError, match=r"--interface is 'ib9'. This machine has: .*lo"):
        use_interface("ib9")


def test_machine_0_listens_where_the_others_look_for_it_and_nowhere_else(capfd):
    for host in ("127.0.0.1", "::1"):
        assert find_nodes((2, 2), 0, f"[{host}]:5000", environment={}).bind_host == host
    assert find_nodes((2, 2), 0, "192.0.2.1:5000", "0.0.0.0:6000", environment={}).bind_host == "0.0.0.0"
    find_nodes((2, 2), 1, "192.0.2.1:5000", environment={})
    assert capfd.readouterr().err == ""
    find_nodes((2, 2), 0, "127.0.0.1", environment={})
    assert "--rendezvous has no port: 29500 is used." in capfd.readouterr().err


def test_a_name_that_is_not_known_yet_does_not_end_machine_0(capfd):
    """In Kubernetes the name of a pod is known a few seconds after the pod has started."""
    nodes = find_nodes((2, 2), 0, "no-such-host.invalid:5000", environment={})
    assert nodes.bind_host == outer_address()
    assert "does not know the name no-such-host.invalid of --rendezvous. It listens on" in capfd.readouterr().err


def test_a_second_machine_0_on_this_host_is_suspected():
    port = free_port()
    nodes = Nodes(2, 0, "127.0.0.1", port, "127.0.0.1", port)
    with nodes.listen(), pytest.raises(UsageError, match=rf"Port {port} is in use: is another machine 0 of this run"):
        nodes.listen()


def test_a_range_of_ports_for_firewalls():
    assert list(ParallelConfig(ports="30000-30002").free_ports) == [30000, 30001, 30002]
    assert list(ParallelConfig().free_ports) == [0]
    assert ParallelConfig(ports="30000-30000").problems("parallel") == []
    for wrong in ("30000", "2-1", "0-9", "1-70000", "a-b"):
        (problem,) = ParallelConfig(ports=wrong).problems("parallel")
        assert (problem.field, problem.value) == ("parallel.ports", wrong)


def test_numbers_of_machines_are_read_and_the_first_host_of_a_slurm_list():
    assert [read_counts(text) for text in ("4", "2:4")] == [(4, 4), (2, 4)]
    for wrong in ("0", "4:2", "2:", "a", "1:2:3"):
        with pytest.raises(ValueError):  # noqa: PT011
            read_counts(wrong)
    hosts = {"a1,b2": "a1", "gpu[007-012,3],b": "gpu007", "r[1-2]n[5,7]-x,b": "r1n5-x", "one": "one"}
    assert {each: first_host(each) for each in hosts} == hosts


def rules(processes: int) -> Rules:
    settings = ResilienceConfig(restarts=0)
    secret = b"a secret of sixteen bytes or more"
    return Rules("run", 2, 2, lambda world: world == 2 * processes, settings, 60.0, has_memory=False, secret=secret)


def test_each_machine_starts_its_own_ranks_and_all_find_the_store_on_their_own_loopback(tmp_path, monkeypatch):
    """Rank 0 answers each that connects; the last rank connects over its machine's way to the store."""
    code = """
import os, pathlib, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "Z2A_RENDEZVOUS")
said = " ".join(os.environ[name] for name in names)
if "Z2A_STORE_SOCKET" in os.environ:
    listener = socket.socket(fileno=int(os.environ["Z2A_STORE_SOCKET"]))
    said += " " + listener.getsockname()[0]
    for _ in range(3): listener.accept()[0].sendall(b"hello")
else:
    said += " " + socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).recv(5).decode()
pathlib.Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(said)
"""
    port = free_port()
    words = [sys.executable, "-c", code, str(tmp_path)]
    nodes = [Nodes(2, rank, "localhost", port, "127.0.0.1", port) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr("zero2all.resilience.supervisor.stop_signals_to", lambda _: nullcontext())
        monkeypatch.setattr("zero2all.resilience.supervisor.signals_to", lambda _: nullcontext())
        ended = [pool.submit(run_processes, 2, words, None, one, False, rules(2)) for one in nodes]
        assert [one.result(60) for one in ended] == [0, 0]
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(4)] == [
        f"0 4 0 2 127.0.0.1 localhost:{port} 127.0.0.1",
        f"1 4 1 2 127.0.0.1 localhost:{port} hello",
        f"2 4 0 2 127.0.0.1 localhost:{port} hello",
        f"3 4 1 2 127.0.0.1 localhost:{port} hello",
    ]
