"""Versions, combinations that are known to fail, which kernels run here, and variables of the environment that cost
speed or break a run."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero2all import __version__
from zero2all.common.cores import usable_cores
from zero2all.measure.doctor.finding import Area, DoctorFinding, Grade
from zero2all.measure.doctor.gpus import Report

SOFTWARE, KERNELS, ENVIRONMENT = Area("software"), Area("kernels"), Area("environment")
OLDEST_TORCH, NEXT_TORCH = (2, 11), (2, 14)
PYTHONS = ((3, 11), (3, 13))
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
OLD_KERNEL = (5, 5)
PIN = re.compile(r"^([\w.-]+)\s*==\s*([\w.+]+)")


class TorchFacts:
    """The process that asks torch; started early, read last."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in `collect`)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "zero2all.measure.doctor.software"]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._errors, stdin=subprocess.DEVNULL)

    def collect(self, until: float) -> tuple[dict[str, Any], str]:
        """What is known by `until` (time.monotonic), and why something is missing."""
        problem = ""
        try:
            code = self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code, problem = 0, "it had not answered when the time was over (see --seconds)"
        self._output.seek(0)
        facts = {}
        for line in self._output.read().splitlines():
            if line.startswith('{"name": ') and line.endswith("}"):  # libraries print too
                fact = json.loads(line)
                facts[fact["name"]] = fact["value"]
        if code:
            self._errors.seek(0)
            words = self._errors.read().strip().splitlines()
            problem = f"signal {-code}" if code < 0 else (words[-1][:300] if words else f"exit code {code}")
        self._output.close()
        self._errors.close()
        return facts, problem


def look_at_versions(facts: dict[str, Any], problem: str, report: Report | None) -> Iterator[DoctorFinding]:
    """Python, torch and its libraries, and whether they fit each other and the driver."""
    yield _python()
    yield from _compilers()
    kernel = re.match(r"(\d+)\.(\d+)", platform.release())
    if platform.system() == "Linux" and kernel and (int(kernel[1]), int(kernel[2])) < OLD_KERNEL:
        why = "Processes with several GPUs were seen to hang on kernels before 5.5."
        yield SOFTWARE.warning(f"the kernel is Linux {platform.release()}", why, "Update the kernel.")
    versions = facts.get("versions")
    if versions is None:
        yield _without_torch(problem)
        return
    parts = [f"{key} {versions[key]}" for key in ("torch", "cuda", "cudnn", "nccl") if versions[key]]
    yield SOFTWARE.ok(f"{', '.join(parts)}, CPU instructions {versions['cpu']}")
    number = tuple(int(part) for part in versions["torch"].split(".")[:2])
    if not OLDEST_TORCH <= number < NEXT_TORCH:
        lowest, highest = (".".join(map(str, each)) for each in (OLDEST_TORCH, NEXT_TORCH))
        why = f"zero2all is tested with torch from {lowest} to below {highest}."
        grade: Grade = "error" if number < OLDEST_TORCH else "warning"
        advice = f"`pip install 'torch>={lowest},<{highest}'`."
        yield SOFTWARE.graded(grade, f"torch {versions['torch']} is not tested", why, advice)
    yield from _pins(versions)
    yield from _torch_and_driver(versions, facts.get("devices", []), report)


def _python() -> DoctorFinding:
    here = sys.version_info[:2]
    found = f"Python {platform.python_version()}, zero2all {__version__}, {platform.system()} {platform.release()}"
    if any(Path(mark).exists() for mark in CONTAINER_MARKS):
        found = f"{found}, in a container"
    if PYTHONS[0] <= here <= PYTHONS[1]:
        return SOFTWARE.ok(found)
    return SOFTWARE.warning(found, "zero2all is tested with Python 3.11 to 3.13.", "Use one of these.")


def _compilers() -> Iterator[DoctorFinding]:
    gcc = os.environ.get("CC") or shutil.which("gcc") or "clang"
    for kind, name, why in (
        ("C", gcc, "Triton's kernels on a GPU need it (apt install gcc)."),
        ("C++", os.environ.get("CXX") or "g++", "ops.compile on a CPU needs it (apt install g++)."),
    ):
        path = shutil.which(name)
        found = f"there is no {kind} compiler" if path is None else f"{kind} compiler: {path}"
        yield SOFTWARE.graded("ok" if path else "note", found, "" if path else why)


