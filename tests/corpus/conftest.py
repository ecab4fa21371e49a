"""Small real inputs for the corpus tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from zero2all.common.records import iter_records
from zero2all.corpus import Source, build_corpus

WriteLines = Callable[..., Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """Write rows as JSON lines; a row given as bytes is written as it is."""

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Build one source into tmp_path/corpus and return its part of the report."""

    def run(path: Path, name: str = "one", mapping: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        source = Source(name, path, mapping=mapping)
        return build_corpus(tmp_path / "corpus", [source], plain_options(**options), HERE)["sources"][name]

    return run


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., list[Any]]:
    """All kept records of a source, train and valid, in gid order."""

    def read(name: str = "one") -> list[Any]:
        folder = tmp_path / "corpus" / name
        records = [
            *iter_records(folder.parent, folder.name, "train"),
            *iter_records(folder.parent, folder.name, "valid"),
        ]
        return sorted(records, key=lambda record: record["gid"])

    return read


@pytest.fixture
def quarantined(tmp_path: Path) -> Callable[..., list[Any]]:
    """What stands in the quarantine of a source."""

    def read(name: str = "one") -> list[Any]:
        return [json.loads(line) for line in (tmp_path / "corpus/quarantine" / f"{name}.jsonl").open(encoding="utf-8")]

    return read
