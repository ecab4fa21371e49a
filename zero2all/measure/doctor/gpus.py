"""The GPUs, their driver and the links between them, as nvidia-smi describes them."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from zero2all.common.cores import allowed_cpus, cpu_numbers
from zero2all.estimate.flops import peak_flops
from zero2all.measure.doctor.finding import Area, DoctorFinding, output_of

ANSI = re.compile(r"\x1b\[[0-9;]*m")
GPU, DRIVER, LINKS = Area("gpu"), Area("driver"), Area("links")
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
        pcie_gen=_now_and_most(node, f"{link}/pcie_gen", "link_gen"),
        pcie_width=_now_and_most(node, f"{link}/link_widths", "link_width"),
    )


def _text(node: ElementTree.Element, path: str) -> str:
    text = (node.findtext(path) or "").strip()
    return "" if text in ("N/A", "[N/A]", "Requested functionality has been deprecated") else text


def _now_and_most(node: ElementTree.Element, path: str, name: str) -> tuple[float | None, float | None]:
    return _number(node, f"{path}/current_{name}"), _number(node, f"{path}/max_{name}")


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


BUSY_SHARE = 0.02
NEAR_CELSIUS = 5


def look_at_gpus() -> tuple[list[DoctorFinding], Report | None]:
    """Findings, and what nvidia-smi reported where there is one."""
    text, problem = output_of(["nvidia-smi", "-q", "-x"])
    if text is None:
        return [_without_report(problem)], None
    try:
        report = parse_report(text)
    except ValueError as error:
        return [GPU.note(f"not looked at: the output of nvidia-smi was not understood ({error})")], None
    if not report.gpus:
        why = "The driver runs but has no GPU: training would use the CPU."
        advice = "In a container, start it with --gpus all. Else see `dmesg` for lines with NVRM or Xid."
        return [GPU.error(f"driver {report.driver}, and no GPU", why, advice)], report
    findings = [DRIVER.ok(f"NVIDIA driver {report.driver}, for CUDA up to {report.cuda or '?'}")]
    for gpu in report.gpus:
        findings += [GPU.ok(_summary(gpu)), *_state_of(gpu), *_speed_of(gpu)]
    findings += _as_a_set(report.gpus)
    return findings, report


def _without_report(problem: str) -> DoctorFinding:
    if "not installed" in problem:
        return GPU.note("no nvidia-smi here, so the GPUs, their driver and links were not looked at")
    if "mismatch" in problem:
        why = "The driver was updated while its older kernel module is still loaded: no program can use the GPU."
        return DRIVER.error(problem, why, "Reboot, or unload and load the nvidia kernel modules.")
    advice = "Run nvidia-smi by hand; see `dmesg` for lines with NVRM or Xid; in a container, check --gpus all."
    return DRIVER.error(f"nvidia-smi failed: {problem}", "Where nvidia-smi fails, CUDA usually fails too.", advice)


def _summary(gpu: GpuState) -> str:
    parts = [f"GPU {gpu.index}: {gpu.name}"]
    if gpu.memory_mib is not None:
        parts.append(f"{gpu.memory_mib / 1024:.1f} GiB")
    if gpu.max_sm_mhz is not None:
        parts.append(f"SM clock {gpu.sm_mhz or 0:.0f} of at most {gpu.max_sm_mhz:.0f} MHz")
    if gpu.power_limit is not None:
        parts.append(f"power limit {gpu.power_limit:.0f} W")
    if None not in (*gpu.pcie_gen, *gpu.pcie_width):
        parts.append(f"PCIe {gpu.pcie_gen[0]:.0f} x{gpu.pcie_width[0]:.0f}")
    parts += [f"ECC {gpu.ecc}"] if gpu.ecc else []
    return ", ".join(parts)


def _state_of(gpu: GpuState) -> Iterator[DoctorFinding]:
    """What makes results wrong, or the GPU unusable."""
    name = f"GPU {gpu.index}"
    if gpu.uncorrected:
        found = f"{name}: {gpu.uncorrected} uncorrected memory errors since the driver was loaded"
        advice = f"Reset it (`nvidia-smi -i {gpu.index} -r`) or reboot; if they come back, have the card replaced."
        yield GPU.error(found, "A program that read this memory got wrong values or was killed.", advice)
    if gpu.remapping == "failed":
        why = "The card has no spare memory rows left to replace bad ones."
        yield GPU.error(f"{name}: replacing a memory row failed", why, "Have the card replaced.")
    if gpu.remapping == "pending":
        why = "Bad memory rows are replaced only when the card is reset."
        advice = f"Reset it when it is idle: `nvidia-smi -i {gpu.index} -r`."
        yield GPU.warning(f"{name}: a memory row waits to be replaced", why, advice)
    if gpu.compute_mode == "Prohibited":
        advice = f"As root: `nvidia-smi -i {gpu.index} -c DEFAULT`."
        yield GPU.error(f"{name}: its compute mode is Prohibited", "No program may use this GPU.", advice)
    if gpu.ecc == "Disabled":
        advice = f"As root: `nvidia-smi -i {gpu.index} -e 1`, then reboot. It costs no speed on HBM."
        yield GPU.note(f"{name}: ECC is off", "Flipped bits of memory change weights without a trace.", advice)
    if gpu.mig == "Enabled":
        why = "The card is cut into parts: a program sees one part, and parts cannot reach each other over NVLink."
        yield GPU.note(f"{name}: MIG is on", why, "For training on the whole card: `nvidia-smi -mig 0`.")
    if gpu.used_mib and gpu.memory_mib and gpu.used_mib > BUSY_SHARE * gpu.memory_mib:
        found = f"{name}: {gpu.used_mib / 1024:.1f} GiB are in use already, by {gpu.processes} processes seen here"
        why = "That memory is missing from a run, and what computes beside it slows it down."
        yield GPU.warning(found, why, "See `nvidia-smi`; end what is left over.")


def _speed_of(gpu: GpuState) -> Iterator[DoctorFinding]:
    """What makes it slower than it could be."""
    name = f"GPU {gpu.index}"
    if gpu.power_limit and gpu.default_power_limit and gpu.power_limit < 0.99 * gpu.default_power_limit:
        found = f"{name}: the power limit is {gpu.power_limit:.0f} W, {gpu.default_power_limit:.0f} W by default"
        advice = f"As root: `nvidia-smi -i {gpu.index} -pl {gpu.default_power_limit:.0f}`, where cooling allows it."
        yield GPU.warning(found, "Large matmuls run at the power limit: a lower one lowers the clock.", advice)
    if gpu.slowed_by:
        found = f"{name}: clocks are lowered now ({', '.join(gpu.slowed_by)})"
        why = "The card protects itself from heat or a weak power supply; every step takes longer."
        yield GPU.warning(found, why, "Check the cooling, the air temperature and the power cables.")
    elif gpu.celsius and gpu.slow_celsius and gpu.celsius > gpu.slow_celsius - NEAR_CELSIUS:
        found = f"{name}: {gpu.celsius:.0f} °C; it slows down at {gpu.slow_celsius:.0f} °C"
        yield GPU.warning(found, "It will soon lower its clock.", "Check the cooling.")
    if gpu.clocks_are_set:
        why = "Somebody fixed the clocks (`nvidia-smi -ac` or `-lgc`), so that they do not rise to the maximum."
        yield GPU.note(f"{name}: its clocks are set by hand", why, "As root: `nvidia-smi -rac -rgc`.")
    if gpu.persistence == "Disabled":
        why = "Without a program the driver unloads, so that each first use takes seconds and settings are lost."
        yield GPU.note(f"{name}: persistence mode is off", why, "As root: `nvidia-smi -pm 1`.")
    now, most = gpu.pcie_width
    if now and most and now < most:
        found = f"{name}: PCIe has {now:.0f} of {most:.0f} lanes"
        why = "Copies from and to the host, offload and checkpoints take as many times longer."
        yield GPU.warning(found, why, "Check the slot, the riser and the BIOS.")
    now, most = gpu.pcie_gen
    if now and most and now < most:
        is_idle = gpu.performance_state not in ("P0", "")
        found = f"{name}: PCIe generation {now:.0f} of {most:.0f}"
        why = "An idle card lowers it to save power." if is_idle else "Each generation halves the speed of copies."
        advice = "Look again under load." if is_idle else "Check the slot and the BIOS (link speed, ASPM)."
        yield GPU.graded("note" if is_idle else "warning", found, why, advice)


def _as_a_set(gpus: list[GpuState]) -> Iterator[DoctorFinding]:
    kinds = Counter(gpu.name for gpu in gpus)
    if len(kinds) > 1:
        found = f"different GPUs: {', '.join(f'{count} x {name}' for name, count in kinds.items())}"
        why = "Ranks wait for each other: all run at the speed of the slowest, with the memory of the smallest."
        yield GPU.warning(found, why, "Choose equal ones with CUDA_VISIBLE_DEVICES.")
    for name in kinds:
        if peak_flops(name) is None:
            why = "MFU and predictions need it; a guess would be worse than none."
            yield GPU.note(f"the peak FLOPS of {name} are not known here", why, "Runs show tokens/s only.")


def look_at_links(report: Report | None) -> list[DoctorFinding]:
    """How the GPUs reach each other, the network cards and this process's CPUs."""
    if report is None or not report.gpus:
        return []
    topology = read_topology()
    return [topology] if isinstance(topology, DoctorFinding) else list(grade_topology(topology))


