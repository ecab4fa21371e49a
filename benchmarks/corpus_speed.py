"""Megabytes of raw text per second and core, from raw files to finished shards.

Per core means per second of CPU time, user and system, of all processes; it does not depend on what else the machine
does, or little. Wall time does, and stands beside it. Start-up (Python, imports, loading the compiled kernels) is the
CPU time of a build of 20 documents a channel; `net` leaves it out, since it weighs as much as 40 MB of text and does
not grow. A document costs 20 to 30 µs whatever its length, so generated text comes in documents as long as the real
ones, and in short ones. Targets are checked on all of them, start-up included. numba compiles the kernels once per
machine; that is measured with an empty cache.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.corpus_builds import Bench, build_measured
from benchmarks.corpus_inputs import (
    MEAN_CHARACTERS,
    SHARES,
    Input,
    generated_inputs,
    real_input,
    real_texts,
    write_input,
)
from benchmarks.processes import Usage

REPEATS = 3
TINY_DOCUMENTS = 20
MODES = {"without near dedup": "off", "with near dedup": "all"}
TARGETS = {"without near dedup": {"zh": 20, "en": 12}, "with near dedup": {"zh": 10, "en": 7}}
"""MB per second and core."""
AS_GIVEN = {"zh": ("zh-modern.jsonl.gz", "zh-tech.json.gz"), "en": ("en-docs.parquet",)}
"""The real files as they are: gzip, one large JSON array, parquet."""


def measure_speed(bench: Bench) -> dict[str, Any]:
    """Start-up, then every language on real and on generated text."""
    results: dict[str, Any] = {"start_up": measure_start_up(bench)}
    start_up = results["start_up"]["cpu_seconds"]
    real = {language: real_input(bench.data, language, bench.work / "real") for language in SHARES}
    results["real"] = {language: _both_modes(bench, given, start_up) for language, given in real.items()}
    results["real_as_given"] = {
        language: measure_input(bench, real[language], _as_given(bench, language), "all", start_up)
        for language in AS_GIVEN
    }
    for length in MEAN_CHARACTERS:
        inputs = generated_inputs(bench.data, bench.work / "generated", length, 1)[0]
        results[f"generated_{length}"] = {given.language: _both_modes(bench, given, start_up) for given in inputs}
    results["targets_mb_per_cpu_second"] = TARGETS
    return results


def measure_start_up(bench: Bench) -> dict[str, float]:
    """CPU time of a build of almost nothing, with and without compiled kernels."""
    sources = {}
    for language in SHARES:
        rows = [row for row in real_texts(bench.data, language) if len(row[1]) < 5000][:TINY_DOCUMENTS]
        sources[language] = write_input(bench.work / "tiny" / f"{language}.jsonl", language, rows).path
    shutil.rmtree(bench.work / "cache", ignore_errors=True)
    cold, _ = build_measured(bench, sources, "--workers", "1")
    warm = [build_measured(bench, sources, "--workers", "1")[0].cpu_seconds for _ in range(REPEATS)]
    found = {"cpu_seconds": statistics.median(warm), "compile_cpu_seconds": cold.cpu_seconds - statistics.median(warm)}
    print(f"start-up {found['cpu_seconds']:.2f} s CPU; compiling once {found['compile_cpu_seconds']:.1f} s", flush=True)
    return found


def measure_input(
    bench: Bench, given: Input, path: Path, near: str, start_up: float, repeats: int = REPEATS
) -> dict[str, Any]:
    """Medians of some builds of one source with one worker, and one build with two."""
    build = {given.language: path}
    runs = [build_measured(bench, build, "--workers", "1", "--dedup.near", near) for _ in range(repeats)]
    two, _ = build_measured(bench, build, "--workers", "2", "--dedup.near", near)
    found = {
        "raw_text_mb": given.megabytes,
        "documents": given.documents,
        "records_kept": runs[0][1]["totals"]["records_kept"],
        **_rates([usage for usage, _ in runs], given.megabytes, start_up),
        "wall_seconds_two_workers": two.wall_seconds,
        "mb_per_wall_second_two_workers": given.megabytes / two.wall_seconds,
    }
    print(
        f"{path.name:<16} near {near:<4} {given.megabytes:6.1f} MB: {found['mb_per_cpu_second']:5.1f} MB a CPU second, "
        f"net {found['net_mb_per_cpu_second']:5.1f}; wall {found['wall_seconds']:.1f} s, "
        f"two workers {two.wall_seconds:.1f} s",
        flush=True,
    )
    return found


def _rates(usages: list[Usage], megabytes: float, start_up: float) -> dict[str, Any]:
    cpu = statistics.median(usage.cpu_seconds for usage in usages)
    wall = statistics.median(usage.wall_seconds for usage in usages)
    return {
        "cpu_seconds": cpu,
        "cpu_seconds_of_each_run": [usage.cpu_seconds for usage in usages],
        "mb_per_cpu_second": megabytes / cpu,
        "net_mb_per_cpu_second": megabytes / (cpu - start_up),
        "wall_seconds": wall,
        "mb_per_wall_second": megabytes / wall,
    }


def _both_modes(bench: Bench, given: Input, start_up: float) -> dict[str, Any]:
    return {name: measure_input(bench, given, given.path, near, start_up) for name, near in MODES.items()}


def _as_given(bench: Bench, language: str) -> Path:
    """A folder with the real files of one language as they are."""
    folder = bench.work / "as-given" / language
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in AS_GIVEN[language]:
        shutil.copyfile(bench.data / name, folder / name)
    return folder


def missed_targets(results: Mapping[str, Any]) -> list[str]:
    """Every target that was not met with start-up included, on any of the texts."""
    missed = []
    for mode, targets in TARGETS.items():
        for language, target in targets.items():
            for text in ("real", *(f"generated_{length}" for length in MEAN_CHARACTERS)):
                found = results[text][language][mode]
                value, net = found["mb_per_cpu_second"], found["net_mb_per_cpu_second"]
                if value < target:
                    missed.append(
                        f"{text} {language} {mode}: {value:.1f} MB/s per core (net {net:.1f}), target {target}"
                    )
    return missed
