"""Packing: how fast is it from corpus shard to token shard, and does a kill -9 ever show in what it writes?

    python benchmarks/packed.py packing kills --data FOLDER

Every file of FOLDER is a source; without FOLDER both run on the source code of Python's standard library. Speed is MB
of UTF-8 text per CPU second, over all threads: reading, decoding JSON, encoding and writing.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.planted import stdlib_sources
from zero2all.common import jsonio
from zero2all.common.engine import EngineConfig
from zero2all.common.records import TITLE_AND_TEXT, corpus_sources, iter_records
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.writer import PackOptions, first_texts, pack_corpus
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.encoders import EncoderConfig, open_encoder
from zero2all.tokenizer.stage import train_on_corpus

VOCAB_SIZE = 16_000
SAMPLE_CHARACTERS = 1_500_000
RUNS = 5
KILLS = 10
PIECES_TO_KILL = 60


def prepare(folder: Path, data: Path | None) -> Path:
    """A workspace with corpus and tokenizer."""
    work = folder / "work"
    if data is None:
        path = folder / "own.jsonl"
        path.write_bytes(b"".join(jsonio.dumps_line({"text": text}) for text in stdlib_sources()))
        sources = [Source("own", path, "code")]
    else:
        files = sorted(path for path in data.iterdir() if path.is_file() and path.suffix not in (".md", ".txt"))
        sources = [Source(f"source{number}", path) for number, path in enumerate(files)]
    build_corpus(work / "corpus", sources, BuildOptions(), EngineConfig(workers=1))
    # The vocabulary has seen every source, but not much of it: learning it is not what is measured.
    samples = []
    for name, manifest in corpus_sources(work / "corpus").items():
        path = folder / f"{name}-sample.jsonl"
        room = SAMPLE_CHARACTERS
        with open(path, "wb") as file:
            for record in iter_records(work / "corpus", name, "train"):
                file.write(jsonio.dumps_line({"text": record["content"]}))
                room -= len(record["content"])
                if room < 0:
                    break
        samples.append(Source(name, path, manifest["channel"]))
    build_corpus(folder / "sample", samples, BuildOptions(), EngineConfig(workers=1))
    train_on_corpus(folder / "sample", work / "tokenizer", TokenizerConfig(vocab_size=VOCAB_SIZE))
    return work


def packing(folder: Path, data: Path | None) -> dict[str, Any]:
    """MB of text per CPU second, by channel, with each encoder that is here."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    options = PackOptions(encoder=EncoderConfig(threads=1))
    work = prepare(folder, data)
    results: dict[str, Any] = {"data": "standard library" if data is None else "real text", "vocab_size": VOCAB_SIZE}
    by_channel: dict[str, list[str]] = {}
    for name, manifest in corpus_sources(work / "corpus").items():
        by_channel.setdefault(manifest["channel"], []).append(name)
    for channel, names in sorted(by_channel.items()):
        only = folder / f"only-{channel}"
        _take(work / "corpus", only, names)
        best: dict[str, Any] = {}
        for run in range(RUNS):
            packed = folder / f"packed-{channel}-{run}"
            wall, cpu = time.perf_counter(), time.process_time()
            manifests = pack_corpus(only, work / "tokenizer", packed, options, EngineConfig(workers=1))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if not best or cpu < best["cpu_seconds"]:
                text_mb = sum(manifest["text_bytes"] for manifest in manifests.values()) / 1e6
                encoder = next(iter(manifests.values()))["encoder"]["got"]
                best = {"text_mb": text_mb, "cpu_seconds": cpu, "wall_seconds": wall, "encoder": encoder}
        # The tokenizer is loaded, and its encoder compared with the reference, once, however much text there is.
        best["start_cpu_seconds"] = start = min(_start_seconds(only, work / "tokenizer", names) for _ in range(RUNS))
        best["mb_per_cpu_second_with_start"] = best["text_mb"] / best["cpu_seconds"]
        best["mb_per_cpu_second"] = best["text_mb"] / (best["cpu_seconds"] - start)
        results[channel] = best
        print(
            f"packing {channel}: {best['mb_per_cpu_second']:.1f} MB per CPU second with {best['encoder']}, and "
            f"{start:.2f} CPU seconds to start it"
        )
    return results


def _start_seconds(corpus: Path, tokenizer_folder: Path, names: list[str]) -> float:
    started = time.process_time()
    tokenizer = load_tokenizer(tokenizer_folder)
    sample = [text for name in names for text in first_texts(corpus, name, TITLE_AND_TEXT)]
    open_encoder(tokenizer, EncoderConfig(threads=1), sample, 1 << 40)
    return time.process_time() - started


def _take(corpus: Path, folder: Path, names: list[str]) -> None:
    """A corpus of some sources of another."""
    folder.mkdir()
    report = jsonio.loads((corpus / "report.json").read_bytes())
    report["sources"] = {name: report["sources"][name] for name in names}
    (folder / "report.json").write_bytes(jsonio.dumps_pretty(report))
    for name in names:
        (folder / name).symlink_to(corpus / name)


SCRIPT = """
import sys
from pathlib import Path
from zero2all.common.engine import EngineConfig
from zero2all.packed.writer import PackOptions, pack_corpus
if __name__ == "__main__":
    work, packed = Path(sys.argv[1]), Path(sys.argv[2])
    options = PackOptions(piece_bytes=int(sys.argv[3]), shard_tokens=1 << 20, best_fit=(512,))
    pack_corpus(work / "corpus", work / "tokenizer", packed, options, EngineConfig(workers=int(sys.argv[4])))
"""


def kills(folder: Path, data: Path | None) -> dict[str, Any]:
    """Kill -9 at random moments, then let it finish; compare with what was never disturbed."""
    work = prepare(folder, data)
    corpus_bytes = sum(
        file["bytes"] for manifest in corpus_sources(work / "corpus").values() for file in manifest["files"].values()
    )
    piece_bytes = max(1, corpus_bytes // PIECES_TO_KILL)
    calm, killed = folder / "calm", folder / "killed"
    _run(work, calm, piece_bytes, workers=1).wait()
    rng = random.Random(3)
    done = []
    for number in range(KILLS):
        before = _done(killed)
        process = _run(work, killed, piece_bytes, workers=1 + number % 2)
        while _done(killed) < before + 3 and process.poll() is None and not (killed / "report.json").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "killed before it was through"
        done.append(_done(killed))
    assert _run(work, killed, piece_bytes, workers=2).wait() == 0, "the last run finishes"
    assert _hash(calm) == _hash(killed), "byte for byte the same"
    print(f"kills: {KILLS} times kill -9, pieces done at each: {done}; finished byte-identical")
    return {"kills": KILLS, "pieces_done_at_each_kill": done, "identical": True}


def _run(work: Path, packed: Path, piece_bytes: int, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, str(work), str(packed), str(piece_bytes), str(workers)]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, env=environment)


def _done(packed: Path) -> int:
    """Pieces and shards that stand under their own names."""
    while True:
        try:
            found = [*packed.glob(".build/*/piece-*"), *packed.glob(".build/*/shards/*")]
        except FileNotFoundError:  # a folder that was renamed meanwhile
            continue
        return sum(".partial-" not in path.name for path in found)


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
