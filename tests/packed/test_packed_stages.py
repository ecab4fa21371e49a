"""The plan of a run: weights that change, lengths that change, limits, and what has been read already."""

import json
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.common.errors import BadInputError, UsageError
from zero2all.packed.config import DataConfig
from zero2all.packed.mixture import RunProgress, open_training_data
from zero2all.packed.stages import PlannedStage, Planner, Stage, epochs_read, expected_repeats, segments_of

T = 8


@pytest.fixture(scope="module")
def made(by_hand, tmp_path_factory):
    lengths = {"a": [20] * 20, "b": [20] * 50, "c": [20] * 9}  # 49, 124 and 22 samples of 8
    return by_hand(tmp_path_factory.mktemp("stages"), lengths, {"a": "en", "b": "en", "c": "zh"})


def open_at(made, stages, token=0, recorded=(), end=None, **fields):
    return open_training_data(made.packed, DataConfig(seq_len=T, **fields), stages, RunProgress(token, recorded), end)


def read_from(data, first, samples):
    """(source, sample) of each position in the token range of the first segment."""
    sources, indices = data.segments[0].order.lookup(np.arange(first, first + samples))
    names = [split.name for split in data.splits]
    return [(names[source], int(index)) for source, index in zip(sources, indices, strict=True)]


MIXTURES = st.sampled_from([{"a": 1.0, "b": 1.0}, {"b": 3.0, "c": 1.0}, {"a": 5.0, "b": 2.0, "c": 1.0}, {"c": 1.0}])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), MIXTURES), min_size=1, max_size=4))
def test_weights_changed_on_resume_let_every_source_continue_where_it_stood(made, legs):
    """Each leg resumes with other weights, from what the one before recorded."""
    recorded, position, read = [], 0, []
    for samples, mixture in legs:
        data = open_at(made, [Stage("main", 0, mixture, T)], position * T, recorded)
        leg = read_from(data, position, samples)
        assert {name for name, _ in leg} <= mixture.keys()
        read += leg
        position += samples
        recorded = data.record["stages"]
        again = open_at(made, [Stage("main", 0, mixture, T)], position * T, recorded)  # an unchanged resume
        assert again.fingerprint == data.fingerprint
        # The new weights hold: both ends of the leg are within one sample of them.
        for name, weight in mixture.items():
            assert abs(sum(source == name for source, _ in leg) - samples * weight / sum(mixture.values())) < 2
    for name, size in {"a": 49, "b": 124, "c": 22}.items():
        mine = [index for source, index in read if source == name]
        for epoch in range(0, len(mine), size):
            visited = mine[epoch : epoch + size]
            assert len(set(visited)) == len(visited)  # nothing twice within an epoch
        one_source = open_at(made, [Stage("main", 0, {name: 1.0}, T)])
        assert mine == [index for _, index in read_from(one_source, 0, len(mine))]  # and nothing skipped


def test_an_unchanged_resume_keeps_the_plan_at_every_position(made):
    stages = [Stage("main", 0, {"a": 1.0, "b": 1.0}, T), Stage("late", 40 * T, {"b": 1.0}, T)]
    whole = open_at(made, stages)
    for position in (0, 1, 17, 39, 40, 41, 90):
        resumed = open_at(made, stages, position * T, whole.record["stages"])
        assert resumed.fingerprint == whole.fingerprint
        assert read_from(resumed, position, 30) == read_from(whole, position, 30)


def test_a_source_the_run_has_read_and_that_is_gone_is_named(made):
    record = [{"name": "main", "from_token": 0, "seq_len": T, "units": {"old": 65536}}]
    with pytest.raises(BadInputError, match="has read the source `old`"):
        open_at(made, [Stage("main", 0, None, T)], 80, record)


def test_a_stage_with_another_length_reads_other_samples_in_an_order_of_its_own(made):
    data = open_at(made, [Stage("main", 0, {"b": 1.0}, T), Stage("long", 30 * T, {"b": 1.0}, 2 * T)])
    assert [segment.seq_len for segment in data.segments] == [T, 2 * T]
    first = data.segments[0].order.lookup(np.arange(60))[1].tolist()
    assert first != data.segments[1].order.lookup(np.arange(60))[1].tolist()
    assert sorted(data.segments[1].order.lookup(np.arange(62))[1]) == list(range(62))  # 999 // 16 samples
    back = open_at(made, [Stage("a", 0, None, T), Stage("b", 160, None, 16), Stage("c", 320, None, T)])
    orders = [segment.order.lookup(np.arange(20))[1].tolist() for segment in back.segments]
    assert orders[0] != orders[2]


