"""The network between machines: what is set, what is left, what is measured at the start; CPUs near a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.ports import free_port
from zero2all.common.errors import UsageError
from zero2all.parallel import network
from zero2all.parallel.device import cpus_to_take
from zero2all.parallel.network import Chosen, fast_ports, measure_ring, network_variables, set_network_variables

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
    assert latency == pytest.approx(0.002, rel=1e-3)
    assert bits == pytest.approx(160e6, rel=1e-3)


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
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={form},pci.bus_id", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    name, bus = (word.strip() for word in asked.stdout.splitlines()[-1].split(","))
    program = (
        "import torch; p = torch.cuda.get_device_properties(0); "
        "print(f'{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0')"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": name}
    said = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.strip().upper() == bus.upper()