def _without_torch(problem: str) -> DoctorFinding:
    if "No module named 'torch'" in problem:
        why = "Without it there is no training; corpus, tokenizer and the calculators work."
        return SOFTWARE.error("torch is not installed", why, "`pip install 'torch>=2.11,<2.14'`.")
    if "had not answered" in problem:
        return SOFTWARE.note(f"torch, its devices and kernels were not looked at: {problem}")
    why = "Nothing that needs torch will run."
    return SOFTWARE.error(f"torch cannot be used: {problem}", why, "Install torch again.")


def _pins(versions: dict[str, Any]) -> Iterator[DoctorFinding]:
    """What torch's own package asks for, against what is installed."""
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for entry in wanted:
        pin = PIN.match(entry)
        if pin is None or not re.match(r"triton|nvidia-", pin[1]):
            continue
        try:
            here = importlib.metadata.version(pin[1])
        except importlib.metadata.PackageNotFoundError:
            here = ""
        if here and here != pin[2]:
            why = f"torch {versions['torch']} was built and tested with {pin[1]} {pin[2]}; another may fail."
            yield SOFTWARE.warning(f"{pin[1]} {here}", why, f"`pip install {pin[1]}=={pin[2]}`.")
        elif not here and pin[1] == "triton" and versions["cuda"]:
            why = "torch.compile and our own kernels need it; without it the slower ones of torch run."
            yield SOFTWARE.warning("Triton is not installed", why, f"`pip install triton=={pin[2]}`.")


def _torch_and_driver(
    versions: dict[str, Any], devices: list[dict[str, Any]], report: Report | None
) -> Iterator[DoctorFinding]:
    has_gpu = report is not None and bool(report.gpus)
    if has_gpu and versions["cuda"] is None and versions["hip"] is None:
        why = "Training would use the CPU although there is a GPU."
        advice = "Install a build with CUDA: https://pytorch.org/get-started"
        yield SOFTWARE.error("this torch is a build without CUDA", why, advice)
    elif has_gpu and versions["cuda_problem"]:
        assert report is not None
        why = f"The driver runs CUDA up to {report.cuda or '?'}; this torch was built with {versions['cuda']}."
        advice = "Check CUDA_VISIBLE_DEVICES. Where the driver is older than CUDA of torch, update one of them."
        yield SOFTWARE.error(f"torch sees no GPU: {versions['cuda_problem']}", why, advice)
    elif not has_gpu and not devices:
        yield SOFTWARE.note("no GPU: training runs on the CPU", "It is enough for the quickstart only.")
    for number, device in enumerate(devices):
        major, minor = device["capability"]
        names = versions["built_for"]
        runs = any(_covers(name, major, minor) for name in names)
        yield SOFTWARE.ok(f"torch sees GPU {number}: {device['name']}, capability {major}.{minor}")
        if names and not runs:
            why = f"This torch holds kernels for {', '.join(names)}: the first one would fail (no kernel image)."
            found = f"torch has no kernels for GPU {number} (sm_{major}{minor})"
            yield SOFTWARE.error(found, why, "Install a torch built with a newer CUDA.")


