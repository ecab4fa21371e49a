"""Where a figure was measured: without this it means nothing."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero2all.common.files import write_json
from zero2all.measure.doctor.finding import output_of

RESULTS = Path(__file__).parent / "results"
BILLION = os.path.relpath(Path(__file__).with_name("z2all-1b-adamw.yaml"))
"""The preset z2all-1b as it was until 19 November 2026: AdamW, no norms of queries, keys and the embedding. The figures
of "z2all-1b" in docs/ and results/ were measured with it, and are measured again with it."""
GPU_PACKAGES = ("torch", "triton", "liger-kernel", "flash-attn-4", "quack-kernels")
PACKAGES = ("zero2all", "torch", "triton", "numpy", "tokenizers", "pyarrow", "orjson")


def machine() -> dict[str, Any]:
    """CPU, cores, memory, GPU and versions."""
    import psutil

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": _gpu_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def save_result(name: str, values: dict[str, Any]) -> Path:
    """Write `results/<name>.json` with the machine, and say where."""
    path = RESULTS / f"{name}.json"
    write_json(path, {"machine": machine(), **values})
    print(f"written to {path}")
    return path


def environment() -> dict[str, str | None]:
    """What a result on a GPU depends on beside our code. Not asked of torch, whose CUDA context takes GPU memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = output_of([*command, *([f"--id={visible}"] if visible else [])], 30)[0] or ""
    gpu, _, driver = answer.partition("\n")[0].partition(",")
    found = {"gpu": gpu.strip() or None, "driver": driver.strip() or None, "machine": platform.machine()}
    return {**found, "python": platform.python_version(), **{name: _version(name) for name in GPU_PACKAGES}}


def _cpu_name() -> str:
    import subprocess

    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
    return names[0] if names else "unknown"


def _gpu_name() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
