"""Packed data: is the order exact, and what does it cost?

    python benchmarks/packed.py                    every section, about four minutes on two cores
    python benchmarks/packed.py loader dataloader  only these
    python benchmarks/packed.py packing kills --data FOLDER   on text of your own

Sections that are not run keep what `results/packed.json` says of them. Times are CPU seconds of this process, which a
busy machine inflates less than wall time; where wall time is meant, the name says so.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import packing
from benchmarks.machine import RESULTS, save_result
from zero2all.common.files import read_json, write_json
from zero2all.common.manifest import write_manifest
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.config import DataConfig
from zero2all.packed.loader import Loader, LoaderOptions, read_batch
from zero2all.packed.mixture import RunProgress, TrainingData, open_training_data
from zero2all.packed.order import MixtureCycle, Order, OrderedSource, permuted, rounded_weights
from zero2all.packed.shard_format import docs_name, mask_name, open_split, tokens_name
from zero2all.packed.stages import Stage

SEQ_LEN = 2048
SHARD_TOKENS = 1 << 28
VOCAB_SIZE = 64320
RUNS = 5


# ---- data to measure with ----


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="z2a-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_source(
    packed: Path, name: str, tokens: int, document: int = 700, real: bool = True, masked: bool = False
) -> None:
    """A source of `tokens` tokens: random ones, or (not real) files with holes that take no disk space."""
    folder = packed / name / "train"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(name) + tokens % 1000)
    lengths = [min(SHARD_TOKENS, tokens - at) for at in range(0, tokens, SHARD_TOKENS)]
    known: dict[str, dict[str, Any]] = {}
    for shard, length in enumerate(lengths):
        files = {tokens_name(shard): 2 * length, docs_name(shard): 8}
        if not real:
            for file, size in files.items():
                with open(folder / file, "wb") as handle:
                    handle.truncate(size)
                known[file] = {"bytes": size, "crc32c": "00000000"}
            continue
        rng.integers(1, VOCAB_SIZE, length, dtype=np.uint16).tofile(folder / tokens_name(shard))
        sizes = np.maximum(2, rng.lognormal(math.log(document) - 0.5, 1.0, 2 * length // document + 8).astype(np.int64))
        starts = np.cumsum(sizes) - sizes
        starts[starts < length].astype("<u8").tofile(folder / docs_name(shard))
        if masked:
            rng.integers(0, 256, -(-length // 8), dtype=np.uint8).tofile(folder / mask_name(shard))
    content = {
        **{"source": name, "split": "train", "channel": name.split("-")[0], "tokenizer": "none"},
        **{"vocab_size": VOCAB_SIZE, "dtype": "<u2", "shards": len(lengths), "documents": 0, "tokens": tokens},
        **{"text_bytes": 4 * tokens, "loss_mask": masked},
    }
    write_manifest(folder, "packed", "none", content, known)


def write_report(packed: Path) -> None:
    """Declare the sources of a folder to belong together."""
    names = [folder.name for folder in sorted(packed.iterdir()) if folder.is_dir()]
    write_json(packed / "report.json", {"tokenizer": "none", "sources": {name: {} for name in names}})


def open_all(packed: Path, **fields: Any) -> TrainingData:
    """All sources by tokens, one stage."""
    config = DataConfig(**{"seq_len": SEQ_LEN, **fields})
    return open_training_data(packed, config, [Stage("main", 0, config.mixture, config.seq_len)])


def best_of(runs: int, measure: Callable[[], float]) -> float:
    """The smallest of several measurements: what else runs on the machine only ever adds."""
    return min(measure() for _ in range(runs))


# ---- the same batches, however they are fetched ----


def identity() -> dict[str, Any]:
    """Global batches by world size, prefetch and resume position, as hashes."""
    steps, seq_len = 60, 64
    results: dict[str, Any] = {"steps": steps}
    with temporary_folder() as packed:
        for name, tokens in (("en-a", 400_000), ("en-b", 90_000), ("zh", 250_000)):
            write_source(packed, name, tokens, document=90, masked=name == "zh")
        write_report(packed)
        data = open_all(packed, seq_len=seq_len, mixture={"en": 2.0, "zh": 1.0})
        checked = 0
        for samples in (24, 13, 7):
            step_tokens = samples * seq_len
            wanted = [_digest([read_batch(data, step * step_tokens, samples)]) for step in range(steps)]
            for ranks, prefetch, readers in itertools.product((1, 2, 3, 8), (1, 2, 5), (1, 3)):
                options = [LoaderOptions(rank, ranks, True, prefetch, readers) for rank in range(ranks)]
                first = (checked * 7) % steps
                loaders = [Loader(data, step_tokens, first * step_tokens, steps - first, one) for one in options]
                found = [_digest(batches) for batches in zip(*loaders, strict=True)]
                for loader in loaders:
                    loader.close()
                assert found == wanted[first:], f"{samples} samples, {ranks} ranks, from step {first}"
                checked += 1
            for micro in (1, 2, 3, 5):
                batch = read_batch(data, 0, samples)
                pieces = [batch.tokens[first : first + micro] for first in range(0, samples, micro)]
                assert (np.concatenate(pieces) == batch.tokens).all(), "micro-batches are slices"
        results |= {"combinations": checked, "identical": True}
    print(f"identity: {checked} combinations of ranks, prefetch, readers and start, all the same bits")
    return results


def _digest(batches: Any) -> str:
    """A hash of the real rows of one step over all ranks."""
    content = hashlib.blake2b()
    every = list(batches)
    for field in ("tokens", "weights", "channels", "sources"):
        for batch in every:
            array = getattr(batch, field)
            if array is None:
                array = np.ones((len(batch.tokens), batch.tokens.shape[1] - 1), dtype=np.float32)
            content.update(np.ascontiguousarray(array[: batch.samples]).tobytes())
    return content.hexdigest()


# ---- the permutation ----


def permutation() -> dict[str, Any]:
    """Each sample once per epoch over 10 M samples, and whether the shuffle can be told from chance."""
    size, block = 10_000_000, 1 << 16
    visits = np.zeros(size, dtype=np.uint8)
    bins = 100
    counts = np.zeros((bins, bins))
    started = time.process_time()
    images = np.empty(size, dtype=np.int64)
    for first in range(0, size, block):
        indices = np.arange(first, min(first + block, size))
        images[first : first + len(indices)] = permuted(indices, size, 20260101)
    seconds = time.process_time() - started
    np.add.at(visits, images, 1)
    np.add.at(counts, (np.arange(size) * bins // size, images * bins // size), 1)
    steps = np.diff(images)
    ahead = np.bincount((steps % size) * bins // size, minlength=bins)  # cyclic distance of neighbours, uniform
    results: dict[str, Any] = {
        "samples": size,
        "each_exactly_once": bool((visits == 1).all()),
        "microseconds_per_sample": seconds / size * 1e6,
        "chi_square_place": _chi_square(counts, (bins - 1) ** 2),
        "chi_square_neighbours": _chi_square(ahead, bins - 1),
    }
    assert results["each_exactly_once"], "the permutation must be a bijection"
    sources = [OrderedSource(f"s{n}", size) for n, size in enumerate((4_000_000, 2_500_000, 900_000, 120_001, 777))]
    order = Order(sources, [(0, rounded_weights([0.5, 0.3, 0.1, 0.06, 0.04]))], seed=5)
    parts = [order.lookup(np.arange(first, min(first + block, size))) for first in range(0, size, block)]
    numbers, samples = (np.concatenate(column) for column in zip(*parts, strict=True))
    epochs = 0
    for number, source in enumerate(sources):
        mine = samples[numbers == number]
        for epoch in range(0, len(mine), source.samples):
            visited = mine[epoch : epoch + source.samples]
            assert len(np.unique(visited)) == len(visited), f"{source.name} repeats a sample within an epoch"
            epochs += 1
    results["mixed_epochs_checked"] = epochs
    print(
        f"permutation: {size:,} samples each once, {results['microseconds_per_sample']:.2f} µs each; chi-square p = "
        f"{results['chi_square_place']['p']:.3f} (place), {results['chi_square_neighbours']['p']:.3f} (neighbours); "
        f"mixed: {epochs:,} epochs of 5 sources without a repeat"
    )
    return results


def _chi_square(counts: np.ndarray, freedom: int) -> dict[str, float]:
    """Against equal counts; p by Wilson and Hilferty's cube root, good to three digits at these degrees of freedom."""
    expected = counts.mean()
    value = float(((counts - expected) ** 2).sum() / expected)
    spread = 2 / (9 * freedom)
    z = ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return {"value": value, "freedom": freedom, "p": 0.5 * math.erfc(z / math.sqrt(2))}