def _covers(name: str, major: int, minor: int) -> bool:
    """Whether a build for `name` runs there: sm_80 on 8.0 to 8.9; compute_80 (PTX) on all later ones."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
    if found is None:
        return False
    built = (int(found[2]), int(found[3]))
    if name[-1] in "af":
        return built == (major, minor)
    return built <= (major, minor) and (found[1] == "compute" or built[0] == major)


def look_at_kernels(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    """What `ops.* = auto` takes, and which better ones cannot run here."""
    entries = facts.get("kernels")
    if entries is None:
        if facts:
            yield KERNELS.note("not looked at: the time was over (see --seconds)")
        return
    on_gpu = bool(facts.get("devices"))
    for operator in dict.fromkeys(entry["operator"] for entry in entries):
        rows = [entry for entry in entries if entry["operator"] == operator]
        taken = next(place for place, entry in enumerate(rows) if entry["taken_by_auto"])
        absent = [f"{entry['implementation']}: {entry['why_not']}" for entry in rows[:taken] if entry["why_not"]]
        found = f"{operator}: {rows[taken]['implementation']}"
        if absent and on_gpu:
            why = f"Listed before it, and not to be had here: {'; '.join(absent)}."
            yield KERNELS.note(found, why, "`z2a perf ops` says why each one cannot run.")
        else:
            yield KERNELS.ok(found)


# ---- variables of the environment ------------------------------------------------------------------------------------

OFF = ("", "0", "false", "off", "no")
SYNC = "Every kernel launch waits until the kernel is done: steps take up to twice as long."
SLOW_LINK = "NCCL leaves this link out and takes a slower one."
HANDMADE = "It overrides what NCCL chooses by its own measurements, on every machine and for every size."
NO_COMPILE = "torch.compile does nothing, whatever the config says."
EVERY_START = "Every start compiles all kernels again."


def _is_on(value: str) -> bool:
    return value.strip().lower() not in OFF


def _is_off(value: str) -> bool:
    return not _is_on(value)


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.search(pattern, value, re.IGNORECASE) is not None


_any = _matches("")


RULES: tuple[tuple[str, Callable[[str], bool], Grade, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", _is_on, "warning", SYNC),
    ("TORCH_USE_CUDA_DSA", _is_on, "note", "It does something only in a torch that was built with it."),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "warning", "Each tensor is allocated by the driver, which waits."),
    ("CUDA_MODULE_LOADING", _matches("eager"), "note", "All kernels are loaded: 0.5 GiB more on each GPU."),
    ("CUDA_CACHE_DISABLE", _is_on, "warning", EVERY_START),
    ("CUDA_DEVICE_MAX_CONNECTIONS", _matches("^1$"), "note", "One queue for all streams: copies wait for kernels."),
    ("CUBLAS_WORKSPACE_CONFIG", _matches(":16:"), "note", "The small workspace excludes cuBLAS's fastest kernels."),
    ("NVIDIA_TF32_OVERRIDE", _is_off, "warning", "float32 matmuls run without tensor cores."),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _is_on, "note", "float32 matmuls are rounded to TF32, whatever is set."),
    ("TORCH_DISTRIBUTED_DEBUG", _matches("detail"), "warning", "Every collective is checked by another one before."),
    ("TORCH_NCCL_BLOCKING_WAIT", _is_on, "warning", "The host waits for every collective: nothing overlaps."),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", _is_off, "warning", "When one rank dies, the others wait for ever."),
    ("NCCL_ASYNC_ERROR_HANDLING", _any, "note", "An old name, which torch warns of: TORCH_NCCL_ASYNC_ERROR_HANDLING."),
    ("NCCL_P2P_DISABLE", _is_on, "warning", SLOW_LINK),
    ("NCCL_SHM_DISABLE", _is_on, "warning", SLOW_LINK),
    ("NCCL_IB_DISABLE", _is_on, "warning", SLOW_LINK),
    ("NCCL_NVLS_ENABLE", _is_off, "note", "All-reduces inside a node lose the switch's own reduction."),
    ("NCCL_DEBUG", _matches("info|trace"), "note", "Long logs; with TRACE also slower collectives."),
    ("NCCL_ALGO", _any, "note", HANDMADE),
    ("NCCL_PROTO", _any, "note", HANDMADE),
    ("NCCL_MAX_NCHANNELS", _any, "note", HANDMADE),
    ("NCCL_NTHREADS", _any, "note", HANDMADE),
    ("NCCL_BUFFSIZE", _any, "note", HANDMADE),
    ("TORCH_COMPILE_DISABLE", _is_on, "warning", NO_COMPILE),
    ("TORCHDYNAMO_DISABLE", _is_on, "warning", NO_COMPILE),
    ("TORCH_COMPILE_DEBUG", _is_on, "warning", "Compilation writes all its stages to files."),
    ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _is_on, "warning", EVERY_START),
    ("TRITON_ALWAYS_COMPILE", _is_on, "warning", EVERY_START),
    ("TRITON_INTERPRET", _is_on, "error", "Triton kernels run in Python, thousands of times slower."),
    ("PYTHONMALLOC", _matches("debug"), "warning", "Every allocation of Python is filled and checked."),
    ("PYTHONDEVMODE", _is_on, "warning", "Python checks memory and warns at run time: the host gets slow."),
    ("MALLOC_PERTURB_", _is_on, "warning", "Every allocation of the host is filled with a pattern."),
    ("LD_PRELOAD", _is_on, "note", "Another library stands before those of the system."),
    ("LOCAL_RANK", _any, "warning", "`z2a train` believes that a launcher started it, and waits for other ranks."),
)
"""A variable, the values that matter, how much, and why."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NETWORK = Path("/sys/class/net")


