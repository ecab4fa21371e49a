"""The journey's speed, stage by stage, and how long `z2a --help` takes.

    python benchmarks/spine.py            the quickstart in a temporary folder, about five minutes on two cores
    python benchmarks/spine.py --keep DIR the same, kept in DIR

Each stage is timed alone, on the quickstart's own data, as `z2a quickstart` runs it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.common.files import read_json
from zero2all.config import load_config
from zero2all.quickstart.pipeline import run_quickstart

HELP_RUNS = 20


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR", help="run in DIR and keep it")
    arguments = parser.parse_args()
    work = arguments.keep or Path(tempfile.mkdtemp(prefix="z2a-bench-"))
    results: dict[str, Any] = {"help_seconds": help_seconds()}
    print(f"z2a --help: median {results['help_seconds']['median']:.3f} s of {HELP_RUNS}")
    try:
        results["journey"] = journey_results(work)
    finally:
        if arguments.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    for name, seconds in results["journey"]["stage_seconds"].items():
        print(f"{name:<20} {seconds:8.1f} s")
    print(f"corpus    {results['journey']['corpus_mb_per_second']:.1f} MB/s")
    print(f"pack      {results['journey']['pack_mb_per_second']:.1f} MB/s")
    print(f"train     {results['journey']['train_tokens_per_second']:,.0f} tokens/s")
    print(f"probes    {results['journey']['probe_accuracy']}")
    save_result("spine", results)


def help_seconds() -> dict[str, float]:
    """Wall time of `z2a --help` in a fresh process."""
    command = [str(Path(sys.executable).with_name("z2a")), "--help"]
    times = []
    for _ in range(HELP_RUNS):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return {"median": statistics.median(times), "worst": max(times)}


def journey_results(work: Path) -> dict[str, Any]:
    """Run the quickstart and take its figures."""
    started = time.perf_counter()
    journey = run_quickstart(load_config("quickstart"), work)
    total = time.perf_counter() - started
    seconds = {stage.name: stage.seconds for stage in journey.stages}
    text_bytes = read_json(work / "corpus/report.json")["totals"]["bytes_kept"]
    tokens = journey.config.train.steps * journey.config.train.tokens_per_step
    assert journey.before is not None, "the small world has probes"
    probes = journey.evaluation["probes"]
    return {
        "total_seconds": total,
        "stage_seconds": seconds,
        "corpus_mb_per_second": text_bytes / seconds["corpus"] / 1e6,
        "pack_mb_per_second": text_bytes / seconds["pack"] / 1e6,
        "train_tokens_per_second": tokens / seconds["train"],
        "probe_accuracy_untrained": journey.before["accuracy"],
        "probe_accuracy": {
            "all": probes["accuracy"],
            **{channel: values["accuracy"] for channel, values in probes["channels"].items()},
        },
        "held_out_bits_per_byte": {
            channel: values["bits_per_byte"] for channel, values in journey.evaluation["held_out"].items()
        },
    }


if __name__ == "__main__":
    main()
