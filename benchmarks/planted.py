"""The planted test of near dedup: real documents, copies of them with known edits, and the exact similarity of each.

A copy differs from its base by 5 to 20 % of its units (characters for zh, words for en, lines for code), which are
inserted, deleted or replaced: in one to eight blocks, or scattered. Scattered edits break many shingles (5 % of the
characters changed one by one leave a 5-gram Jaccard of about 0.63, in 2-grams 0.85), so both kinds are needed to cover
0.4 to 0.95. The similarity is the exact Jaccard index over the very shingles the stage uses (`benchmarks/shingles.py`).

    recall           copies with Jaccard >= 0.8 (zh 0.86) to their base of which not both are kept / all such copies
    false positives  dropped records whose exact Jaccard with the record kept for them is below 0.6 / all records, and
                     the bases dropped for a record of another family at less than 0.6 are named apart
"""

from __future__ import annotations

import gzip
import json
import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.shingles import jaccard, shingle_set
from zero2all.corpus.dedup.cluster import find_duplicates
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import IndexWriter
from zero2all.corpus.dedup.signatures import describe

LEAST_EDITS, MOST_EDITS = 0.05, 0.20
UNRELATED_BELOW = 0.6


class Planted(NamedTuple):
    """Documents and where they come from."""

    texts: list[str]
    family: list[int]
    """The base document each is, or is a copy of."""
    is_base: list[bool]


@dataclass(frozen=True)
class Quality:
    """How well the planted copies were found."""

    channel: str
    records: int
    similar_copies: int
    """Copies with an exact Jaccard of at least 0.8 to their base."""
    found: int
    """Of those, the ones of which not both copy and base were kept."""
    borderline_copies: int
    """Copies with an exact Jaccard of 0.8 to 0.82."""
    borderline_found: int
    dropped: int
    wrong: int
    """Dropped though the exact Jaccard with the record kept for it is below 0.6."""
    wrong_family: int
    """Of those, the ones kept for a record of another family."""
    least_jaccard: float
    """The least exact Jaccard of a dropped record with the one kept for it."""

    @property
    def recall(self) -> float:
        """Share of the similar copies that were found."""
        return self.found / self.similar_copies if self.similar_copies else 1.0

    @property
    def false_positive_share(self) -> float:
        """Share of all records wrongly dropped."""
        return self.wrong / self.records


def plant(bases: Sequence[str], channel: str, copies: int = 2, seed: int = 1) -> Planted:
    """The bases and `copies` edited copies of each, shuffled."""
    rng = random.Random(seed)
    documents = [(text, family, True) for family, text in enumerate(bases)]
    for family, text in enumerate(bases):
        for _ in range(copies):
            share = rng.uniform(LEAST_EDITS, MOST_EDITS)
            documents.append((edit(text, channel, share, rng, bases), family, False))
    rng.shuffle(documents)
    return Planted([d[0] for d in documents], [d[1] for d in documents], [d[2] for d in documents])


def edit(text: str, channel: str, share: float, rng: random.Random, others: Sequence[str]) -> str:
    """`text` with `share` of its units inserted, deleted or replaced; new units come from other documents."""
    cut, join = _units(channel)
    units = cut(text)
    donor = cut(rng.choice(others)) or units
    changes = max(1, round(len(units) * share))
    blocks = changes if rng.random() < 0.25 else min(changes, rng.randint(1, 8))
    for block in range(blocks):
        size = changes // blocks + (block < changes % blocks)
        at = rng.randrange(max(1, len(units) - size))
        start = rng.randrange(max(1, len(donor) - size))
        new = donor[start : start + size]
        kind = rng.choice(("insert", "delete", "replace"))
        if kind == "insert":
            units[at:at] = new
        elif kind == "delete" and len(units) > 2 * size:
            del units[at : at + size]
        else:
            units[at : at + size] = new
    return join(units)


def _units(channel: str) -> tuple[Callable[[str], list[str]], Callable[[list[str]], str]]:
    if channel == "zh":
        return list, "".join
    separator = "\n" if channel == "code" else " "
    return (lambda text: text.split(separator)), separator.join


def measure(planted: Planted, channel: str, work: Path, config: DedupConfig | None = None) -> Quality:
    """Run the stage over the planted documents and compare with exact similarities."""
    config = config or DedupConfig()
    half = len(planted.texts) // 2
    units = []
    for number, texts in enumerate((planted.texts[:half], planted.texts[half:])):
        units.append(work / f"unit-{number}")
        units[-1].mkdir(parents=True)
        with IndexWriter(units[-1], near=config.signs) as writer:
            writer.add(describe(texts, channel, config), np.arange(len(texts)))
    at_least = config.character_jaccard if channel == "zh" else config.jaccard
    result = find_duplicates(units, work / "dedup", config, channels=[channel] * 2)
    dropped = np.concatenate([result.drops(number) for number in range(2)])

    @lru_cache(maxsize=256)  # a set of 5-grams takes some hundred times the memory of its text
    def shingles(at: int) -> set[tuple[str, ...]]:
        return shingle_set(planted.texts[at], channel, config)

    base_at = {family: at for at, family in enumerate(planted.family) if planted.is_base[at]}
    pairs = np.load(result.work / "clusters.npy")
    kept_for = dict(zip(pairs["member"].tolist(), pairs["kept"].tolist(), strict=True))
    counts = dict.fromkeys(("similar", "found", "borderline", "borderline_found", "wrong", "wrong_family"), 0)
    for at in sorted(range(len(planted.texts)), key=lambda at: planted.family[at]):
        family = planted.family[at]
        if planted.is_base[at]:
            continue
        similarity = jaccard(shingles(at), shingles(base_at[family]))
        if similarity >= at_least:
            found = bool(dropped[at] or dropped[base_at[family]])
            counts["similar"] += 1
            counts["found"] += found
            counts["borderline"] += similarity < at_least + 0.02
            counts["borderline_found"] += found and similarity < at_least + 0.02
    least = 1.0
    for at, kept in kept_for.items():
        similarity = jaccard(shingles(at), shingles(kept))
        least = min(least, similarity)
        if similarity < UNRELATED_BELOW:
            counts["wrong"] += 1
            counts["wrong_family"] += planted.family[at] != planted.family[kept]
    return Quality(
        channel,
        len(planted.texts),
        counts["similar"],
        counts["found"],
        counts["borderline"],
        counts["borderline_found"],
        len(kept_for),
        counts["wrong"],
        counts["wrong_family"],
        round(least, 3),
    )


def shared_bases(channel: str, folder: Path, most: int) -> list[str]:
    """Real documents: zh prose, en documentation, the Python standard library; 600 to 6,000 characters of each."""
    if channel == "zh":
        with gzip.open(folder / "zh-modern.jsonl.gz", "rt", encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
    elif channel == "en":
        import pyarrow.parquet as parquet

        texts = parquet.read_table(folder / "en-docs.parquet")["text"].to_pylist()
    else:
        texts = stdlib_sources()
    return cut_documents(texts, channel, most)


def stdlib_sources() -> list[str]:
    """The Python files of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in files]


def cut_documents(texts: Sequence[str], channel: str, most: int, seed: int = 7) -> list[str]:
    """Pieces of 600 to 6,000 characters, not more than three of a text."""
    rng = random.Random(seed)
    found: list[str] = []
    for text in rng.sample(texts, len(texts)):
        if len(found) >= most:
            break
        at = 0
        for _ in range(3):
            size = rng.randint(600, 6000)
            piece = text[at : at + size]
            at += size
            if len(piece) >= 600 and len(shingle_set(piece, channel)) >= 100:
                found.append(piece)
    return found[:most]