# ---- the mixture ----


def mixture() -> dict[str, Any]:
    """How far any source is ever from its share, over every prefix of a cycle, and what building a cycle costs."""
    rng = np.random.default_rng(1)
    results = {}
    for sources in (3, 10, 100, 1000):
        units = rounded_weights((rng.random(sources) ** 3 + 1e-6).tolist())
        seconds = best_of(3, lambda units=units: _cpu_seconds(lambda: MixtureCycle(units)))  # type: ignore[misc]
        cycle = MixtureCycle(units)
        slots = np.arange(1, cycle.length + 1)
        worst = 0.0
        for source, count in enumerate(cycle.counts):
            taken = np.cumsum(cycle.picks == source)
            worst = max(worst, float(np.abs(taken * cycle.length - slots * count).max()) / cycle.length)
        assert worst < 1, "Tijdeman's bound"
        results[str(sources)] = {"largest_error_samples": worst, "cycle": cycle.length, "build_seconds": seconds}
        print(f"mixture: {sources} sources: largest error {worst:.4f} samples, cycle built in {seconds:.3f} s")
    return results


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def changed_weights() -> dict[str, Any]:
    """Weights changed on resume, three times in a million samples: every source must go on where it stood."""
    with temporary_folder() as packed:
        for name, tokens in (("a", 40_000_000), ("b", 9_000_000), ("c", 1_500_000)):
            write_source(packed, name, tokens, real=False)
        write_report(packed)
        seq_len, at = 64, 0
        record: list[dict[str, Any]] = []
        read: dict[str, list[np.ndarray]] = {name: [] for name in "abc"}
        config = DataConfig(seq_len=seq_len)
        for samples, weights in (
            (200_000, {"a": 8.0, "b": 1.5, "c": 0.5}),
            (300_000, {"a": 1.0, "b": 1.0}),
            (250_000, {"b": 1.0, "c": 3.0}),
            (250_000, {"a": 5.0, "b": 4.0, "c": 1.0}),
        ):
            data = open_training_data(
                packed, config, [Stage("main", 0, weights, seq_len)], RunProgress(at * seq_len, record)
            )
            numbers, indices = data.segments[0].order.lookup(np.arange(at, at + samples))
            for number, split in enumerate(data.splits):
                read[split.name].append(indices[numbers == number])
            at, record = at + samples, data.record["stages"]
        for name in "abc":
            alone = open_training_data(packed, config, [Stage("main", 0, {name: 1.0}, seq_len)])
            found = np.concatenate(read[name])
            wanted = alone.segments[0].order.lookup(np.arange(len(found)))[1]
            assert (found == wanted).all(), f"{name} repeats or skips after a change of weights"
    counts = {name: int(sum(map(len, parts))) for name, parts in read.items()}
    print(f"changed weights: 3 changes in {at:,} samples, every source read on without a repeat or a gap: {counts}")
    return {"samples": at, "changes": 3, "continued": True, "read": counts}


