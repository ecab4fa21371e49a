"""Held-out records share no text with training records; see `zero2all/corpus/dedup/split.py`."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.corpus.dedup.dedup_helpers import make_units, zh_text
from zero2all.corpus.dedup.index import read_index
from zero2all.corpus.dedup.split import MOST_RECORDS, RESERVE, find_train_only

HALF = 1 << 63


def split_of(texts: list[str], root: Path, drop: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(chosen by the key, held out) for every text, in two units."""
    cut = len(texts) // 3
    folders = make_units(root, [texts[:cut], texts[cut:]])
    keys = np.concatenate([read_index(folder)["key"] for folder in folders])
    train_only = find_train_only(folders, np.array(drop or [0] * len(texts), np.uint8), HALF)
    chosen = keys < np.uint64(HALF)
    return chosen, chosen & ~train_only


def test_a_record_and_one_with_a_part_of_it_are_on_one_side(tmp_path: Path) -> None:
    rng = random.Random(1)
    bases = [zh_text(rng, rng.randint(300, 3000)) for _ in range(150)]
    hosts = []
    for text in bases:
        size = int(len(text) * rng.uniform(0.2, 0.5))
        at = rng.randrange(len(text) - size)
        hosts.append(zh_text(rng, rng.randint(100, 2000)) + text[at : at + size] + zh_text(rng, 50))
    alone = [zh_text(rng, 400) for _ in range(100)]
    chosen, held_out = split_of([*bases, *hosts, *alone], tmp_path)
    assert (held_out[:150] == held_out[150:300]).all(), "no pair is on both sides"
    assert (held_out[:150] == (chosen[:150] & chosen[150:300])).all(), "and one whose ends are both chosen is held out"
    assert (held_out[300:] == chosen[300:]).all(), "a record alone goes by its key"


def test_a_chain_goes_to_train_and_what_is_dropped_or_stands_everywhere_does_not_count(tmp_path: Path) -> None:
    rng = random.Random(2)
    links = [zh_text(rng, 300) for _ in range(41)]
    chain = [one + two for one, two in pairwise(links)]
    chosen, held_out = split_of(chain, tmp_path / "chain")
    assert chosen.any()
    assert not held_out.any()
    chosen, held_out = split_of([links[0], links[0] + links[1]], tmp_path / "dropped", [0, 1])
    assert held_out[0] == chosen[0]
    notice = zh_text(rng, 120)
    common = [notice + text for text in links[: MOST_RECORDS + 1]]
    chosen, held_out = split_of(common, tmp_path / "notice")
    assert chosen.sum() > 1
    assert (held_out == chosen).all()
    assert split_of([], tmp_path / "empty")[1].tolist() == []


def test_where_every_chosen_record_goes_to_train_another_may_be_held_out(tmp_path: Path) -> None:
    rng = random.Random(3)
    texts = [zh_text(rng, 300) for _ in range(RESERVE)]
    (folder,) = make_units(tmp_path, [texts])
    assert not find_train_only([folder], np.zeros(RESERVE, np.uint8), 1).any()
