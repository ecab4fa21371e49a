"""Which machine of a run this one is, where the machines meet, and what is set and measured of their network."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.ports import free_port
from zero2all.common.errors import UsageError
from zero2all.parallel import network
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.device import cpus_to_take
from zero2all.parallel.launch import run_processes
from zero2all.parallel.network import Chosen, fast_ports, measure_ring, network_variables, set_network_variables
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


def test_ranges_of_ports_numbers_of_machines_and_the_first_host_of_a_slurm_list_are_read():
    assert list(ParallelConfig(ports="30000-30002").free_ports) == [30000, 30001, 30002]
    assert (list(ParallelConfig().free_ports), ParallelConfig(ports="30000-30000").problems("parallel")) == ([0], [])
    for wrong in ("30000", "2-1", "0-9", "1-70000", "a-b"):
        (problem,) = ParallelConfig(ports=wrong).problems("parallel")
        assert (problem.field, problem.value) == ("parallel.ports", wrong)
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


ETHERNET = Chosen("eth0", "10.0.0.1", "the route to 10.0.0.2 leaves through it", 1000)


def ports(tmp_path, *states):
    for number, state in enumerate(states):
        port = tmp_path / f"class/infiniband/mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    return fast_ports(tmp_path)


def test_variables_follow_from_interface_and_ports(tmp_path):
    down = ports(tmp_path, "1: DOWN")
    said = {one.name: one.value for one in network_variables(ETHERNET, down, {})}
    assert said == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    both = ports(tmp_path / "both", "1: DOWN", "4: ACTIVE")
    assert [(port.name, port.is_active) for port in both] == [("mlx5_0/1", False), ("mlx5_1/1", True)]
    assert "NCCL_IB_DISABLE" not in {one.name for one in network_variables(ETHERNET, both, {})}
    assert network_variables(None, [], {}) == []


def test_what_the_user_set_stays_and_an_interface_that_does_not_exist_is_refused():
    values = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_P2P_DISABLE": "1"}
    found = set_network_variables("127.0.0.1", values)
    assert values == {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert "NCCL_SOCKET_IFNAME=ib0 (set by you)" in map(str, found)
    with pytest.raises(UsageError, match=r"names eth9, but this machine has only the interfaces .*lo"):
        set_network_variables("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth9"})


def test_a_link_of_known_speed_is_measured(monkeypatch):
    now = 100.0

    def exchange(size):
        nonlocal now
        now += 0.002 + size / 20e6

    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: now))
    latency, bits = measure_ring(exchange, lambda seconds: seconds)
    assert (latency, bits) == (pytest.approx(0.002, rel=1e-3), pytest.approx(160e6, rel=1e-3))


JOIN = """
import os, sys, torch
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK=sys.argv[2], WORLD_SIZE="2")
from zero2all.parallel.world import join_world
from zero2all.parallel.config import ParallelConfig
with join_world(torch.device("cpu"), ParallelConfig()) as world:
    print(world.notes)
"""


def test_two_machines_say_how_fast_the_link_is(start):
    port = free_port()
    for each in [start(port, rank, code=JOIN) for rank in range(2)]:
        assert each.wait() == 0, each.text()
        assert "GLOO_SOCKET_IFNAME=lo (the route to 127.0.0.1 leaves through it)" in each.text()
        assert "network: 2 machines over lo" in each.text()


def system(tmp_path, nodes, numa_node):
    """A /sys with a GPU at 0000:9a:00.0."""
    (tmp_path / "bus/pci/devices/0000:9a:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:9a:00.0/numa_node").write_text(f"{numa_node}\n")
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-15\n")
    for number, cpus in enumerate(nodes):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "numa_node", "allowed", "taken"),
    [
        (["0-3,8-11", "4-7,12-15"], 1, set(range(16)), {4, 5, 6, 7, 12, 13, 14, 15}),
        (["0-3,8-11", "4-7,12-15"], -1, set(range(16)), set()),  # the firmware does not say
        (["0-15"], 0, set(range(16)), set()),  # one node
        (["0-3,8-11", "4-7,12-15"], 1, {0, 1, 2, 3}, set()),  # srun or taskset chose others
        (["0-3,8-11", "4-7,12-15"], 1, {4, 5}, set()),  # srun chose some of them
    ],
)
def test_a_process_takes_the_cpus_of_its_gpu_s_node_unless_somebody_chose(tmp_path, nodes, numa_node, allowed, taken):
    assert cpus_to_take("0000:9a:00.0", allowed, system(tmp_path, nodes, numa_node)) == taken


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["index", "uuid"])
def test_the_pci_place_is_that_of_the_visible_gpu(form):
    command = ["nvidia-smi", f"--query-gpu={form},pci.bus_id", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    name, bus = (word.strip() for word in asked.stdout.splitlines()[-1].split(","))
    program = "import torch; p = torch.cuda.get_device_properties(0); "
    program += "print(f'{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0')"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": name}
    said = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.strip().upper() == bus.upper()
