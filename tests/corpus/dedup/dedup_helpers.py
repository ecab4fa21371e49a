"""Unit folders made in a test, and what a search found in them in comparable form."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zero2all.corpus.dedup.cluster import DedupResult
from zero2all.corpus.dedup.config import DedupConfig, jaccard_estimate
from zero2all.corpus.dedup.index import IndexWriter
from zero2all.corpus.dedup.signatures import Described, describe

HAN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈剑号巨阙珠称夜光"
HAN += "果珍李柰菜重芥姜海咸河淡鳞潜羽翔龙师火帝鸟官人皇始制文字乃服衣裳推位让国"


def zh_text(rng: random.Random, length: int = 400) -> str:
    return "".join(rng.choice(HAN) + ("。" if rng.random() < 0.05 else "") for _ in range(length))


def en_text(rng: random.Random, words: int = 200) -> str:
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(300)]
    return " ".join(rng.choices(vocabulary, k=words))


def changed(text: str, share: float, rng: random.Random) -> str:
    size = int(len(text) * share)
    at = rng.randrange(len(text) - size)
    return text[:at] + zh_text(rng, size)[:size] + text[at + size :]


def text_digest(text: str) -> bytes:
    """Names a text: equal for texts that differ only in white space."""
    return xxhash.xxh3_128_digest(" ".join(text.split()).encode("utf-8", "surrogatepass"))


def digest_bytes(rows: np.ndarray) -> np.ndarray:
    """(n, 16) uint8: the digests of index rows, as `text_digest` gives them."""
    return np.ascontiguousarray(rows["digest"]).view(np.uint8).reshape(len(rows), 16)


def described(digests: np.ndarray, lengths: np.ndarray, signatures: np.ndarray) -> Described:
    keys = np.ascontiguousarray(digests).view(">u8")[:, 0]
    return Described(digests, lengths, signatures, keys, np.zeros(0, np.uint32), np.zeros(len(lengths), np.int64))


def make_units(root: Path, units: Sequence[Sequence[str]], channel: str = "zh", **settings: Any) -> list[Path]:
    folders = []
    for number, texts in enumerate(units):
        folders.append(root / f"unit-{number:03d}")
        folders[-1].mkdir(parents=True)
        config = DedupConfig(**settings)
        with IndexWriter(folders[-1], near=config.signs) as writer:
            writer.add(describe(texts, channel, config), np.arange(len(texts)))
    return folders


def outcome(result: DedupResult) -> tuple[list[list[int]], bytes]:
    units = len(result.first_ids) - 1
    return [result.drops(unit).tolist() for unit in range(units)], (result.work / "clusters.npy").read_bytes()


def dropped(result: DedupResult, reason: int) -> int:
    return sum(int((result.drops(unit) == reason).sum()) for unit in range(len(result.first_ids) - 1))


def clusters(result: DedupResult) -> dict[int, list[tuple[int, int, float]]]:
    """Kept document -> (dropped document, reason, similarity) of each that was dropped for it."""
    found: dict[int, list[tuple[int, int, float]]] = {}
    for kept, member, reason, matches in np.load(result.work / "clusters.npy").tolist():
        found.setdefault(kept, []).append((member, reason, 1.0 if matches == 255 else jaccard_estimate(matches)))
    return found


def random_units(root: Path, documents: int, units: int = 5, copies: float = 0.3, seed: int = 0) -> list[Path]:
    """Units of random signatures, of which a share are near or exact copies of earlier ones; nothing held in memory."""
    folders = []
    rng = np.random.default_rng(seed)
    earlier = rng.integers(1, 256, (1000, 256), dtype=np.uint8)
    for number in range(units):
        folders.append(root / f"unit-{number:03d}")
        folders[-1].mkdir(parents=True)
        with IndexWriter(folders[-1], near=True) as writer:
            for start in range(0, documents // units, 10_000):
                count = min(10_000, documents // units - start)
                signatures = rng.integers(1, 256, (count, 256), dtype=np.uint8)
                digests = rng.integers(0, 256, (count, 16), dtype=np.uint8)
                copied = int(count * copies)
                source = earlier[rng.integers(0, len(earlier), copied)]
                signatures[:copied] = np.where(rng.random((copied, 256)) < 0.12, signatures[:copied], source)
                digests[-count // 20 :] = digests[0]
                lengths = rng.integers(100, 200, count).astype(np.uint32)
                writer.add(described(digests, lengths, signatures), np.arange(start, start + count))
                earlier = signatures[::7].copy()
    return folders


class InOrder:
    def __init__(self, order: Callable[[list[int]], list[int]] = lambda positions: positions) -> None:
        self.order = order
        self.tasks = 0

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for position in self.order(list(range(len(tasks)))):
            self.tasks += 1
            yield position, function(tasks[position])
