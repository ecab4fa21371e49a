"""The tokenizer lab: exactness of the cut, time and memory against other trainers, gigabytes, compression, encoding.

    python benchmarks/tokenizer.py --data FOLDER                      everything but the largest run, about an hour
    python benchmarks/tokenizer.py --data FOLDER --only exactness     one section (several may be given)
    python benchmarks/tokenizer.py --data FOLDER --only scale --gigabytes 5

FOLDER holds real text in files named zh* and en* (JSON lines, JSON arrays, parquet); code comes from the installed
packages. Every trainer runs in a process of its own. A section's figures replace those of its last run in the results.
Compare processor seconds where the machine is shared; `seconds` are those of the wall clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS, save_result
from benchmarks.tokenizer_encoding import encoding
from benchmarks.tokenizer_text import (
    HELD_OUT_EVERY,
    MIX_FILE_MEGABYTES,
    real_texts,
    write_mix,
    write_small_mix,
    write_split,
)
from zero2all.common.files import read_json

ROOT = Path(__file__).resolve().parent.parent
PIECES = 32_000
MANY_PIECES = 64_000
SMALL_MIX_MEGABYTES = 60
HELD_BYTES = 2_000_000
CHANNEL_BYTES = 30_000_000
CHANNELS = ("zh", "en", "code")
SCALE_MEGABYTES = (200, 500, 1000)
PROJECTED_MEGABYTES = 20_000


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="real text (see above)")
    parser.add_argument("--work", type=Path, default=None, metavar="DIR", help="keep texts and tokenizers here")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--gigabytes", type=int, default=1, metavar="N", help="largest run of the scale section")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="z2a-tokenizer-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.data, work, arguments.gigabytes)
    results = read_json(RESULTS / "tokenizer.json") if (RESULTS / "tokenizer.json").exists() else {}
    results.pop("machine", None)
    for name in arguments.only:
        print(f"\n== {name}")
        results[name] = SECTIONS[name](bench)
        save_result("tokenizer", results)


class Bench:
    """Where the texts are, and how a trainer is started."""

    def __init__(self, data: Path, work: Path, gigabytes: int) -> None:
        self.data, self.work, self.gigabytes = data, work, gigabytes
        if not (work / "code.all.txt").exists():
            write_split(real_texts(data), work)

    def text(self, name: str) -> Path:
        """One of the files of `write_split`."""
        return self.work / f"{name}.txt"

    def train(self, label: str, trainer: str, texts: list[Path], pieces: int, *options: str, **environment: str) -> Any:
        """Run a trainer; its figures."""
        out = self.work / f"{label}.json"
        command = [sys.executable, "-m", "benchmarks.tokenizer_trainers", trainer, "--pieces", str(pieces)]
        command += ["--out", str(out), *options, "--text", *map(str, texts)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        answer = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
        if answer.returncode:
            raise RuntimeError(f"{label} failed:\n{answer.stderr[-3000:]}")
        figures = json.loads(answer.stdout.splitlines()[-1])
        print(
            f"{label:<28} {figures['cpu_seconds']:8.1f} s CPU {figures['seconds']:8.1f} s wall "
            f"{figures['peak_mb']:8.0f} MB peak {figures['above_loaded_mb']:8.0f} MB above libraries",
            flush=True,
        )
        return figures

    def model(self, label: str) -> dict[str, Any]:
        """The vocabulary and merges that a trainer made."""
        made: dict[str, Any] = json.loads((self.work / f"{label}.json").read_text())["model"]
        return made


def exactness(bench: Bench) -> dict[str, Any]:
    """Cut and uncut training give the same merges in the same order, and so do two threads and little memory."""
    results = {}
    mix = write_small_mix(bench.work, SMALL_MIX_MEGABYTES)
    for name, text in (("zh", bench.text("zh.all")), (f"mix{SMALL_MIX_MEGABYTES}", mix)):
        cut = bench.train(f"{name}.cut", "ours", [text], PIECES)
        uncut = bench.train(f"{name}.uncut", "ours", [text], PIECES, "--uncut")
        tight_mb = int(cut["loaded_mb"] + 104)
        tight_options = ("--threads", "2", "--max-memory", str(tight_mb * 1_000_000))
        tight = bench.train(f"{name}.tight", "ours", [text], PIECES, *tight_options)
        same = bench.model(f"{name}.cut") == bench.model(f"{name}.uncut")
        same_tight = bench.model(f"{name}.cut") == bench.model(f"{name}.tight")
        merges = len(bench.model(f"{name}.cut")["merges"])
        results[name] = {
            "identical": same,
            "identical_with_two_threads_and_a_memory_limit": same_tight,
            "merges": merges,
            "threshold": cut["threshold"],
            "last_count": cut["last_count"],
            "unique_pieces": {"cut": cut["facts"]["unique_pieces"], "uncut": uncut["facts"]["unique_pieces"]},
            "symbols": {"cut": cut["facts"]["symbols"], "uncut": uncut["facts"]["symbols"]},
            "limit_mb": tight_mb,
            "spilled_bytes": tight["facts"]["spilled_bytes"],
            "cut": _figures(cut),
            "uncut": _figures(uncut),
            "tight": _figures(tight),
        }
        print(
            f"{name}: {merges:,} merges, cut at {cut['threshold']}, last merge {cut['last_count']} times: "
            f"{'identical' if same else 'DIFFERENT'}; in little memory: {'identical' if same_tight else 'DIFFERENT'}"
        )
        assert same, f"{name}: the cut changed a merge"
        assert same_tight, f"{name}: threads or the memory limit changed a merge"
    return results


def trainers(bench: Bench) -> dict[str, Any]:
    """One thread, the same text: ours, tokenizers, sentencepiece."""
    cold_cache = tempfile.mkdtemp(prefix="z2a-numba-")
    tiny = bench.work / "tiny.txt"
    tiny.write_text(bench.text("zh.all").read_text()[:300_000])
    cold = bench.train("tiny.cold", "ours", [tiny], 3000, NUMBA_CACHE_DIR=cold_cache)
    warm = bench.train("tiny.warm", "ours", [tiny], 3000, NUMBA_CACHE_DIR=cold_cache)
    results: dict[str, Any] = {
        "compile_seconds_once_per_machine": round(cold["cpu_seconds"] - warm["cpu_seconds"], 1),
        "smallest_training_cpu_seconds": warm["cpu_seconds"],
    }
    for language in ("zh", "en"):
        text = [bench.text(f"{language}.all")]
        figures = {
            "ours": _figures(_median([bench.train(f"{language}.ours", "ours", text, PIECES) for _ in range(3)])),
            "tokenizers": _figures(bench.train(f"{language}.tokenizers", "tokenizers", text, PIECES)),
            "sentencepiece": _figures(bench.train(f"{language}.sentencepiece", "sentencepiece", text, PIECES)),
        }
        ratios = {
            other: {
                measure: round(figures[other][measure] / figures["ours"][measure], 2)
                for measure in ("cpu_seconds", "peak_mb", "above_loaded_mb")
            }
            for other in ("tokenizers", "sentencepiece")
        }
        results[language] = {"megabytes": text[0].stat().st_size / 1e6, **figures, "times_ours": ratios}
        for other, ratio in ratios.items():
            print(
                f"{language}: {other} takes {ratio['cpu_seconds']} times our CPU time, {ratio['peak_mb']} times our "
                f"memory ({ratio['above_loaded_mb']} times, libraries not counted)"
            )
    return results


def scale(bench: Bench) -> dict[str, Any]:
    """Growing amounts of the mix at 64k pieces on two threads; what grows how, and what 20 GB would take."""
    sizes = [size for size in SCALE_MEGABYTES if size < 1000 * bench.gigabytes] + [1000 * bench.gigabytes]
    if bench.gigabytes > 1:
        sizes = sorted({*SCALE_MEGABYTES, *sizes})
    paths = _mix(bench, sizes[-1])
    old = read_json(RESULTS / "tokenizer.json").get("scale", {}) if (RESULTS / "tokenizer.json").exists() else {}
    rows: dict[int, Any] = {int(size): row for size, row in old.get("runs", {}).items() if int(size) not in sizes}
    for size in sizes:
        texts = paths[: size // MIX_FILE_MEGABYTES]
        figures = bench.train(f"mix.{size}mb", "ours", texts, MANY_PIECES, "--threads", "2")
        facts = figures["facts"]
        rows[size] = {
            **_figures(figures),
            "text_bytes": facts["text"]["bytes"],
            "unique_pieces": facts["unique_pieces"],
            "symbols": facts["symbols"],
            "threshold": figures["threshold"],
            "last_count": figures["last_count"],
            "thresholds_tried": facts["thresholds_tried"],
            "pairs_of_characters": facts["pairs_of_characters"],
            "stage_seconds": facts["seconds"],
        }
        print(f"  {size:,} MB: {facts['unique_pieces']:,} unique pieces, cut at {figures['threshold']}", flush=True)
    return {"runs": {str(size): rows[size] for size in sorted(rows)}, "projection": _projection(rows)}


def _projection(rows: dict[int, Any]) -> dict[str, Any]:
    """Power laws through the two largest runs, and where they lead."""
    small, large = sorted(rows)[-2:]
    found: dict[str, Any] = {"from_megabytes": [small, large], "to_megabytes": PROJECTED_MEGABYTES}
    for measure in ("unique_pieces", "above_loaded_mb", "cpu_seconds", "seconds"):
        exponent = math.log(rows[large][measure] / rows[small][measure]) / math.log(large / small)
        value = rows[large][measure] * (PROJECTED_MEGABYTES / large) ** exponent
        found[measure] = {"exponent": round(exponent, 3), "projected": round(value)}
        print(f"  {measure} grows as size^{exponent:.2f}: {value:,.0f} at {PROJECTED_MEGABYTES / 1000:.0f} GB")
    return found


def _mix(bench: Bench, megabytes: int) -> list[Path]:
    folder = bench.work / "mix"
    count = megabytes // MIX_FILE_MEGABYTES
    paths = [folder / f"mix-{number:03d}.txt" for number in range(count)]
    return paths if all(path.exists() for path in paths) else write_mix(real_texts(bench.data), folder, megabytes)


def compression(bench: Bench) -> dict[str, Any]:
    """Bytes per token on held-out text, at the same number of pieces: trained on the mix, and on each channel alone."""
    found: dict[str, Any] = {"pieces": PIECES, "held_out": f"every {HELD_OUT_EVERY}th document"}
    mix = write_small_mix(bench.work, SMALL_MIX_MEGABYTES)
    found["trained_on_the_mix"] = _compressed(bench, "mix", mix, CHANNELS)
    found["trained_on_the_channel"] = {}
    for channel in CHANNELS:
        text = bench.work / f"{channel}.compression.txt"
        text.write_bytes(bench.text(f"{channel}.train").read_bytes()[:CHANNEL_BYTES].rpartition(b"\n")[0])
        found["trained_on_the_channel"] |= _compressed(bench, channel, text, (channel,))
    return found


def _compressed(bench: Bench, label: str, text: Path, channels: Sequence[str]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    bench.train(f"{label}.compression.ours", "ours", [text], PIECES)
    bench.train(f"{label}.compression.tokenizers", "tokenizers", [text], PIECES)
    bench.train(f"{label}.compression.isolated", "tokenizers", [text], PIECES, "--isolated-han")
    found = {}
    for channel in channels:
        data = bench.text(f"{channel}.held").read_bytes()[:HELD_BYTES]
        lines = data.decode("utf-8", "ignore").splitlines(keepends=True)
        documents = ["".join(lines[start : start + 50]) for start in range(0, len(lines), 50)]
        size = sum(len(document.encode()) for document in documents)
        values = {}
        for name in ("ours", "tokenizers", "isolated"):
            encoder = Tokenizer.from_file(str(bench.work / f"{label}.compression.{name}.json"))
            values[name] = size / sum(len(encoded.ids) for encoded in encoder.encode_batch_fast(documents))
        found[channel] = {
            **{f"bytes_per_token_{name}": round(value, 4) for name, value in values.items()},
            "ours_to_tokenizers": round(values["ours"] / values["tokenizers"], 4),
            "ours_to_isolated_han": round(values["ours"] / values["isolated"], 4),
        }
        print(
            f"trained on {label}, {channel}: ours {values['ours']:.4f} bytes per token, tokenizers "
            f"{values['tokenizers']:.4f} (ratio {found[channel]['ours_to_tokenizers']:.4f}), with Han isolated "
            f"{values['isolated']:.4f} (ratio {found[channel]['ours_to_isolated_han']:.4f})"
        )
    return found


def _figures(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in ("seconds", "cpu_seconds", "peak_mb", "loaded_mb", "above_loaded_mb")}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: run["cpu_seconds"])[len(runs) // 2]


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "exactness": exactness,
    "trainers": trainers,
    "compression": compression,
    "encoding": lambda bench: encoding(bench.work, real_texts(bench.data)),
    "scale": scale,
}

if __name__ == "__main__":
    main()
