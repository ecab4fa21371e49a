"""`z2a doctor`: what each check makes of what it reads."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from zero2all.common.cores import cpu_numbers, quota_cores
from zero2all.measure.doctor import finding, host
from zero2all.measure.doctor.finding import worst
from zero2all.measure.doctor.gpus import grade_topology, look_at_gpus, look_at_links, parse_report, parse_topology
from zero2all.measure.doctor.software import look_at_environment, look_at_kernels, look_at_versions

ROOT = Path(__file__).parents[2]

HEALTHY = """
  <gpu id="00000000:18:00.0"> <product_name>NVIDIA H200</product_name> <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig></mig_mode> <pci><pci_gpu_link_info>
    <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
    </pci_gpu_link_info></pci> <performance_state>P0</performance_state> <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
    <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown></clocks_event_reasons>
    <fb_memory_usage><total>143771 MiB</total><used>4 MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode> <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
    <dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
    <remapped_rows><remapped_row_pending>No</remapped_row_pending>
    <remapped_row_failure>No</remapped_row_failure></remapped_rows>
    <gpu_power_readings><current_power_limit>700.00 W</current_power_limit>
    <default_power_limit>700.00 W</default_power_limit></gpu_power_readings>
    <clocks><sm_clock>345 MHz</sm_clock></clocks> <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
    <processes></processes></gpu>"""
SICK = """
  <gpu id="00000000:2A:00.0"> <product_name>NVIDIA Oddity</product_name>
    <persistence_mode>Disabled</persistence_mode> <pci><pci_gpu_link_info>
    <pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
    </pci_gpu_link_info></pci> <performance_state>P8</performance_state> <clocks_throttle_reasons>
    <clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
    </clocks_throttle_reasons> <fb_memory_usage><total>81920 MiB</total><used>40960 MiB</used></fb_memory_usage>
    <compute_mode>Prohibited</compute_mode> <ecc_mode><current_ecc>Disabled</current_ecc></ecc_mode>
    <ecc_errors><volatile><dram_uncorrectable>3</dram_uncorrectable></volatile></ecc_errors>
    <remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>
    <power_readings><power_limit>300.00 W</power_limit>
    <default_power_limit>400.00 W</default_power_limit></power_readings>
    <processes><process_info><pid>7</pid></process_info></processes></gpu>"""
BARE = '<gpu id="x"><product_name>A</product_name></gpu>'


def report_of(*gpus: str) -> str:
    versions = "<driver_version>550.54.15</driver_version><cuda_version>12.4</cuda_version>"
    return f"<?xml version='1.0' ?><nvidia_smi_log>{versions}{''.join(gpus)}</nvidia_smi_log>"


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t{cpus}\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t{cpus}\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t{cpus}\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an executable of that name on the PATH, which runs these lines of a shell."""

    def put(script: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return put


def printing(tmp_path: Path, report: str, topology: str) -> str:
    (tmp_path / "report.xml").write_text(report)
    (tmp_path / "topology").write_text(topology)
    return f'if [ "$1" = topo ]; then cat {tmp_path}/topology; else cat {tmp_path}/report.xml; fi'


def test_a_healthy_gpu_is_one_line_and_what_a_driver_does_not_report_is_none(nvidia_smi, tmp_path):
    nvidia_smi(printing(tmp_path, report_of(HEALTHY), "\tGPU0\tCPU Affinity\nGPU0\t X \t0-3\n"))
    found, report = look_at_gpus()
    assert worst(found) == "ok", "the power limit under load is no problem"
    assert "GPU 0: NVIDIA H200, 140.4 GiB, SM clock 345 of at most 1980 MHz, power limit 700 W" in found[1].found
    assert found[1].found.endswith("PCIe 5 x16, ECC Enabled")
    assert "550.54.15, for CUDA up to 12.4" in found[0].found
    assert look_at_links(report)[0].found == "one GPU, so no links between GPUs"
    (gpu,) = parse_report(report_of(BARE)).gpus
    assert (gpu.memory_mib, gpu.power_limit, gpu.pcie_gen, gpu.slowed_by) == (None, None, (None, None), ())


def test_each_thing_that_is_wrong_with_a_gpu_is_named_and_has_advice(nvidia_smi, tmp_path):
    nvidia_smi(printing(tmp_path, report_of(HEALTHY, SICK), ""))
    found, report = look_at_gpus()
    expected = {
        "3 uncorrected memory errors": "error",
        "compute mode is Prohibited": "error",
        "a memory row waits": "warning",
        "the power limit is 300 W, 400 W by default": "warning",
        "(hw_thermal_slowdown)": "warning",
        "PCIe has 8 of 16 lanes": "warning",
        "PCIe generation 1 of 4": "note",  # it idles
        "40.0 GiB are in use already, by 1 processes": "warning",
        "persistence mode is off": "note",
        "ECC is off": "note",
        "different GPUs": "warning",
        "peak FLOPS of NVIDIA Oddity are not known": "note",
    }
    wrong = [each for each in found if each.grade != "ok"]
    for words, grade in expected.items():
        (one,) = [each for each in wrong if words in each.found]
        assert (one.grade, bool(one.why), bool(one.advice)) == (grade, True, True)
    assert len(wrong) == len(expected)
    assert look_at_links(report)[0].found.startswith("not looked at"), "no matrix was printed"


@pytest.mark.parametrize(
    ("script", "grade", "words"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "error", "mismatch"),
        ("echo 'Unable to determine the device handle for GPU0: Unknown Error' >&2; exit 15", "error", "device handle"),
        ("exec sleep 20", "error", "did not answer within"),
        ("echo nonsense", "note", "was not understood"),
        (f'echo "{report_of()}"', "error", "and no GPU"),
        ("", "note", "not looked at"),  # there is none
    ],
)
def test_an_nvidia_smi_that_fails_is_a_finding(script, grade, words, nvidia_smi, monkeypatch, tmp_path):
    monkeypatch.setattr(finding.output_of, "__defaults__", (0.5,))
    if script:
        nvidia_smi(script)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    (found, *_), report = look_at_gpus()
    assert (found.grade, words in found.found) == (grade, True), found
    assert script or report is None