# ---- a corpus of 1e12 tokens that takes no disk ----

VIRTUAL = """
import sys, time
from pathlib import Path
import psutil
sys.path.insert(0, sys.argv[2])
from benchmarks.packed import *
from zero2all.packed.loader import BlockLookup
memory = psutil.Process()
before = memory.memory_info().rss
wall, cpu = time.perf_counter(), time.process_time()
data = open_all(Path(sys.argv[1]))
opened = time.perf_counter() - wall, time.process_time() - cpu
read_batch(data, 10**11 // SEQ_LEN * SEQ_LEN, 256)
first = time.perf_counter() - wall, time.process_time() - cpu
lookup, position, samples = BlockLookup(), 3 * 10**8, 1 << 18
cpu = time.process_time()
for step in range(position, position + samples, 256):
    lookup(data.segments[0], step, 256)
seconds = time.process_time() - cpu
grown = memory.memory_info().rss - before
tokens = sum(split.tokens for split in data.splits)
import orjson
print(orjson.dumps({
    "tokens": tokens, "sources": len(data.splits), "shards": sum(len(split.shards) for split in data.splits),
    "open_wall_seconds": opened[0], "open_seconds": opened[1],
    "first_batch_wall_seconds": first[0], "first_batch_seconds": first[1],
    "lookup_microseconds": seconds / samples * 1e6, "memory_mb": grown / 1e6,
}).decode())
"""


