"""The check of the shards beside a run: it finds what is damaged, reads slowly, and ends with the run."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from zero2all.packed import verify
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.shard_format import open_split
from zero2all.packed.verify import checking_shards

LONG_SECONDS = 300.0


@pytest.fixture
def made(by_hand, tmp_path):
    made = by_hand(tmp_path, {"a": [40] * 30, "talk": [40] * 30}, masked=["talk"])
    for name in ("a", "talk"):
        build_best_fit(open_split(made.packed, name, "train"), 16)
    return made


def splits_of(made):
    return [open_split(made.packed, name, "train") for name in ("a", "talk")]


def flip(path):
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def wait_for(condition) -> None:
    deadline = time.monotonic() + LONG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def reading_processes() -> list[psutil.Process]:
    """Those of the check; other tests have children of this process too."""
    return [child for child in psutil.Process().children() if "zero2all.packed.readers" in " ".join(child.cmdline())]


def no_problem(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize(
    "file", ["a/train/tokens-00002.bin", "talk/train/mask-00000.bin", "a/train/best-fit-16/rows.u64", None]
)
def test_a_flipped_byte_of_any_file_that_is_read_is_found_and_named(made, file):
    if file is not None:
        flip(made.packed / file)
    with checking_shards(splits_of(made), [16], no_problem) as check:
        wait_for(lambda: check.finished or check.damage is not None)
        wanted = None if file is None else f"{made.packed / file} has changed since it was written (crc32c differs)"
        assert check.damage == wanted


def test_ranks_share_the_files(made):
    flip(made.packed / "a/train/tokens-00001.bin")
    found = []
    for rank in range(3):
        with checking_shards(splits_of(made), [], no_problem, rank, 3) as check:
            wait_for(lambda check=check: check.finished or check.damage is not None)
            found.append(check.damage)
    assert [damage is None for damage in found].count(False) == 1


def test_a_file_that_vanishes_is_damage(made):
    splits = splits_of(made)
    (made.packed / "a/train/docs-00000.idx").unlink()
    with checking_shards(splits, [], no_problem) as check:
        wait_for(lambda: check.damage is not None)
        assert "docs-00000.idx cannot be read (No such file or directory)" in check.damage


def test_much_data_is_checked_in_a_process_of_low_priority_that_ends_with_the_block(made, monkeypatch):
    monkeypatch.setattr(verify, "IN_THREAD_BYTES", 0)
    flip(made.packed / "talk/train/tokens-00002.bin")
    with checking_shards(splits_of(made), [], no_problem) as check:
        wait_for(lambda: reading_processes() != [])
        (process,) = reading_processes()
        wait_for(lambda: check.damage is not None)
        assert process.nice() == 19 or os.nice(0) == 19
    assert "talk/train/tokens-00002.bin" in check.damage
    assert not process.is_running()


def test_reading_is_slow_and_stops_at_once_with_the_run(made, monkeypatch):
    monkeypatch.setattr(verify, "CHUNK_BYTES", 64)
    monkeypatch.setattr(verify, "BYTES_PER_SECOND", 320)  # 5 chunks a second: minutes for these files
    with checking_shards(splits_of(made), [], no_problem) as check:
        time.sleep(0.1)
    assert not check.finished
    assert check.damage is None