def look_at_environment(values: Mapping[str, str] = os.environ, cores: int | None = None) -> Iterator[DoctorFinding]:
    """Variables that matter, by their value; one line where none does."""
    found = [*_by_rule(values), *_threads(values, cores), *_allocator(values), *_interfaces(values), *_visible(values)]
    yield from found or [ENVIRONMENT.ok("no variable that costs speed is set")]


def _by_rule(values: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, matters, grade, why in RULES:
        value = values.get(name)
        if value is not None and matters(value):
            yield ENVIRONMENT.graded(grade, f"{name}={value[:80]}", why, f"`unset {name}`, unless you need it.")


def _threads(values: Mapping[str, str], cores: int | None) -> Iterator[DoctorFinding]:
    cores = cores or usable_cores()
    for name in THREADS:
        value = values.get(name)
        if value is None:
            continue
        if not value.strip().isdigit() or int(value) == 0:
            why, advice = "It is not a number of threads.", f"`unset {name}`, or give a number."
            yield ENVIRONMENT.warning(f"{name}={value[:80]}", why, advice)
        elif int(value) > cores:
            why = f"More threads than the {cores} CPUs of this process: they wait for each other."
            yield ENVIRONMENT.warning(f"{name}={value}", why, f"Set it to {cores} or less.")
        elif int(value) == 1 and cores > 4:
            why = "One core for work on the CPU, in `z2a train` too."
            yield ENVIRONMENT.note(f"{name}=1", why, "Right beside a GPU; for work on the CPU unset it.")


def _allocator(values: Mapping[str, str]) -> Iterator[DoctorFinding]:
    both = [name for name in ALLOCATOR if name in values]
    for name in both:
        found = f"{name}={values[name][:80]}"
        if "expandable_segments:True" in values[name]:
            yield ENVIRONMENT.ok(found)
        else:
            why = "It replaces our own setting, expandable_segments:True, which keeps memory from being cut up."
            yield ENVIRONMENT.note(found, why, "Add expandable_segments:True, or unset it.")
    if len(both) == 2:
        why = "They are two names of one setting; torch reads the first."
        yield ENVIRONMENT.note(f"both {both[0]} and {both[1]} are set", why, f"`unset {both[1]}`.")


def _interfaces(values: Mapping[str, str]) -> Iterator[DoctorFinding]:
    cards = [path.name for path in NETWORK.glob("*")]
    for name in INTERFACES:
        value = values.get(name, "")
        wanted = [word for word in value.lstrip("^=").split(",") if word]
        if not value or not cards or value.startswith("^"):
            continue
        is_exact = value.startswith("=")
        if not any(card == word or (not is_exact and card.startswith(word)) for card in cards for word in wanted):
            why = f"This machine has {', '.join(sorted(cards))}: ranks could not reach each other."
            yield ENVIRONMENT.error(f"{name}={value}", why, "Name one of these, or unset it.")


def _visible(values: Mapping[str, str]) -> Iterator[DoctorFinding]:
    value = values.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    if value.strip() in ("", "-1"):
        why, advice = "It hides all GPUs: training uses the CPU.", "`unset CUDA_VISIBLE_DEVICES`."
        yield ENVIRONMENT.warning(f"CUDA_VISIBLE_DEVICES={value}", why, advice)
    else:
        yield ENVIRONMENT.ok(f"CUDA_VISIBLE_DEVICES={value}: only these GPUs are used")


# ---- what torch says of this machine, in a process of its own: a broken driver may kill or hang whoever asks --------


def main() -> int:
    """Print one JSON object a line, as soon as it is known: versions, devices, kernels."""
    import torch

    has_cuda = torch.cuda.is_available()
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    versions = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "built_for": torch.cuda.get_arch_list() if has_cuda else [],
        "cuda_problem": None if has_cuda else _cuda_problem(torch),
    }
    _print("versions", versions)
    devices = []
    for number in range(torch.cuda.device_count() if has_cuda else 0):
        found = torch.cuda.get_device_properties(number)
        devices.append({"name": found.name, "bytes": found.total_memory, "capability": [found.major, found.minor]})
    _print("devices", devices)
    from zero2all.measure.operators import listed_operators

    _print("kernels", listed_operators(None))
    return 0


def _cuda_problem(torch: Any) -> str | None:
    """Why torch sees no GPU; None for a build without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except Exception as error:
        return " ".join(str(error).split())[:300]
    return "no GPU is visible to this process"


def _print(name: str, value: Any) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
