"""From the weights a person writes to the sources of a run."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.packed.config import DataConfig
from zero2all.packed.mixture import open_training_data
from zero2all.packed.stages import Stage


def open_with(work, mixture, seq_len=32, later=()):
    stages = [Stage("main", 0, mixture, seq_len), *later]
    return open_training_data(work.packed, DataConfig(seq_len=seq_len, mixture=mixture), stages)


def shares(data):
    return dict(zip([split.name for split in data.splits], data.shares["main"], strict=True))


def test_without_a_mixture_sources_weigh_what_they_hold(shared_work):
    data = open_with(shared_work, None)
    tokens = {split.name: split.tokens for split in data.splits}
    assert sorted(tokens) == ["letters", "novels", "zh"]
    for name, share in shares(data).items():
        assert share == pytest.approx(tokens[name] / sum(tokens.values()), abs=1 / 65536)
    assert data.channels == ["en", "zh"]


def test_a_channel_shares_its_weight_among_its_sources_by_tokens(shared_work):
    data = open_with(shared_work, {"en": 3, "zh": 1})
    found = shares(data)
    tokens = {split.name: split.tokens for split in data.splits}
    assert found["zh"] == pytest.approx(0.25, abs=1e-4)
    assert found["novels"] / found["letters"] == pytest.approx(tokens["novels"] / tokens["letters"], rel=1e-3)


def test_a_source_can_be_named_beside_its_channel_and_weights_need_not_sum_to_one(shared_work):
    assert shares(open_with(shared_work, {"letters": 30, "zh": 10})) == {"letters": 0.75, "zh": 0.25}
    both = shares(open_with(shared_work, {"en": 1, "letters": 1}))
    assert both["letters"] > 0.5


def test_a_source_of_weight_zero_is_not_read_and_an_unknown_name_refused_with_the_nearest_one(shared_work):
    data = open_with(shared_work, {"zh": 1, "novels": 0})
    assert [split.name for split in data.splits] == ["zh"]
    assert data.channels == ["zh"]
    with pytest.raises(UsageError, match=r"`novel`.*neither a packed source nor a channel.*`novels`"):
        open_with(shared_work, {"novel": 1})


def test_a_source_shorter_than_one_sample_is_named(shared_work):
    tokens = open_with(shared_work, {"letters": 1}).splits[0].tokens
    assert open_with(shared_work, {"letters": 1}, seq_len=tokens - 1).segments[0].order.sources[0].samples == 1
    with pytest.raises(BadInputError, match=f"`letters` has {tokens} tokens, fewer than one sample") as refused:
        open_with(shared_work, {"letters": 1, "novels": 1}, seq_len=tokens)
    name, weight = re.search(r"leave it out: --data\.mixture\.(\w+) (\d+)$", str(refused.value)).groups()
    data = open_with(shared_work, {name: int(weight)}, seq_len=tokens)
    assert [split.name for split in data.splits] == ["novels"]


def empty_out(work, source):
    """What packing writes for a source whose texts all went to the held-out part."""
    path = work.packed / source / "train/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shards": 0, "documents": 0, "tokens": 0}))


def test_a_source_that_was_given_weight_but_is_empty_is_named_and_data_without_any_training_text_refused(work):
    empty_out(work, "letters")
    for mixture in ({"letters": 0.5, "zh": 0.5}, {"letters": 1}):
        with pytest.raises(BadInputError, match="`letters` has 0 tokens"):
            open_with(work, mixture)
    assert [split.name for split in open_with(work, None).splits] == ["novels", "zh"]
    for source in ("novels", "zh"):
        empty_out(work, source)
    with pytest.raises(BadInputError, match="has no text for training"):
        open_with(work, None)


def test_fingerprint_changes_with_data_seed_weights_and_stages_only(by_hand, tmp_path):
    def print_of(mixture=None, seed=1, later=(), of="first"):
        config = DataConfig(seq_len=32, mixture=mixture, seed=seed)
        return open_training_data(tmp_path / of, config, [Stage("main", 0, mixture, 32), *later]).fingerprint

    for number, name in enumerate(("first", "again", "another")):
        by_hand(tmp_path / name, {"en": [90] * 9, "zh": [90] * 9}, seed=number // 2)
    first = print_of()
    assert print_of(of="again") == first
    late = [Stage("late", 8 * 32, {"zh": 1}, 32)]
    others = {print_of(seed=2), print_of({"en": 1, "zh": 2}), print_of(later=late), print_of(of="another")}
    assert first not in others
    assert len(others) == 4


def test_a_source_that_only_a_later_stage_uses_is_opened_and_starts_there(shared_work):
    data = open_with(shared_work, {"novels": 1}, later=[Stage("late", 40 * 32, {"zh": 1, "novels": 1}, 32)])
    names = np.array([split.name for split in data.splits])
    sources, _ = data.segments[0].order.lookup(np.arange(80))
    assert set(names[sources[:40]]) == {"novels"}
    assert (names[sources[40:]] == "zh").sum() == 20
    assert data.shares == {"main": [1.0, 0.0], "late": [0.5, 0.5]}