def read_topology() -> Topology | DoctorFinding:
    """What nvidia-smi says of the links, or why it says nothing."""
    text, problem = output_of(["nvidia-smi", "topo", "-m"])
    if text is None:
        return LINKS.note(f"not looked at: nvidia-smi topo -m: {problem}")
    try:
        return parse_topology(text)
    except ValueError as error:
        return LINKS.note(f"not looked at: the output of nvidia-smi topo -m was not understood ({error})")


def grade_topology(topology: Topology) -> Iterator[DoctorFinding]:
    """Findings about the links."""
    pairs = topology.between_gpus()
    kinds = Counter(pairs.values())
    if not pairs:
        yield LINKS.ok("one GPU, so no links between GPUs")
    elif len(kinds) == 1 and next(iter(kinds)).startswith("NV"):
        yield LINKS.ok(f"every pair of GPUs is joined by NVLink ({next(iter(kinds))})")
    else:
        listed = ", ".join(f"{link}: {count} pairs" for link, count in kinds.most_common())
        has_nvlink = any(link.startswith("NV") for link in kinds)
        why = "A ring of all ranks runs at its slowest link; SYS crosses sockets, PHB and NODE the host's bridges."
        advice = (
            "Keep tensor parallelism inside the groups with NVLink (parallel.tensor), data parallelism across."
            if has_nvlink
            else "Prefer data parallelism; tensor parallelism needs NVLink to pay."
        )
        yield LINKS.graded("warning" if has_nvlink or "SYS" in kinds else "note", listed, why, advice)
    yield from _far_cards(topology)
    yield from _far_cpus(topology)


