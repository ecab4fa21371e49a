"""What an ablation has measured so far: one JSON line per finished row, appended at once, in `results.jsonl`.

A row has a key: what it changes, the batch, the model, and the environment. The same command run again skips the rows
that have a result. A *sitting* is one such command; the anchor it measured first says how fast the GPU was that day.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zero2all.common.manifest import fingerprint
from zero2all.config import RunConfig, config_values
from zero2all.perf.batch import BatchShape
from zero2all.perf.variants import ANCHOR, Variant, vary

RESULTS_FILE = "results.jsonl"
FINAL_STATUSES = ("measured", "out of memory", "cannot run here")
"""A row that ended otherwise (failed, too slow) is tried again."""

Line = dict[str, Any]


def row_key(config: RunConfig, variant: Variant, batch: BatchShape, environment: dict[str, str | None]) -> str:
    """Equal for measurements that may replace each other."""
    values = config_values(vary(config, variant))
    decisive = {name: values[name] for name in ("model", "ops", "optim", "parallel")}
    decisive |= {name: values["train"][name] for name in ("precision", "z_loss", "cuda_graph")}
    return fingerprint([variant.name, variant.unpadded, str(batch), decisive, environment])


class Results:
    """The file of one ablation."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS_FILE
        self.lines = _read(self.path)

    def append(self, line: Line) -> None:
        """Append a line and flush it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n")
        with open(self.path, "ab") as file:
            file.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    @property
    def next_sitting(self) -> int:
        """Sittings are counted from 1."""
        return 1 + max((line["sitting"] for line in self.lines), default=0)

    def finished(self, key: str) -> Line | None:
        """The newest line of a row that need not be tried again."""
        return newest(line for line in self.lines if line["key"] == key and line["status"] in FINAL_STATUSES)


def newest(lines: Iterable[Line]) -> Line | None:
    """The last line; None if there is none."""
    found = list(lines)
    return found[-1] if found else None


def anchors(batch: str, environment: dict[str, Any], lines: list[Line]) -> dict[int, float]:
    """Sitting -> seconds per iteration of its anchor."""
    return {
        line["sitting"]: line["result"]["seconds_per_iteration"]
        for line in lines
        if line["row"] == ANCHOR
        and line["batch"] == batch
        and line["status"] == "measured"
        and line["environment"] == environment
    }


def _read(path: Path) -> list[Line]:
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # cut off when that sitting ended
            continue
        if isinstance(line, dict) and "key" in line:
            lines.append(line)
    return lines
