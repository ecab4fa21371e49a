"""Variables of the environment that cost speed or break a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zero2all.common.cores import usable_cores
from zero2all.perf.doctor.finding import Finding, Grade

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


def _any(_: str) -> bool:
    return True


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.search(pattern, value, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Rule:
    """A variable, the values that matter, how much, and why."""

    name: str
    matters: Callable[[str], bool]
    grade: Grade
    why: str


RULES = (
    Rule("CUDA_LAUNCH_BLOCKING", _is_on, "warning", SYNC),
    Rule("TORCH_USE_CUDA_DSA", _is_on, "note", "It does something only in a torch that was built with it."),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "warning", "Each tensor is allocated by the driver, which waits."),
    Rule("CUDA_MODULE_LOADING", _matches("eager"), "note", "All kernels are loaded: 0.5 GiB more on each GPU."),
    Rule("CUDA_CACHE_DISABLE", _is_on, "warning", EVERY_START),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", _matches("^1$"), "note", "One queue for all streams: copies wait for kernels."),
    Rule("CUBLAS_WORKSPACE_CONFIG", _matches(":16:"), "note", "The small workspace excludes cuBLAS's fastest kernels."),
    Rule("NVIDIA_TF32_OVERRIDE", _is_off, "warning", "float32 matmuls run without tensor cores."),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _is_on, "note", "float32 matmuls are rounded to TF32, whatever is set."),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG", _matches("detail"), "warning", "Every collective is checked by another one before."
    ),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _is_on, "warning", "The host waits for every collective: nothing overlaps."),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", _is_off, "warning", "When one rank dies, the others wait for ever."),
    Rule(
        "NCCL_ASYNC_ERROR_HANDLING", _any, "note", "An old name, which torch warns of: TORCH_NCCL_ASYNC_ERROR_HANDLING."
    ),
    Rule("NCCL_P2P_DISABLE", _is_on, "warning", SLOW_LINK),
    Rule("NCCL_SHM_DISABLE", _is_on, "warning", SLOW_LINK),
    Rule("NCCL_IB_DISABLE", _is_on, "warning", SLOW_LINK),
    Rule("NCCL_NVLS_ENABLE", _is_off, "note", "All-reduces inside a node lose the switch's own reduction."),
    Rule("NCCL_DEBUG", _matches("info|trace"), "note", "Long logs; with TRACE also slower collectives."),
    Rule("NCCL_ALGO", _any, "note", HANDMADE),
    Rule("NCCL_PROTO", _any, "note", HANDMADE),
    Rule("NCCL_MAX_NCHANNELS", _any, "note", HANDMADE),
    Rule("NCCL_NTHREADS", _any, "note", HANDMADE),
    Rule("NCCL_BUFFSIZE", _any, "note", HANDMADE),
    Rule("TORCH_COMPILE_DISABLE", _is_on, "warning", NO_COMPILE),
    Rule("TORCHDYNAMO_DISABLE", _is_on, "warning", NO_COMPILE),
    Rule("TORCH_COMPILE_DEBUG", _is_on, "warning", "Compilation writes all its stages to files."),
    Rule("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _is_on, "warning", EVERY_START),
    Rule("TRITON_ALWAYS_COMPILE", _is_on, "warning", EVERY_START),
    Rule("TRITON_INTERPRET", _is_on, "error", "Triton kernels run in Python, thousands of times slower."),
    Rule("PYTHONMALLOC", _matches("debug"), "warning", "Every allocation of Python is filled and checked."),
    Rule("PYTHONDEVMODE", _is_on, "warning", "Python checks memory and warns at run time: the host gets slow."),
    Rule("MALLOC_PERTURB_", _is_on, "warning", "Every allocation of the host is filled with a pattern."),
    Rule("LD_PRELOAD", _is_on, "note", "Another library stands before those of the system."),
    Rule("LOCAL_RANK", _any, "warning", "`z2a train` believes that a launcher started it, and waits for other ranks."),
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NETWORK = Path("/sys/class/net")


def look_at_environment(values: Mapping[str, str] = os.environ, cores: int | None = None) -> Iterator[Finding]:
    """Variables that matter, by their value; one line where none does."""
    found = [*_by_rule(values), *_threads(values, cores), *_allocator(values), *_interfaces(values), *_visible(values)]
    yield from found or [Finding("environment", "ok", "no variable that costs speed is set")]


def _by_rule(values: Mapping[str, str]) -> Iterator[Finding]:
    for rule in RULES:
        value = values.get(rule.name)
        if value is not None and rule.matters(value):
            advice = f"`unset {rule.name}`, unless you need it."
            yield Finding("environment", rule.grade, f"{rule.name}={value[:80]}", rule.why, advice)


def _threads(values: Mapping[str, str], cores: int | None) -> Iterator[Finding]:
    cores = cores or usable_cores()
    for name in THREADS:
        value = values.get(name)
        if value is None:
            continue
        if not value.strip().isdigit() or int(value) == 0:
            why, advice = "It is not a number of threads.", f"`unset {name}`, or give a number."
            yield Finding("environment", "warning", f"{name}={value[:80]}", why, advice)
        elif int(value) > cores:
            why = f"More threads than the {cores} CPUs of this process: they wait for each other."
            yield Finding("environment", "warning", f"{name}={value}", why, f"Set it to {cores} or less.")
        elif int(value) == 1 and cores > 4:
            why = "One core for work on the CPU, in `z2a train` too."
            yield Finding("environment", "note", f"{name}=1", why, "Right beside a GPU; for work on the CPU unset it.")


def _allocator(values: Mapping[str, str]) -> Iterator[Finding]:
    both = [name for name in ALLOCATOR if name in values]
    for name in both:
        found = f"{name}={values[name][:80]}"
        if "expandable_segments:True" in values[name]:
            yield Finding("environment", "ok", found)
        else:
            why = "It replaces our own setting, expandable_segments:True, which keeps memory from being cut up."
            advice = "Add expandable_segments:True, or unset it."
            yield Finding("environment", "note", found, why, advice)
    if len(both) == 2:
        why = "They are two names of one setting; torch reads the first."
        yield Finding("environment", "note", f"both {both[0]} and {both[1]} are set", why, f"`unset {both[1]}`.")


def _interfaces(values: Mapping[str, str]) -> Iterator[Finding]:
    cards = [path.name for path in NETWORK.glob("*")]
    for name in INTERFACES:
        value = values.get(name, "")
        wanted = [word for word in value.lstrip("^=").split(",") if word]
        if not value or not cards or value.startswith("^"):
            continue
        if not any(
            card == word or (not value.startswith("=") and card.startswith(word)) for card in cards for word in wanted
        ):
            why = f"This machine has {', '.join(sorted(cards))}: ranks could not reach each other."
            yield Finding("environment", "error", f"{name}={value}", why, "Name one of these, or unset it.")


def _visible(values: Mapping[str, str]) -> Iterator[Finding]:
    value = values.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    if value.strip() in ("", "-1"):
        why, advice = "It hides all GPUs: training uses the CPU.", "`unset CUDA_VISIBLE_DEVICES`."
        yield Finding("environment", "warning", f"CUDA_VISIBLE_DEVICES={value}", why, advice)
    else:
        yield Finding("environment", "ok", f"CUDA_VISIBLE_DEVICES={value}: only these GPUs are used")
