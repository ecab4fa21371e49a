"""What the raw folder promises: three readable formats, all probes, and whole or not there at all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from zero2all.common.files import crc32c_of
from zero2all.common.manifest import is_current, read_manifest, verify_files
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
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_english_is_json_lines(folder: Path) -> None:
    rows = rows_of(folder, raw.ENGLISH_NAME)
    assert all(set(row) == {"id", "title", "text"} for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row["text"] for row in rows] == [one.text for one in documents("en", LANGUAGE_BYTES, SEED)]


def test_chinese_is_one_indented_array(folder: Path) -> None:
    text = (folder / raw.CHINESE_NAME).read_text(encoding="utf-8")
    rows = json.loads(text)
    assert text == json.dumps(rows, ensure_ascii=False, indent=2) + "\n"
    assert all(set(row) == {"qid", "title", "content"} for row in rows)
    assert [row["content"] for row in rows] == [one.text for one in documents("zh", LANGUAGE_BYTES, SEED)]


def test_code_is_parquet_in_small_row_groups(folder: Path) -> None:
    file = pq.ParquetFile(folder / raw.CODE_NAME)
    rows = file.read().to_pylist()
    assert file.schema_arrow.names == ["repo_name", "path", "content"]
    assert file.metadata.row_group(0).num_rows <= raw.ROWS_PER_GROUP
    sizes = [len(row["content"].encode()) for row in rows]
    assert sum(sizes) >= CODE_BYTES > sum(sizes) - sizes[-1]
    assert len({row["path"] for row in rows}) == len({row["content"] for row in rows}) == len(rows)
    assert [row["content"] for row in rows] == list(programs(CODE_BYTES, SEED))


def test_probes_file_holds_every_probe(folder: Path) -> None:
    expected = [asdict(probe) for name in ("en", "zh") for probe in probes(name, SEED)]
    assert rows_of(folder, raw.PROBES_NAME) == json.loads(json.dumps(expected))


def test_pairs_file_holds_every_pair(folder: Path) -> None:
    expected = [pair for name in ("en", "zh") for pair in pairs(name, SEED)]
    assert read_pairs(folder / raw.PAIRS_NAME) == expected


def test_manifest_counts_what_was_written(folder: Path) -> None:
    manifest = read_manifest(folder, "raw", made_by="z2a quickstart")
    assert verify_files(folder, manifest) == []
    assert manifest["english"]["documents"] == len(rows_of(folder, raw.ENGLISH_NAME))
    assert manifest["chinese"]["documents"] == len(json.loads((folder / raw.CHINESE_NAME).read_bytes()))
    assert manifest["code"]["documents"] == pq.read_metadata(folder / raw.CODE_NAME).num_rows
    assert manifest["probes"]["en"] + manifest["probes"]["zh"] == len(rows_of(folder, raw.PROBES_NAME))


def test_current_folder_is_left_alone_and_other_parameters_rewrite_it(tmp_path: Path) -> None:
    target = tmp_path / "raw"
    first = raw.write_raw(target, 1, 5_000, 20_000)
    written_at = (target / raw.ENGLISH_NAME).stat().st_mtime_ns
    assert raw.write_raw(target, 1, 5_000, 20_000) == first
    assert (target / raw.ENGLISH_NAME).stat().st_mtime_ns == written_at
    second = raw.write_raw(target, 2, 5_000, 20_000)
    assert second["inputs"] != first["inputs"]
    assert second["files"][raw.ENGLISH_NAME]["crc32c"] != first["files"][raw.ENGLISH_NAME]["crc32c"]


def test_same_parameters_give_the_same_files(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "raw"
    raw.write_raw(again, SEED, LANGUAGE_BYTES, CODE_BYTES)
    for name in (raw.ENGLISH_NAME, raw.CHINESE_NAME, raw.CODE_NAME, raw.PROBES_NAME, raw.PAIRS_NAME):
        assert crc32c_of(again / name) == crc32c_of(folder / name)


def test_killed_writing_leaves_no_folder_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "raw"
    program = (
        "import sys; from pathlib import Path; from zero2all.quickstart.raw import write_raw;"
        "write_raw(Path(sys.argv[1]), 1, 200_000_000, 1_000)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(target)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(f"raw.partial-*/{raw.ENGLISH_NAME}")) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()), "the process was killed before it had begun to write"
    assert not target.exists()
    manifest = raw.write_raw(target, 1, 5_000, 20_000)
    assert is_current(target, "raw", manifest["inputs"])
    assert list(tmp_path.iterdir()) == [target]


def test_failed_writing_keeps_the_older_folder(tmp_path: Path) -> None:
    target = tmp_path / "raw"
    first = raw.write_raw(target, 1, 5_000, 20_000)
    with pytest.raises(TypeError):
        raw.write_raw(target, 1, 5_000, "twenty thousand")  # type: ignore[arg-type]
    assert is_current(target, "raw", first["inputs"])
    assert list(tmp_path.iterdir()) == [target]
