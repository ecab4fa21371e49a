"""The corpus engine: speed, memory, near-dedup quality, kills, Ray, and datatrove on the same text.

    python -m benchmarks.corpus --data DIR                      everything; an hour on two cores
    python -m benchmarks.corpus --data DIR --section speed,ray  some of it; the rest of the results file stays

DIR holds real text: zh-modern.jsonl.gz (title, text), zh-tech.json.gz (title, content) and en-docs.parquet (title,
text). Code is the Python standard library. Everything runs `z2a corpus build` with the default rules of each channel.

    speed      MB of raw text per second and core                    corpus_speed.py
    datatrove  its Gopher filters and MinHash on the same text       corpus_datatrove.py, needs a package index
    memory     summed PSS over growing, never repeated text          corpus_memory.py
    planted    recall and false positives of near dedup              planted.py
    kills      SIGKILL at 20 random moments, byte for byte the same  corpus_kills.py
    ray        the same on Ray with a killed worker                  corpus_kills.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import corpus_datatrove, corpus_kills, corpus_memory, corpus_speed
from benchmarks.corpus_builds import Bench
from benchmarks.corpus_inputs import SHARES, SLICE_BYTES
from benchmarks.machine import RESULTS, save_result
from benchmarks.planted import measure, plant, shared_bases
from zero2all.common.files import read_json

BASES = 2000
"""Documents of each channel in the planted test; each has two edited copies."""
LEAST_RECALL, MOST_FALSE_POSITIVES = 0.95, 0.005
RAW_TEXT = "MB = 1e6 bytes of UTF-8 of the documents' texts, without titles, field names and escapes"

Check = Callable[[dict[str, Any]], list[str]]


def main() -> None:
    """Measure, print, save."""
    arguments = parse_arguments()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="z2a-corpus-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.data.absolute(), work.absolute())
    slices = -(-int(arguments.memory_gb * 1e9) // SLICE_BYTES)
    sections: dict[str, tuple[Callable[[], dict[str, Any]], Check]] = {
        "planted": (lambda: measure_planted(bench), planted_missed),
        "kills": (lambda: corpus_kills.measure_kills(bench), corpus_kills.missed_targets),
        "ray": (lambda: corpus_kills.measure_ray(bench), corpus_kills.missed_targets),
        "speed": (lambda: corpus_speed.measure_speed(bench), corpus_speed.missed_targets),
        "datatrove": (lambda: corpus_datatrove.measure_datatrove(bench), corpus_datatrove.missed_targets),
        "memory": (lambda: corpus_memory.measure_memory(bench, slices), corpus_memory.missed_targets),
    }
    chosen = arguments.section.split(",") if arguments.section else list(sections)
    if unknown := [name for name in chosen if name not in sections]:
        sys.exit(f"There is no section {', '.join(unknown)}; choose from {', '.join(sections)}.")
    try:
        for name in chosen:
            print(f"== {name}", flush=True)
            run_section(name, *sections[name])
    finally:
        if arguments.work is None:
            shutil.rmtree(work, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of real text")
    parser.add_argument("--section", default=None, metavar="NAME,…", help="only these sections")
    parser.add_argument(
        "--memory-gb", type=float, default=5, metavar="GB", help="text of the largest build (default 5)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=None,
        metavar="DIR",
        help="scratch folder, kept and used again; needs four times --memory-gb (default: a temporary one)",
    )
    return parser.parse_args()


def run_section(name: str, run: Callable[[], dict[str, Any]], check: Check) -> None:
    """Measure one section and put it into the results file, in which the others stay."""
    results = run()
    results["missed_targets"] = check(results)
    for missed in results["missed_targets"]:
        print(f"MISSED: {missed}", flush=True)
    path = RESULTS / "corpus.json"
    before = read_json(path) if path.exists() else {}
    before.pop("machine", None)
    save_result("corpus", {**before, "raw_text": RAW_TEXT, name: results})


def measure_planted(bench: Bench) -> dict[str, Any]:
    """Recall and false positives of near dedup, by channel."""
    results: dict[str, Any] = {}
    for channel in SHARES:
        folder = bench.work / "planted" / channel
        shutil.rmtree(folder, ignore_errors=True)
        quality = measure(plant(shared_bases(channel, bench.data, BASES), channel), channel, folder)
        results[channel] = {
            "records": quality.records,
            "copies_with_jaccard_at_least_0.8": quality.similar_copies,
            "recall": quality.recall,
            "copies_with_jaccard_0.80_to_0.82": quality.borderline_copies,
            "recall_of_those": quality.borderline_found / max(1, quality.borderline_copies),
            "dropped": quality.dropped,
            "dropped_with_jaccard_below_0.6": quality.wrong,
            "false_positive_share": quality.false_positive_share,
            "least_jaccard_of_a_dropped_record": quality.least_jaccard,
        }
        print(f"{channel}: recall {quality.recall:.4f}, false positives {quality.false_positive_share:.4%}", flush=True)
    return results


def planted_missed(results: dict[str, Any]) -> list[str]:
    """Every target that was not met."""
    missed = []
    for channel in SHARES:
        found = results[channel]
        if found["recall"] < LEAST_RECALL:
            missed.append(f"recall on {channel} {found['recall']:.3f}, target {LEAST_RECALL}")
        if found["false_positive_share"] > MOST_FALSE_POSITIVES:
            missed.append(f"false positives on {channel} {found['false_positive_share']:.2%}, target 0.5 %")
    return missed


if __name__ == "__main__":
    main()