def virtual() -> dict[str, Any]:
    """Start, lookup and memory of a run over 1e12 tokens in 100 sources, in a process of its own; best of three."""
    weights = np.random.default_rng(3).random(100) ** 2 + 0.01
    with temporary_folder() as packed:
        for number, tokens in enumerate((weights / weights.sum() * 1e12).astype(np.int64) + 1):
            write_source(packed, f"source-{number:03d}", int(tokens), real=False)
        write_report(packed)
        command = [sys.executable, "-c", VIRTUAL, str(packed), str(Path(__file__).resolve().parent.parent)]
        import orjson

        runs = []
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(orjson.loads(done.stdout.splitlines()[-1]))
    results: dict[str, Any] = min(runs, key=lambda run: run["first_batch_wall_seconds"])
    print(
        f"virtual corpus: {results['tokens']:.2e} tokens, {results['sources']} sources, {results['shards']} shards: "
        f"open {results['open_wall_seconds']:.2f} s, first batch {results['first_batch_wall_seconds']:.2f} s, "
        f"lookup {results['lookup_microseconds']:.2f} µs, memory {results['memory_mb']:.0f} MB"
    )
    return results


# ---- the loader ----

LOADER_TOKENS = 160_000_000
STEP_SAMPLES = 64


def loader() -> dict[str, Any]:
    """Tokens per CPU second of this process, all threads together, from page cache."""
    results: dict[str, Any] = {}
    with temporary_folder() as packed:
        write_source(packed, "web", LOADER_TOKENS)
        write_source(packed, "talk", LOADER_TOKENS // 8, masked=True)
        write_report(packed)
        split = open_split(packed, "web", "train")
        seconds = _cpu_seconds(lambda: build_best_fit(split, SEQ_LEN))
        index = build_best_fit(split, SEQ_LEN)
        results["best_fit_index"] = {
            "documents": split.docs.lengths[0],
            "cut": index["cut"],
            "padding_share": index["padding"] / (index["rows"] * (SEQ_LEN + 1)),
            "build_seconds_per_billion_tokens": seconds / LOADER_TOKENS * 1e9,
        }
        print(f"best fit: {results['best_fit_index']}")
        kinds: dict[str, tuple[dict[str, Any], LoaderOptions]] = {
            "concat": ({"mixture": {"web": 1.0}}, LoaderOptions()),
            "concat, 2 sources, loss mask": ({}, LoaderOptions()),
            "concat, documents": ({"mixture": {"web": 1.0}}, LoaderOptions(documents=True)),
            "best fit, documents": ({"mixture": {"web": 1.0}, "packing": "best_fit"}, LoaderOptions(documents=True)),
        }
        for name, (fields, options) in kinds.items():
            data = open_all(packed, **fields)
            speeds = [_loader_speed(data, options, run) for run in range(RUNS)]
            results[name] = {
                "tokens_per_cpu_second": max(speed for speed, _ in speeds),
                "tokens_per_wall_second": max(speed for _, speed in speeds),
            }
            print(
                f"loader, {name}: {results[name]['tokens_per_cpu_second'] / 1e6:,.0f} M tokens per CPU second, "
                f"{results[name]['tokens_per_wall_second'] / 1e6:,.0f} M per second of wall time"
            )
    return results


def _loader_speed(data: TrainingData, options: LoaderOptions, run: int) -> tuple[float, float]:
    steps, step_tokens = 300, STEP_SAMPLES * SEQ_LEN
    cpu, wall = time.process_time(), time.perf_counter()
    batches = Loader(data, step_tokens, run * steps * step_tokens, steps, options)
    rows = sum(len(batch.tokens) for batch in batches)
    batches.close()
    tokens = rows * SEQ_LEN
    return tokens / (time.process_time() - cpu), tokens / (time.perf_counter() - wall)


# ---- against torch's DataLoader over the same tokens ----

EPOCH_SAMPLES = 10_000_000


def dataloader() -> dict[str, Any]:
    """Start, resume at 90 % of an epoch, and speed, against a DataLoader with a RandomSampler over one memmap."""
    import torch
    from torch.utils.data import DataLoader, Dataset, RandomSampler

    class Windows(Dataset):
        def __init__(self, path: Path) -> None:
            self.tokens = np.memmap(path, dtype="<u2", mode="r")

        def __len__(self) -> int:
            return (len(self.tokens) - 1) // SEQ_LEN

        def __getitem__(self, index: int) -> torch.Tensor:
            start = index * SEQ_LEN
            return torch.from_numpy(self.tokens[start : start + SEQ_LEN + 1].astype(np.int64))

    def theirs(path: Path, skipped: int) -> Iterator[torch.Tensor]:
        windows = Windows(path)
        sampler = RandomSampler(windows, generator=torch.Generator().manual_seed(1))
        if not skipped:
            return iter(DataLoader(windows, STEP_SAMPLES, sampler=sampler))
        # The kindest way to resume: the same shuffle again, its first part passed over without reading a token.
        rest = itertools.islice(iter(sampler), skipped, None)
        return iter(DataLoader(windows, STEP_SAMPLES, sampler=list(rest)))

    def both(work: Callable[[], Any]) -> dict[str, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        return {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}

    def ours(packed: Path, first_sample: int) -> None:
        batches = Loader(open_all(packed), STEP_SAMPLES * SEQ_LEN, first_sample * SEQ_LEN, 1)
        next(iter(batches))
        batches.close()

    results: dict[str, Any] = {"epoch_samples": EPOCH_SAMPLES}
    with temporary_folder() as packed:
        write_source(packed, "web", EPOCH_SAMPLES * SEQ_LEN + 1, real=False)
        write_report(packed)
        single = packed / "all.bin"  # theirs wants one file
        with open(single, "wb") as file:
            file.truncate(2 * (EPOCH_SAMPLES * SEQ_LEN + 1))
        resume = EPOCH_SAMPLES * 9 // 10
        results["start"] = {"ours": both(lambda: ours(packed, 0)), "theirs": both(lambda: next(theirs(single, 0)))}
        results["resume"] = {
            "ours": both(lambda: ours(packed, resume)),
            "theirs": both(lambda: next(theirs(single, resume))),
        }
    with temporary_folder() as packed:
        write_source(packed, "web", LOADER_TOKENS)
        write_report(packed)
        data, path = open_all(packed), packed / "web/train" / tokens_name(0)
        ours_speed, theirs_speed = 0.0, 0.0
        for run in range(RUNS):
            ours_speed = max(ours_speed, _loader_speed(data, LoaderOptions(), run)[0])
            cpu = time.process_time()
            rows = sum(len(batch) for batch in itertools.islice(theirs(path, 0), 300))
            theirs_speed = max(theirs_speed, rows * SEQ_LEN / (time.process_time() - cpu))
        results["tokens_per_cpu_second"] = {"ours": ours_speed, "theirs": theirs_speed}
    for what in ("start", "resume"):
        one, other = results[what]["ours"]["cpu_seconds"], results[what]["theirs"]["cpu_seconds"]
        results[what]["ratio"] = other / one
        print(f"dataloader: {what} to the first batch: ours {one:.3f} s, theirs {other:.3f} s: {other / one:,.0f} x")
    results["tokens_per_cpu_second"]["ratio"] = ours_speed / theirs_speed
    print(
        f"dataloader: ours {ours_speed / 1e6:,.0f} M tokens per CPU second, theirs {theirs_speed / 1e6:,.0f} M: "
        f"{ours_speed / theirs_speed:.2f} x"
    )
    return results


text_folder: Path | None = None
"""What --data named."""


def with_text(measure: Callable[[Path, Path | None], dict[str, Any]]) -> dict[str, Any]:
    """Measure in a folder of its own."""
    with temporary_folder() as folder:
        return measure(folder, text_folder)


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "identity": identity,
    "permutation": permutation,
    "mixture": mixture,
    "changed_weights": changed_weights,
    "virtual": virtual,
    "loader": loader,
    "dataloader": dataloader,
    "packing": lambda: with_text(packing.packing),
    "kills": lambda: with_text(packing.kills),
}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which to run (default: all)")
    parser.add_argument("--data", type=Path, default=None, help="folder of text for packing and kills")
    arguments = parser.parse_args()
    global text_folder
    text_folder = arguments.data
    asked = arguments.sections or list(SECTIONS)
    path = RESULTS / "packed.json"
    results = {name: value for name, value in (read_json(path) if path.is_file() else {}).items() if name in SECTIONS}
    for name in asked:
        results[name] = SECTIONS[name]()
    save_result("packed", {name: results[name] for name in SECTIONS if name in results})


if __name__ == "__main__":
    main()
