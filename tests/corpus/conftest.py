"""Small real inputs for the corpus tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.corpus_helpers import HERE, both, plain_options
from zero2all.corpus import Source, build_corpus

WriteLines = Callable[..., Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., dict[str, Any]]:

    def run(path: Path, name: str = "one", mapping: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        source = Source(name, path, mapping=mapping)
        return build_corpus(tmp_path / "corpus", [source], plain_options(**options), HERE)["sources"][name]

    return run


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., list[Any]]:

    def read(name: str = "one") -> list[Any]:
        return sorted(both(tmp_path / "corpus", name), key=lambda record: record["gid"])

    return read


@pytest.fixture
def quarantined(tmp_path: Path) -> Callable[..., list[Any]]:

    def read(name: str = "one") -> list[Any]:
        return [json.loads(line) for line in (tmp_path / "corpus/quarantine" / f"{name}.jsonl").open(encoding="utf-8")]

    return read
