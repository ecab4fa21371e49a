"""What an ablation has measured so far: one JSON line per finished row, appended at once, in `results.jsonl`.

A row has a key: what it changes, the batch, the model, and the environment. The same command run again skips the rows
that have a result. A *sitting* is one such command; the anchor it measured first says how fast the GPU was that day.
"""

from __future__ import annotations

import os
import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero2all.common.jsonio import append_line, whole_lines
from zero2all.common.manifest import fingerprint
from zero2all.config import RunConfig, config_values
from zero2all.perf.batch import BatchShape
from zero2all.perf.doctor.finding import output_of
from zero2all.perf.variants import ANCHOR, Variant, vary

PACKAGES = ("torch", "triton", "liger-kernel", "flash-attn-4", "quack-kernels")
MEASURED_PARTS = ("model", "ops", "parallel", "train")
RESULTS_FILE = "results.jsonl"
FINAL_STATUSES = ("measured", "out of memory", "cannot run here")
"""A row that ended otherwise (failed, too slow) is tried again."""

Line = dict[str, Any]


def environment() -> dict[str, str | None]:
    """What a result depends on besides our code. Not asked of torch, whose CUDA context takes GPU memory."""
    gpu, driver = _gpu()
    found: dict[str, str | None] = {
        "gpu": gpu,
        "driver": driver,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


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
    name, _, driver = (output_of(command, 30)[0] or "").partition("\n")[0].partition(",")
    return name.strip() or None, driver.strip() or None


def row_key(config: RunConfig, variant: Variant, batch: BatchShape, environment: dict[str, str | None]) -> str:
    """Equal for measurements that may replace each other."""
    values = config_values(vary(config, variant))
    decisive = {name: values[name] for name in ("model", "ops", "optim", "parallel")}
    decisive |= {name: values["train"][name] for name in ("precision", "z_loss", "cuda_graph")}
    if values["train"]["recompute"] != "none":
        decisive |= {name: values["train"][name] for name in ("recompute", "recompute_every")}
    return fingerprint([variant.name, variant.unpadded, str(batch), decisive, environment])


class Results:
    """The file of one ablation."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS_FILE
        self.lines = [line for line in whole_lines(self.path) if "key" in line]

    def append(self, line: Line) -> None:
        """Append a line and flush it to disk."""
        append_line(self.path, line)
        self.lines.append(line)

    @property
    def next_sitting(self) -> int:
        """Sittings are counted from 1."""
        return 1 + max((line["sitting"] for line in self.lines), default=0)

    def finished(self, key: str) -> Line | None:
        """The newest line of a row that need not be tried again."""
        lines = [line for line in self.lines if line["key"] == key and line["status"] in FINAL_STATUSES]
        return lines[-1] if lines else None


def anchors(batch: str, environment: dict[str, Any], lines: list[Line]) -> dict[int, float]:
    """Sitting -> seconds per iteration of its anchor."""
    wanted = {"row": ANCHOR, "batch": batch, "status": "measured", "environment": environment}
    found = [line for line in lines if all(line[name] == value for name, value in wanted.items())]
    return {line["sitting"]: line["result"]["seconds_per_iteration"] for line in found}
