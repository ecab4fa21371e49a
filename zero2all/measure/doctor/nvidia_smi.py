"""What nvidia-smi prints, as data: `-q -x` (XML, in which a driver leaves out what it does not know) and `topo -m`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

ANSI = re.compile(r"\x1b\[[0-9;]*m")
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


@dataclass(frozen=True)
class GpuState:
    """One GPU. None: the driver does not report it."""

    index: int
    name: str
    uuid: str
    bus: str
    memory_mib: float | None
    used_mib: float | None
    processes: int
    sm_mhz: float | None
    max_sm_mhz: float | None
    power_limit: float | None
    default_power_limit: float | None
    performance_state: str
    slowed_by: tuple[str, ...]
    """Reasons for low clocks that mean a problem; not idle, not the power limit under load."""
    clocks_are_set: bool
    celsius: float | None
    slow_celsius: float | None
    ecc: str
    uncorrected: int
    """Uncorrected memory errors since the driver was loaded."""
    remapping: str
    """`failed`, `pending` or empty: memory rows that the driver replaces."""
    persistence: str
    compute_mode: str
    mig: str
    pcie_gen: tuple[float | None, float | None]
    """Now, and the most that card and slot can."""
    pcie_width: tuple[float | None, float | None]


@dataclass(frozen=True)
class Report:
    """What `nvidia-smi -q -x` says."""

    driver: str
    cuda: str
    """The newest CUDA version that the driver runs."""
    gpus: list[GpuState]


def parse_report(text: str) -> Report:
    """Read the XML; ValueError where it is none."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from None
    gpus = [_gpu(number, node) for number, node in enumerate(root.findall("gpu"))]
    return Report(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def _gpu(index: int, node: ElementTree.Element) -> GpuState:
    power = "gpu_power_readings" if node.find("gpu_power_readings") is not None else "power_readings"
    limit = "current_power_limit" if node.find(f"{power}/current_power_limit") is not None else "power_limit"
    reasons = {
        re.sub(r"clocks_(event|throttle)_reason_", "", each.tag): (each.text or "").strip() == "Active"
        for group in ("clocks_event_reasons", "clocks_throttle_reasons")
        for each in node.findall(f"{group}/*")
    }
    errors = [each for each in node.findall("ecc_errors/volatile/*") if "uncorrectable" in each.tag]
    rows = {state: _text(node, f"remapped_rows/remapped_row_{state}") == "Yes" for state in ("failure", "pending")}
    link = "pci/pci_gpu_link_info"
    return GpuState(
        index=index,
        name=_text(node, "product_name"),
        uuid=_text(node, "uuid"),
        bus=node.get("id", ""),
        memory_mib=_number(node, "fb_memory_usage/total"),
        used_mib=_number(node, "fb_memory_usage/used"),
        processes=len(node.findall("processes/process_info")),
        sm_mhz=_number(node, "clocks/sm_clock"),
        max_sm_mhz=_number(node, "max_clocks/sm_clock"),
        power_limit=_number(node, f"{power}/{limit}"),
        default_power_limit=_number(node, f"{power}/default_power_limit"),
        performance_state=_text(node, "performance_state"),
        slowed_by=tuple(name for name in SLOWDOWNS if reasons.get(name)),
        clocks_are_set=reasons.get("applications_clocks_setting", False),
        celsius=_number(node, "temperature/gpu_temp"),
        slow_celsius=_number(node, "temperature/gpu_temp_slow_threshold"),
        ecc=_text(node, "ecc_mode/current_ecc"),
        uncorrected=sum(int(value) for each in errors if (value := (each.text or "").strip()).isdigit()),
        remapping="failed" if rows["failure"] else "pending" if rows["pending"] else "",
        persistence=_text(node, "persistence_mode"),
        compute_mode=_text(node, "compute_mode"),
        mig=_text(node, "mig_mode/current_mig"),
        pcie_gen=(_number(node, f"{link}/pcie_gen/current_link_gen"), _number(node, f"{link}/pcie_gen/max_link_gen")),
        pcie_width=(
            _number(node, f"{link}/link_widths/current_link_width"),
            _number(node, f"{link}/link_widths/max_link_width"),
        ),
    )


def _text(node: ElementTree.Element, path: str) -> str:
    text = (node.findtext(path) or "").strip()
    return "" if text in ("N/A", "[N/A]", "Requested functionality has been deprecated") else text


def _number(node: ElementTree.Element, path: str) -> float | None:
    """The number before a unit: `700.00 W`, `16x`."""
    found = re.match(r"[\d.]+", _text(node, path))
    return float(found[0]) if found else None


@dataclass(frozen=True)
class Topology:
    """`nvidia-smi topo -m`: how each GPU is joined to every other and to the network cards."""

    links: dict[tuple[str, str], str]
    """(GPU0, GPU1) -> NV18, PIX, PXB, PHB, NODE or SYS."""
    cpus: dict[str, str]
    """GPU0 -> the CPUs near it, such as 0-47,96-143."""
    nodes: dict[str, str]

    def between_gpus(self) -> dict[tuple[str, str], str]:
        """The links of each pair of GPUs, once."""
        return {pair: link for pair, link in self.links.items() if pair[1].startswith("GPU") and pair[0] < pair[1]}


def parse_topology(text: str) -> Topology:
    """Read the matrix; ValueError where there is none."""
    lines = [[cell.strip() for cell in ANSI.sub("", line).split("\t")] for line in text.splitlines()]
    heading = next((cells for cells in lines if "GPU0" in cells[1:]), None)
    if heading is None:
        raise ValueError("it has no matrix of links")
    links, cpus, nodes = {}, {}, {}
    for name, *cells in lines[lines.index(heading) + 1 :]:
        if not re.fullmatch(r"GPU\d+", name):
            continue
        for column, cell in zip(heading[1:], cells, strict=False):
            if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell):  # a network card may have any name
                links[name, column] = cell
            elif column == "CPU Affinity" and cell != "N/A":
                cpus[name] = cell
            elif column == "NUMA Affinity" and cell != "N/A":
                nodes[name] = cell
    return Topology(links, cpus, nodes)