def test_expected_repeats_are_what_is_counted(made):
    # 62 of 124 samples of b are read at length 8, then 31 of 62 at length 16: half of half of the text again.
    stages = [Stage("main", 0, {"b": 1.0}, T), Stage("long", 62 * T, {"b": 1.0}, 2 * T)]
    data = open_at(made, stages)
    assert expected_repeats(data.segments, 62 * T + 31 * 2 * T) == pytest.approx(0.5)
    shares = []
    for seed in range(40):
        other = open_at(made, stages, seed=seed)
        seen = {i * T + k for i in other.segments[0].order.lookup(np.arange(62))[1] for k in range(T)}
        later = [i * 2 * T + k for i in other.segments[1].order.lookup(np.arange(31))[1] for k in range(2 * T)]
        shares.append(np.mean([token in seen for token in later]))
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    (note,) = [note for note in data.notes(62 * T + 31 * 2 * T) if "shuffled again" in note]
    assert "from token 496 on, sequences have 16 tokens" in note
    assert "about 50.0%" in note


def test_more_epochs_than_allowed_are_refused_before_anything_is_read(made):
    stages = [Stage("main", 0, {"a": 1.0, "c": 1.0}, T)]
    assert open_at(made, stages, end=200 * T, max_epochs={"c": 5.0}).plan == open_at(made, stages).plan
    with pytest.raises(UsageError, match=r"c: 4\.55 epochs, at most 4 allowed") as caught:
        open_at(made, stages, end=200 * T, max_epochs={"c": 4.0})
    assert "when_used_up" in str(caught.value)
    with pytest.raises(UsageError, match=r"a: 2\.04 epochs, at most 2 allowed"):
        open_at(made, stages, end=200 * T, max_epochs={"en": 2.0})  # a channel
    with pytest.raises(UsageError, match=r"data\.max_epochs names `cc`"):
        open_at(made, stages, end=200 * T, max_epochs={"cc": 2.0})
    stages = [Stage("main", 0, {"a": 1.0}, T)]  # a limit on a source stands before one on its channel
    assert open_at(made, stages, end=98 * T, max_epochs={"a": 2.0, "en": 1.0}).plan
    with pytest.raises(UsageError, match="a: 2"):
        open_at(made, stages, end=98 * T, max_epochs={"a": 1.0, "en": 2.0})
    with pytest.raises(UsageError, match=r"leaves nothing to read from token 88 on \(stage main\)"):
        open_at(made, [Stage("main", 0, {"c": 1.0}, T)], max_epochs={"c": 0.5}, when_used_up="share", end=100 * T)


def test_the_weight_of_a_source_that_is_used_up_is_shared_among_the_others(made):
    stages = [Stage("main", 0, {"a": 2.0, "b": 1.0, "c": 1.0}, T)]
    fields = {"max_epochs": {"c": 0.5, "a": 1.0}, "when_used_up": "share", "end": 170 * T}
    data = open_at(made, stages, **fields)
    assert Counter(name for name, _ in read_from(data, 0, 170)) == {"c": 11, "a": 49, "b": 110}
    assert [stage.name for stage in data.plan] == ["main", "main without c", "main without a, c"]
    assert data.shares["main without c"] == pytest.approx([2 / 3, 1 / 3, 0], abs=1e-4)
    for resume_at in (1, 30, 43, 44, 45, 60, 97, 98, 99, 150):
        resumed = open_at(made, stages, resume_at * T, data.record["stages"], **fields)
        assert resumed.fingerprint == data.fingerprint
        assert read_from(resumed, resume_at, 170 - resume_at) == read_from(data, resume_at, 170 - resume_at)


def test_limits_count_what_earlier_lengths_have_read():
    planner = Planner(["x", "y"], lambda _name, seq_len: 800 // seq_len, 1, {"x": 1.5}, True)
    half = {"x": 32768, "y": 32768}
    asked = [PlannedStage("short", 0, 8, half), PlannedStage("long", 1600, 16, half)]
    plan = planner.plan(asked, [], 0, 10_000)
    epochs = epochs_read(segments_of(plan, ["x", "y"], planner.samples_of, 1), 10_000)
    assert [row[0] for row in epochs] == [Fraction(1), Fraction(1, 2)]


def test_the_table_counts_tokens_share_and_epochs(made):
    data = open_at(made, [Stage("main", 0, {"b": 3.0, "c": 1.0}, T), Stage("late", 124 * T, {"c": 1.0}, T)])
    lines = data.epochs_table(168 * T)
    assert lines[0] == "epochs over the whole run (1,344 tokens)"
    table = ["source channel tokens read share epochs", "b en 1,000 744 55.36% 0.75", "c zh 180 600 44.64% 3.41"]
    assert [" ".join(line.split()) for line in lines[1:]] == table


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


def test_a_channel_shares_its_weight_among_its_sources_by_tokens_also_beside_one_of_them(shared_work):
    data = open_with(shared_work, {"en": 3, "zh": 1})  # weights need not sum to one
    found = shares(data)
    tokens = {split.name: split.tokens for split in data.splits}
    assert found["zh"] == pytest.approx(0.25, abs=1e-4)
    assert found["novels"] / found["letters"] == pytest.approx(tokens["novels"] / tokens["letters"], rel=1e-3)
    assert shares(open_with(shared_work, {"letters": 30, "zh": 10})) == {"letters": 0.75, "zh": 0.25}
    assert shares(open_with(shared_work, {"en": 1, "letters": 1}))["letters"] > 0.5


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
