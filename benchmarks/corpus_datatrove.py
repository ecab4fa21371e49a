"""zero2all and datatrove on the same text in the same run: clean, drop near duplicates, write.

datatrove is installed into a virtual environment of its own, with the packages its word splitters need (spaCy for en,
spaCy with jieba for zh) and xxhash below 4, with which its signature step works. The text is a sample of the real
documents, of a size that takes datatrove one or two minutes. Compared is CPU time of all processes, start-up included
on both sides; on so small a sample start-up is most of ours. datatrove runs with its filters before MinHash, where they
leave MinHash little to do, and behind it, where every block sees the whole text; the target is checked for both.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.corpus_builds import Bench, build_measured
from benchmarks.corpus_inputs import Input, real_input
from benchmarks.processes import run_measured

PACKAGES = ("datatrove[processing]", "xxhash<4", "spacy", "jieba", "orjson")
SAMPLE_BYTES = {"zh": 9_000_000, "en": 15_000_000}
ORDERS = ("filters-first", "minhash-first")
TARGET_RATIO = 30
REPEATS = 3
PIPELINE = Path(__file__).with_name("datatrove_pipeline.py")


def measure_datatrove(bench: Bench) -> dict[str, Any]:
    """Both on each language."""
    python = make_environment(bench.work / "datatrove-venv")
    results: dict[str, Any] = {"versions": versions(python), "target_ratio": TARGET_RATIO}
    for language in SAMPLE_BYTES:
        results[language] = _compare(bench, python, language)
    return results


def make_environment(folder: Path) -> Path:
    """The Python of a virtual environment with datatrove; made when it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """What is installed there."""
    code = "import json; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in %r}))"
    names = ("datatrove", "spacy", "jieba", "xxhash", "numpy")
    run = subprocess.run([str(python), "-c", code % (names,)], check=True, capture_output=True, text=True)
    return dict(json.loads(run.stdout))


def _compare(bench: Bench, python: Path, language: str) -> dict[str, Any]:
    sample = real_input(bench.data, language, bench.work / "sample", SAMPLE_BYTES[language])
    ours = [build_measured(bench, {language: sample.path}, "--workers", "1") for _ in range(REPEATS)]
    our_cpu = statistics.median(usage.cpu_seconds for usage, _ in ours)
    found: dict[str, Any] = {
        "raw_text_mb": sample.megabytes,
        "documents": sample.documents,
        "zero2all": {
            "cpu_seconds": our_cpu,
            "mb_per_cpu_second": sample.megabytes / our_cpu,
            "records_kept": ours[0][1]["totals"]["records_kept"],
        },
    }
    for order in ORDERS:
        found[order] = _run_datatrove(bench, python, sample, order, our_cpu)
    return found


def _run_datatrove(bench: Bench, python: Path, sample: Input, order: str, our_cpu: float) -> dict[str, Any]:
    folder = bench.work / "datatrove"
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(python), str(PIPELINE), str(sample.path), str(folder), sample.language, order]
    usage = run_measured(command, bench.work / "datatrove.log")
    ratio = usage.cpu_seconds / our_cpu
    print(
        f"{sample.language}, {sample.megabytes:.1f} MB: zero2all {our_cpu:.2f} s CPU, datatrove {order} "
        f"{usage.cpu_seconds:.1f} s: {ratio:.1f} times",
        flush=True,
    )
    return {
        "cpu_seconds": usage.cpu_seconds,
        "mb_per_cpu_second": sample.megabytes / usage.cpu_seconds,
        **json.loads(usage.output.splitlines()[-1]),
        "ratio": ratio,
    }


def missed_targets(results: dict[str, Any]) -> list[str]:
    """Every target that was not met."""
    return [
        f"datatrove {order} takes {results[language][order]['ratio']:.1f} times as long on {language}, "
        f"target {TARGET_RATIO}"
        for language in SAMPLE_BYTES
        for order in ORDERS
        if results[language][order]["ratio"] < TARGET_RATIO
    ]
