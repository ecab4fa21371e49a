"""`nvidia-smi topo -m` of several kinds of machines, written by hand, not recorded: which GPUs are joined by what."""

from __future__ import annotations

from collections import Counter

from zero2all.measure.doctor.gpus import grade_topology, parse_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def dgx(link: str, cards: int, cpus: tuple[str, ...], nodes: tuple[str, ...]) -> str:
    """Eight GPUs behind NVSwitches; GPU g is near the cards g of its PCIe switch."""
    names = [f"GPU{number}" for number in range(8)]
    heading = "\t".join(["", *names, *(f"NIC{card}" for card in range(cards)), "CPU Affinity", "NUMA Affinity"])
    lines = [f"\x1b[4m{heading}\tGPU NUMA ID\x1b[0m"]
    for gpu in range(8):
        near = ["PXB" if card * 8 // cards == gpu else "NODE" if (card * 2 // cards) == gpu // 4 else "SYS"
                for card in range(cards)]  # fmt: skip
        cells = [" X " if other == gpu else link for other in range(8)]
        lines.append("\t".join([names[gpu], *cells, *near, cpus[gpu], nodes[gpu], "", "N/A"]))
    for card in range(cards):
        others = [" X " if other == card else "SYS" for other in range(cards)]
        lines.append(
            "\t".join([f"NIC{card}", *["PXB" if card * 8 // cards == gpu else "SYS" for gpu in range(8)], *others])
        )
    return "\n".join(lines) + "\n" + LEGEND


A100_CPUS = [cpus for cpus in ("48-63,176-191", "16-31,144-159", "112-127,240-255", "80-95,208-223") for _ in "12"]
A100 = dgx("NV12", 10, tuple(A100_CPUS), ("3", "3", "1", "1", "7", "7", "5", "5"))
H100 = dgx("NV18", 12, ("0-55,112-167",) * 4 + ("56-111,168-223",) * 4, ("0",) * 4 + ("1",) * 4)
PCIE_BOX = (
    """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tPHB\tNODE\tSYS\t0-15,32-47\t0
GPU1\tPHB\t X \tNODE\tSYS\t0-15,32-47\t0
GPU2\tNODE\tNODE\t X \tSYS\t0-15,32-47\t0
GPU3\tSYS\tSYS\tSYS\t X \t16-31,48-63\t1
"""
    + LEGEND
)
DESKTOP = (
    """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\t0-31\t0\t\tN/A
GPU1\tPHB\t X \t0-31\t0\t\tN/A
"""
    + LEGEND
)
OTHER_CARDS = """\tGPU0\tGPU1\tbnxt_re0\tibp12s0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tPIX\tSYS\t0-23\t0
GPU1\tNV4\t X \tSYS\tPIX\t24-47\t1
bnxt_re0\tPIX\tSYS\t X \tSYS\t\t
ibp12s0\tSYS\tPIX\tSYS\t X \t\t
""" + LEGEND  # fmt: skip
CONTAINER = (
    """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tN/A\tN/A\tN/A\t\tN/A
GPU1\tN/A\t X \tN/A\tN/A\t\tN/A
"""
    + LEGEND
)


def test_dgx_machines_have_nvlink_between_all_pairs_and_a_card_near_every_gpu() -> None:
    for text, link in ((A100, "NV12"), (H100, "NV18")):
        topology = parse_topology(text)
        assert Counter(topology.between_gpus().values()) == {link: 28}
        assert not [each for each in grade_topology(topology) if "no network card" in each.found]
    assert parse_topology(A100).nodes["GPU4"] == "7"
    assert parse_topology(H100).cpus["GPU7"] == "56-111,168-223"


def test_a_pcie_box_has_no_nvlink() -> None:
    topology = parse_topology(PCIE_BOX)
    assert Counter(topology.between_gpus().values()) == {"SYS": 3, "NODE": 2, "PHB": 1}
    found = next(iter(grade_topology(topology)))
    assert (found.grade, found.advice.startswith("Prefer data parallelism")) == ("warning", True)


def test_a_desktop_with_two_cards() -> None:
    topology = parse_topology(DESKTOP)
    assert topology.between_gpus() == {("GPU0", "GPU1"): "PHB"}
    assert next(iter(grade_topology(topology))).grade == "note"


def test_network_cards_of_any_name_are_seen() -> None:
    topology = parse_topology(OTHER_CARDS)
    assert topology.links["GPU0", "bnxt_re0"] == topology.links["GPU1", "ibp12s0"] == "PIX"
    assert topology.between_gpus() == {("GPU0", "GPU1"): "NV4"}


def test_a_container_that_hides_its_links_says_nothing_about_them() -> None:
    topology = parse_topology(CONTAINER)
    assert (topology.links, topology.cpus, topology.nodes) == ({}, {}, {})
