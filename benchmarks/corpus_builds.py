"""`z2a corpus build` as a user starts it, in a process of its own, measured."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Usage, run_measured
from zero2all.common.files import read_json


@dataclass(frozen=True)
class Bench:
    """Where the benchmark works."""

    data: Path
    """The folder of real text."""
    work: Path
    """Scratch: generated text, workspaces, caches, logs."""

    @property
    def environment(self) -> dict[str, str]:
        """Caches of byte code and native code of our own, so that what is cold and what is warm is known."""
        cache = self.work / "cache"
        return {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(cache / "python"),
            "NUMBA_CACHE_DIR": str(cache / "numba"),
        }


def build_command(sources: Mapping[str, Path], workspace: Path, *more: str) -> list[str]:
    """The command line; a source has the name of its channel, whose default rules apply."""
    named = [f"{channel}={path}:{channel}" for channel, path in sources.items()]
    return [sys.executable, "-m", "zero2all", "corpus", "build", *named, "--work", str(workspace), *more]


def build_measured(
    bench: Bench,
    sources: Mapping[str, Path],
    *more: str,
    environment: dict[str, str] | None = None,
    on_sample: Callable[[float, int], None] | None = None,
) -> tuple[Usage, dict[str, Any]]:
    """Build from nothing; what it took, and the report of the corpus."""
    workspace = bench.work / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    command = build_command(sources, workspace, *more)
    usage = run_measured(command, bench.work / "build.log", {**bench.environment, **(environment or {})}, on_sample)
    return usage, read_json(workspace / "corpus" / "report.json")
