"""A small workspace with three sources in two channels, tokenized and packed once; tests that damage take a copy."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from zero2all.common.files import write_json
from zero2all.common.manifest import write_manifest
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.writer import pack_corpus
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus

VOCAB_SIZE = 400
SOURCES = {"novels": "en", "letters": "en", "zh": "zh"}
"""Name and channel of each source."""


def make_texts(seed: int, documents: int, chinese: bool) -> list[str]:
    rng = random.Random(seed)
    parts = [chr(0x4E00 + n) for n in range(60)] if chinese else ["ka", "lo", "mi", "ter", "vun ", "es ", "or ", "pi, "]
    return ["".join(rng.choices(parts, k=rng.randint(20, 90))) for _ in range(documents)]


def build(work: Workspace, texts: dict[str, list[str]], channels: dict[str, str] | None = None) -> None:
    work.raw.mkdir(exist_ok=True)
    sources = []
    for name, documents in texts.items():
        path = work.raw / f"{name}.jsonl"
        rows = (json.dumps({"text": text}, ensure_ascii=False) for text in documents)
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        sources.append(Source(name, path, (channels or SOURCES)[name]))
    build_corpus(work.corpus, sources, BuildOptions(valid_share=0.1, rules="none"))


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    english = {"novels": make_texts(1, 120, chinese=False), "letters": make_texts(2, 40, chinese=False)}
    return {**english, "zh": make_texts(3, 90, chinese=True)}


@pytest.fixture(scope="session")
def shared_work(texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Read only: see `work` for one that may be changed."""
    work = open_workspace(tmp_path_factory.mktemp("packed") / "work", create=True)
    build(work, texts)
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=VOCAB_SIZE))
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    return work


@pytest.fixture
def work(shared_work: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(shared_work.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


@pytest.fixture
def rebuild() -> Callable[..., None]:
    return build


class Made(NamedTuple):
    """Packed data written by hand: what is in it is known exactly."""

    packed: Path
    tokens: dict[str, np.ndarray]
    """All tokens of each source."""
    starts: dict[str, np.ndarray]
    """Where its documents begin."""
    masks: dict[str, np.ndarray]
    """1 where a token counts in the loss; sources without a mask are left out."""


def write_packed(packed, documents, channels=None, masked=(), documents_per_shard=7, vocab_size=60000, seed=0) -> Made:
    rng = np.random.default_rng(seed)
    made = Made(packed, {}, {}, {})
    for name, lengths in documents.items():
        tokens = rng.integers(1, vocab_size, sum(lengths)).astype("<u2")
        mask = rng.integers(0, 2, len(tokens)).astype(np.uint8) if name in masked else None
        folder = packed / name / "train"
        folder.mkdir(parents=True)
        at = 0
        for shard, first in enumerate(range(0, len(lengths), documents_per_shard)):
            sizes = np.array(lengths[first : first + documents_per_shard])
            end = at + int(sizes.sum())
            (folder / f"tokens-{shard:05d}.bin").write_bytes(tokens[at:end].tobytes())
            (folder / f"docs-{shard:05d}.idx").write_bytes((np.cumsum(sizes) - sizes).astype("<u8").tobytes())
            if mask is not None:
                bits = np.packbits(mask[at:end], bitorder="little")
                (folder / f"mask-{shard:05d}.bin").write_bytes(bits.tobytes())
            at = end
        content = {
            **{"source": name, "split": "train", "channel": (channels or {}).get(name, name), "tokenizer": "by-hand"},
            **{"vocab_size": vocab_size, "dtype": "<u2", "shards": -(-len(lengths) // documents_per_shard)},
            **{"documents": len(lengths), "tokens": len(tokens), "text_bytes": 4 * len(tokens)},
            **{"loss_mask": mask is not None, "max_id": int(tokens.max(initial=0))},
        }
        write_manifest(folder, "packed", "by-hand", content)
        made.tokens[name] = tokens.astype(np.int64)
        made.starts[name] = np.cumsum([0, *lengths[:-1]])
        if mask is not None:
            made.masks[name] = mask
    write_json(packed / "report.json", {"tokenizer": "by-hand", "sources": {name: {} for name in documents}})
    return made


@pytest.fixture(scope="session")
def by_hand() -> Callable[..., Made]:
    return write_packed


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, bytes]]:
    return file_bytes
