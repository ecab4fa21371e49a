"""The corpus engine of this checkout against that of another one, on the same text in one run.

    python -m benchmarks.corpus_before --data DIR --before CHECKOUT

Builds of both alternate; what counts is the CPU time, user and system, of all processes of a build, start-up included.
DIR is that of `benchmarks.corpus`. The sources have named channels, which the version before needs.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.corpus_builds import build_command
from benchmarks.corpus_inputs import SHARES, real_input
from benchmarks.corpus_speed import MODES
from benchmarks.machine import save_result
from benchmarks.processes import run_measured

HERE = Path(__file__).resolve().parent.parent
LEAST_SHARE = 0.9


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="z2a-corpus-before-"))
    checkouts = {"before": arguments.before.resolve(), "after": HERE}
    results: dict[str, Any] = {}
    for language in SHARES:
        given = real_input(arguments.data.absolute(), language, work / "real")
        for mode, near in MODES.items():
            seconds: dict[str, list[float]] = {name: [] for name in checkouts}
            for round_ in range(arguments.repeats + 1):  # the first compiles
                for name, checkout in checkouts.items():
                    used = cpu_seconds(work, name, checkout, {language: given.path}, near)
                    if round_:
                        seconds[name].append(used)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            share = medians["before"] / medians["after"]
            results[f"{language} {mode}"] = {"raw_text_mb": given.megabytes, **medians, "speed_share": share}
            print(f"{language} {mode}: {medians['before']:.2f} s -> {medians['after']:.2f} s, {share:.1%}", flush=True)
    save_result("corpus_before", results)
    shutil.rmtree(work)
    if slow := [name for name, found in results.items() if found["speed_share"] < LEAST_SHARE]:
        sys.exit(f"below {LEAST_SHARE:.0%} of the speed before: {', '.join(slow)}")


def cpu_seconds(work: Path, name: str, checkout: Path, sources: dict[str, Path], near: str) -> float:
    """CPU time of one build by one version; worker processes import from the current folder first."""
    workspace = work / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    command = build_command(sources, workspace, "--workers", "1", "--dedup.near", near)
    environment = {"PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": str(work / f"cache-{name}")}
    return run_measured(["env", "-C", str(checkout), *command], work / "build.log", environment).cpu_seconds


if __name__ == "__main__":
    main()
