"""What a result depends on beside our code: GPU, driver, versions. Found without torch.

Asking torch would create a CUDA context, and the process that starts the rows must not hold memory on the GPU that they
measure.
"""

from __future__ import annotations

import os
import platform
import subprocess
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "liger-kernel", "flash-attn-4", "quack-kernels")
MEASURED_PARTS = ("model", "ops", "train")


def environment() -> dict[str, str | None]:
    """Results of equal environments can be compared."""
    gpu, driver = _gpu()
    found: dict[str, str | None] = {
        "gpu": gpu,
        "driver": driver,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    return found | {name: _version(name) for name in PACKAGES}


def code_fingerprint() -> str:
    """A fingerprint of the measured source, to notice when a table mixes two versions of it."""
    root = Path(__file__).resolve().parent.parent
    digest = sha256()
    for part in MEASURED_PARTS:
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _gpu() -> tuple[str | None, str | None]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    command += [f"--id={visible}"] if visible else []
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None, None
    name, _, driver = lines[0].partition(",") if lines else ("", "", "")
    return name.strip() or None, driver.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
