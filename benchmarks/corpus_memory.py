"""How much memory a build takes, and how that grows: builds of growing amounts of text that does not repeat.

The peak of the summed PSS of all processes, two workers, near dedup on, is fitted as a constant plus so many bytes a
document, and carried on to 200 GB of text of the same mean length. Documents are short, since every one costs memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.corpus_builds import Bench, build_measured
from benchmarks.corpus_inputs import Input, generated_inputs, link_inputs, unique_ngrams

SIZES_IN_SLICES = (1, 2, 5)
"""0.5, 1 and 2.5 GB; then as much as was asked for."""
PROJECTED_BYTES = 200e9
MOST_PEAK_BYTES, MOST_BYTES_PER_DOCUMENT = 1.5e9, 40


def measure_memory(bench: Bench, slices: int) -> dict[str, Any]:
    """Builds of 0.5 GB up to `slices` times that."""
    by_slice = generated_inputs(bench.data, bench.work / "generated", "short", slices)
    counts = sorted({count for count in SIZES_IN_SLICES if count < slices} | {slices})
    runs = [_measure_size(bench, [given for inputs in by_slice[:count] for given in inputs]) for count in counts]
    results: dict[str, Any] = {"workers": 2, "runs": runs, **_fit(runs)}
    print(
        f"peak = {results['constant_mb']:.0f} MB + {results['bytes_per_document']:.1f} bytes a document; "
        f"200 GB ({results['projected_documents'] / 1e6:.0f} M documents): {results['projected_peak_mb']:.0f} MB",
        flush=True,
    )
    return results


def _measure_size(bench: Bench, inputs: Sequence[Input]) -> dict[str, Any]:
    folder = bench.work / "memory-sources"
    shutil.rmtree(folder, ignore_errors=True)
    samples: list[tuple[float, int]] = []
    usage, report = build_measured(
        bench, link_inputs(inputs, folder), "--workers", "2", on_sample=lambda *sample: samples.append(sample)
    )
    text_bytes = sum(given.text_bytes for given in inputs)
    found = {
        "raw_text_gb": text_bytes / 1e9,
        "documents": sum(given.documents for given in inputs),
        "records_kept": report["totals"]["records_kept"],
        "peak_mb": usage.peak_pss_bytes / 1e6,
        "peak_processes": usage.peak_processes,
        "peak_at_share_of_wall_time": max(samples, key=lambda sample: sample[1])[0] / usage.wall_seconds,
        "samples": len(samples),
        "unique_ngrams": unique_ngrams(inputs),
        "cpu_seconds": usage.cpu_seconds,
        "wall_seconds": usage.wall_seconds,
        "mb_per_cpu_second": text_bytes / 1e6 / usage.cpu_seconds,
    }
    print(
        f"{found['raw_text_gb']:.2f} GB, {found['documents']:,} documents, unique n-grams {found['unique_ngrams']}: "
        f"peak {found['peak_mb']:.0f} MB, {found['mb_per_cpu_second']:.1f} MB per CPU second",
        flush=True,
    )
    shutil.rmtree(bench.work / "workspace")
    return found


def _fit(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The line through the peaks, and where it is at 200 GB."""
    documents = np.array([run["documents"] for run in runs], float)
    peaks = np.array([run["peak_mb"] * 1e6 for run in runs])
    slope, constant = np.polyfit(documents, peaks, 1)
    mean_bytes = runs[-1]["raw_text_gb"] * 1e9 / runs[-1]["documents"]
    projected = PROJECTED_BYTES / mean_bytes
    return {
        "constant_mb": float(constant) / 1e6,
        "bytes_per_document": float(slope),
        "mean_document_bytes": mean_bytes,
        "projected_documents": projected,
        "projected_peak_mb": float(constant + slope * projected) / 1e6,
    }


def missed_targets(results: dict[str, Any]) -> list[str]:
    """Every target that was not met."""
    peak = max(run["peak_mb"] for run in results["runs"])
    missed = []
    if peak * 1e6 > MOST_PEAK_BYTES:
        missed.append(f"peak memory {peak:.0f} MB, target {MOST_PEAK_BYTES / 1e6:.0f}")
    if results["bytes_per_document"] > MOST_BYTES_PER_DOCUMENT:
        missed.append(f"{results['bytes_per_document']:.1f} bytes a document, target {MOST_BYTES_PER_DOCUMENT}")
    return missed
