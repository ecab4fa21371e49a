"""A small workspace with three sources in two channels, tokenized and packed once; tests that damage take a copy."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
    """Raw files of `texts` and the corpus of them."""
    work.raw.mkdir(exist_ok=True)
    sources = []
    for name, documents in texts.items():
        path = work.raw / f"{name}.jsonl"
        rows = (json.dumps({"text": text}, ensure_ascii=False) for text in documents)
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        sources.append(Source(name, path, (channels or SOURCES)[name]))
    build_corpus(work.corpus, sources, BuildOptions(valid_share=0.1))


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    return {
        "novels": make_texts(1, 120, chinese=False),
        "letters": make_texts(2, 40, chinese=False),
        "zh": make_texts(3, 90, chinese=True),
    }


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
    """Build the corpus of a workspace again, from other texts or with other channels."""
    return build


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder, by name."""
    return file_bytes