def _far_cards(topology: Topology) -> Iterator[DoctorFinding]:
    near: dict[str, bool] = {}
    for (gpu, other), link in topology.links.items():
        if not other.startswith("GPU"):
            near[gpu] = near.get(gpu, False) or link in ("PIX", "PXB")
    far = [gpu for gpu, is_near in near.items() if not is_near]
    if far:
        why = "Traffic to other machines then passes through the CPU: no GPUDirect RDMA at full speed."
        advice = "Put network cards and GPUs on the same PCIe switches, or choose the ranks accordingly."
        yield LINKS.note(f"no network card on the PCIe switch of {', '.join(far)}", why, advice)


def _far_cpus(topology: Topology) -> Iterator[DoctorFinding]:
    mine = allowed_cpus()
    known = {gpu: cpus for gpu, cpus in topology.cpus.items() if re.fullmatch(r"[\d,-]+", cpus)}
    far = {gpu: cpus for gpu, cpus in known.items() if mine and not mine & cpu_numbers(cpus)}
    if far:
        listed = "; ".join(f"{gpu}: CPUs {cpus}" for gpu, cpus in far.items())
        why = "Launching kernels and copying then cross the link between the sockets."
        advice = "Start the process on near CPUs (`numactl --cpunodebind`, or the container's --cpuset-cpus)."
        yield LINKS.warning(f"this process may use no CPU near {listed}", why, advice)
