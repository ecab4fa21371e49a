"""What the raw folder promises: three readable formats, all probes, and whole or not there at all."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from zero2all.common.manifest import read_manifest, verify_files
from zero2all.evals.question_files import read_pairs
from zero2all.quickstart import raw
from zero2all.quickstart.world import documents, pairs, probes, programs

SEED, LANGUAGE_BYTES, CODE_BYTES = 5, 60_000, 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("quickstart") / "raw"
    raw.write_raw(target, SEED, LANGUAGE_BYTES, CODE_BYTES)
    return target


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_english_is_json_lines_chinese_one_indented_array_and_code_parquet_in_small_row_groups(folder: Path) -> None:
    rows = rows_of(folder, raw.ENGLISH_NAME)
    assert all(set(row) == {"id", "title", "text"} for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row["text"] for row in rows] == [one.text for one in documents("en", LANGUAGE_BYTES, SEED)]
    text = (folder / raw.CHINESE_NAME).read_text(encoding="utf-8")
    rows = json.loads(text)
    assert text == json.dumps(rows, ensure_ascii=False, indent=2) + "\n"
    assert all(set(row) == {"qid", "title", "content"} for row in rows)
    assert [row["content"] for row in rows] == [one.text for one in documents("zh", LANGUAGE_BYTES, SEED)]
    file = pq.ParquetFile(folder / raw.CODE_NAME)
    rows = file.read().to_pylist()
    assert file.schema_arrow.names == ["repo_name", "path", "content"]
    assert file.metadata.row_group(0).num_rows <= raw.ROWS_PER_GROUP
    sizes = [len(row["content"].encode()) for row in rows]
    assert sum(sizes) >= CODE_BYTES > sum(sizes) - sizes[-1]
    assert len({row["path"] for row in rows}) == len({row["content"] for row in rows}) == len(rows)
    assert [row["content"] for row in rows] == list(programs(CODE_BYTES, SEED))


def test_the_files_of_questions_hold_every_probe_and_pair_and_the_manifest_counts_what_was_written(folder: Path):
    expected = [asdict(probe) for name in ("en", "zh") for probe in probes(name, SEED)]
    assert rows_of(folder, raw.PROBES_NAME) == json.loads(json.dumps(expected))
    assert read_pairs(folder / raw.PAIRS_NAME) == [pair for name in ("en", "zh") for pair in pairs(name, SEED)]
    manifest = read_manifest(folder, "raw", made_by="z2a quickstart")
    assert verify_files(folder, manifest) == []
    assert manifest["english"]["documents"] == len(rows_of(folder, raw.ENGLISH_NAME))
    assert manifest["chinese"]["documents"] == len(json.loads((folder / raw.CHINESE_NAME).read_bytes()))
    assert manifest["code"]["documents"] == pq.read_metadata(folder / raw.CODE_NAME).num_rows
    assert manifest["probes"]["en"] + manifest["probes"]["zh"] == len(rows_of(folder, raw.PROBES_NAME))


def test_current_folder_is_left_alone_and_other_parameters_rewrite_it(tmp_path: Path) -> None:
    first, english = raw.write_raw(tmp_path / "raw", 1, 5_000, 20_000), tmp_path / "raw" / raw.ENGLISH_NAME
    written_at = english.stat().st_mtime_ns
    assert raw.write_raw(tmp_path / "raw", 1, 5_000, 20_000) == first
    assert english.stat().st_mtime_ns == written_at
    second = raw.write_raw(tmp_path / "raw", 2, 5_000, 20_000)
    assert second["inputs"] != first["inputs"]
    assert second["files"][raw.ENGLISH_NAME]["crc32c"] != first["files"][raw.ENGLISH_NAME]["crc32c"]
