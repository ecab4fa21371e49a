"""Held-out records share no text with training records; see `zero2all/corpus/dedup/split.py`."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.corpus.dedup.dedup_helpers import make_units, zh_text
from zero2all.corpus.dedup.index import read_index
from zero2all.corpus.dedup.split import HELD_OUT, HELD_OUT_SHARED, MOST_RECORDS, split_records

SHARE = 0.3


def split_of(texts: list[str], root: Path, drop: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(chosen by the key, verdict) for every text, in two units of a source."""
    cut = len(texts) // 3
    folders = make_units(root, [texts[:cut], texts[cut:]])
    keys = np.concatenate([read_index(folder)["key"] for folder in folders])
    below = int(SHARE * 2**64)
    verdict = split_records(folders, ["a", "a"], np.array(drop or [0] * len(texts), np.uint8), below, True)
    return keys < np.uint64(below), verdict


def test_a_record_and_one_with_a_part_of_it_are_on_one_side(tmp_path: Path) -> None:
    rng = random.Random(1)
    bases = [zh_text(rng, rng.randint(300, 3000)) for _ in range(150)]
    hosts = []
    for text in bases:
        size = int(len(text) * rng.uniform(0.2, 0.5))
        at = rng.randrange(len(text) - size)
        hosts.append(zh_text(rng, rng.randint(100, 2000)) + text[at : at + size] + zh_text(rng, 50))
    alone = [zh_text(rng, 400) for _ in range(100)]
    chosen, verdict = split_of([*bases, *hosts, *alone], tmp_path)
    assert set(verdict.tolist()) == {0, HELD_OUT}
    assert (verdict[:150] == verdict[150:300]).all(), "no pair is on both sides"
    assert 0.2 < (verdict[:150] > 0).mean() < 0.4, "pairs are held out as often as records alone"
    assert ((verdict[300:] > 0) == chosen[300:]).all(), "a record alone goes by its key"


def test_what_is_dropped_does_not_count_and_too_large_clusters_are_for_training(tmp_path: Path) -> None:
    rng = random.Random(2)
    links = [zh_text(rng, 300) for _ in range(81)]
    chain = [one + two for one, two in pairwise(links)]
    alone = [zh_text(rng, 300) for _ in range(80)]
    chosen, verdict = split_of([*chain, *alone], tmp_path / "chain")
    assert not verdict[:80].any()
    assert ((verdict[80:] > 0) == chosen[80:]).all()
    chosen, verdict = split_of([*alone, alone[0] + links[0]], tmp_path / "dropped", [0] * 80 + [1])
    assert ((verdict[:80] > 0) == chosen[:80]).all()


def test_where_all_share_text_the_keys_choose_and_what_is_shared_is_counted(tmp_path: Path) -> None:
    rng = random.Random(3)
    notice = zh_text(rng, 400)
    common = [notice + zh_text(rng, 300) for _ in range(MOST_RECORDS + 10)]
    chosen, verdict = split_of(common, tmp_path / "notice")
    assert (verdict == np.where(chosen, HELD_OUT_SHARED, 0)).all()
    _, verdict = split_of(common[:19], tmp_path / "few")
    assert not verdict.any(), "a source of less than 20 records"
    assert split_of([], tmp_path / "empty")[1].tolist() == []