def test_links_are_read_from_the_matrix_and_graded():
    topology = parse_topology(TOPOLOGY.format(cpus="9990-9991"))
    assert topology.between_gpus() == {("GPU0", "GPU1"): "NV18", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "SYS"}
    assert topology.nodes == {"GPU0": "0", "GPU1": "0", "GPU2": "1"}
    mixed, cards, cpus = grade_topology(topology)
    assert (mixed.grade, mixed.found) == ("warning", "SYS: 2 pairs, NV18: 1 pairs")
    assert cards.found.endswith("GPU1, GPU2")
    assert cpus.grade == "warning"
    near = TOPOLOGY.replace("SYS", "NV18").format(cpus="0-9999")
    assert [each.grade for each in grade_topology(parse_topology(near))] == ["ok", "note"]
    with pytest.raises(ValueError, match="no matrix"):
        parse_topology("Legend")


LEGEND = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
PCIE_BOX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tPHB\tNODE\tSYS\t0-15,32-47\t0
GPU1\tPHB\t X \tNODE\tSYS\t0-15,32-47\t0
GPU2\tNODE\tNODE\t X \tSYS\t0-15,32-47\t0
GPU3\tSYS\tSYS\tSYS\t X \t16-31,48-63\t1
"""
DESKTOP = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-31\nGPU1\tPHB\t X \t0-31\n"
OTHER_CARDS = """\tGPU0\tGPU1\tbnxt_re0\tibp12s0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tPIX\tSYS\t0-23\t0
GPU1\tNV4\t X \tSYS\tPIX\t24-47\t1
bnxt_re0\tPIX\tSYS\t X \tSYS\t\t
ibp12s0\tSYS\tPIX\tSYS\t X \t\t
"""
CONTAINER = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tN/A\tN/A\tN/A\nGPU1\tN/A\t X \tN/A\tN/A\n"


def test_machines_without_nvlink_with_other_cards_or_in_a_container():
    topology = parse_topology(PCIE_BOX + LEGEND)
    assert Counter(topology.between_gpus().values()) == {"SYS": 3, "NODE": 2, "PHB": 1}
    found = next(iter(grade_topology(topology)))
    assert (found.grade, found.advice.startswith("Prefer data parallelism")) == ("warning", True)
    assert next(iter(grade_topology(parse_topology(DESKTOP + LEGEND)))).grade == "note"
    topology = parse_topology(OTHER_CARDS + LEGEND)
    assert topology.links["GPU0", "bnxt_re0"] == topology.links["GPU1", "ibp12s0"] == "PIX"
    assert topology.between_gpus() == {("GPU0", "GPU1"): "NV4"}
    topology = parse_topology(CONTAINER + LEGEND)
    assert (topology.links, topology.cpus, topology.nodes) == ({}, {}, {})


def test_the_tightest_cpu_limit_of_the_groups_around_a_process_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    assert quota_cores(tmp_path, own) is None
    (tmp_path / "job/step/cpu.max").write_text("max 100000\n")
    (tmp_path / "job/cpu.max").write_text("150000 100000\n")
    assert quota_cores(tmp_path, own) == 1.5
    own.write_text("4:cpu,cpuacct:/\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    for quota, cores in (("-1", None), ("400000", 4)):
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
        assert quota_cores(tmp_path, own) == cores
    assert cpu_numbers("0-2,8") == {0, 1, 2, 8}


def test_the_disk_test_measures_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "TEST_BYTES", 1 << 20)
    found = list(host.look_at_disk(tmp_path / "not" / "there"))
    assert "MB/s, read" in found[-1].found
    assert f"{tmp_path}: " in found[0].found
    assert (list(tmp_path.iterdir()), host._disk_speed(Path("/proc"), 1 << 40).grade) == ([], "error")
    monkeypatch.setattr(host, "TOO_LITTLE_DISK", 1 << 60)
    assert next(host.look_at_disk(tmp_path)).grade == "error"


def test_the_other_checks_read_this_machine():
    for look in (host.look_at_cpu, host.look_at_memory, host.look_at_limits, host.look_at_network):
        found = list(look())
        assert {each.grade for each in found} <= {"ok", "note", "warning"}
        assert found
        assert all(each.advice and each.why for each in found if each.grade == "warning")


VERSIONS = {"torch": "2.13.0", "cuda": "12.9", "hip": None, "cudnn": 91000, "nccl": "2.27.3", "cpu": "AVX2"}
VERSIONS |= {"threads": 2, "built_for": ["sm_80", "sm_90"], "cuda_problem": None}


def graded(facts, problem="", report=None):
    return {each.found: each.grade for each in look_at_versions(facts, problem, report)}


def test_combinations_that_cannot_work_are_errors():
    report = parse_report(report_of(HEALTHY))
    found = graded({"versions": VERSIONS | {"cuda": None}}, report=report)
    assert found["this torch is a build without CUDA"] == "error"
    found = graded({"versions": VERSIONS | {"cuda_problem": "driver too old"}}, report=report)
    assert found["torch sees no GPU: driver too old"] == "error"
    assert graded({"versions": VERSIONS | {"torch": "2.9.1"}})["torch 2.9.1 is not tested"] == "error"
    assert graded({"versions": VERSIONS | {"torch": "2.99.0"}})["torch 2.99.0 is not tested"] == "warning"
    assert graded({}, "ModuleNotFoundError: No module named 'torch'")["torch is not installed"] == "error"
    assert graded({}, "signal 11")["torch cannot be used: signal 11"] == "error"
    assert "note" in graded({}, "it had not answered when the time was over").values()


def test_compilers_are_named_or_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "my-c++").write_text("#!/bin/sh\n")
    (tmp_path / "my-c++").chmod(0o755)
    monkeypatch.setenv("CXX", "my-c++")
    found = graded({"versions": VERSIONS})
    assert (found["there is no C compiler"], found[f"C++ compiler: {tmp_path / 'my-c++'}"]) == ("note", "ok")


def test_a_gpu_for_which_torch_has_no_kernels_is_an_error_and_a_better_kernel_that_is_missing_a_note():
    with_ptx = VERSIONS | {"built_for": ["sm_80", "compute_90"]}
    for capability, has_kernels in {(9, 0): True, (8, 6): True, (10, 0): False, (7, 5): False}.items():
        devices = [{"name": "A", "bytes": 1, "capability": list(capability)}]
        found = graded({"versions": VERSIONS, "devices": devices})
        assert ("error" in found.values()) is not has_kernels
        found = graded({"versions": with_ptx, "devices": devices})
        assert ("error" in found.values()) is (capability == (7, 5))
    names = ("operator", "implementation", "why_not", "taken_by_auto")
    rows = (("fa4", "it is not installed", False), ("sdpa", None, True), ("math", None, False))
    kernels = [dict(zip(names, ("attention", *row), strict=True)) for row in rows]
    (found,) = look_at_kernels({"kernels": kernels, "devices": [{}]})
    assert (found.grade, found.found) == ("note", "attention: sdpa")
    assert "fa4: it is not installed" in found.why
    assert next(look_at_kernels({"kernels": kernels, "devices": []})).grade == "ok"


GRADES = {
    "ok": (
        "CUDA_LAUNCH_BLOCKING=0 NCCL_P2P_DISABLE=0 NCCL_DEBUG=WARN OMP_NUM_THREADS=8 CUDA_VISIBLE_DEVICES=0,1",
        "PYTORCH_ALLOC_CONF=expandable_segments:True NCCL_SOCKET_IFNAME=^docker,lo GLOO_SOCKET_IFNAME=lo",
        "",
    ),
    "note": ("NCCL_ALGO=Tree", "OMP_NUM_THREADS=1", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"),
    "warning": (
        *("CUDA_LAUNCH_BLOCKING=1", "NCCL_P2P_DISABLE=1", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"),
        *("OMP_NUM_THREADS=64", "OMP_NUM_THREADS=many", "CUDA_VISIBLE_DEVICES="),
    ),
    "error": ("TRITON_INTERPRET=1", "NCCL_SOCKET_IFNAME=nosuch0"),
}


@pytest.mark.parametrize("grade", GRADES)
def test_variables_are_graded_by_their_value(grade):
    for words in GRADES[grade]:
        found = list(look_at_environment(dict(word.split("=") for word in words.split()), cores=8))
        assert worst(found) == grade, words
        assert all(each.why and each.advice for each in found if each.grade != "ok")


def test_it_works_without_torch_in_its_own_process_and_ends_with_its_code(tmp_path, nvidia_smi):
    """A torch that cannot be imported stands first on the path, of the command and of the process that asks torch."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    nvidia_smi(printing(tmp_path, report_of(HEALTHY), TOPOLOGY.format(cpus="0-9999")))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "NCCL_IB_DISABLE": "1"}
    words = [sys.executable, "-m", "zero2all", "doctor", "--json", "-", "--work", str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    grades = {each["found"]: each["grade"] for each in found["findings"]}
    assert (grades["torch is not installed"], grades["NCCL_IB_DISABLE=1"]) == ("error", "warning")
    assert any("NVIDIA H200" in words for words in grades)
    assert found["counts"]["error"] == sum(grade == "error" for grade in grades.values())
