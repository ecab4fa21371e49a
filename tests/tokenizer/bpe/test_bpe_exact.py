"""Cutting, threads, spilling and interruption do not change one merge."""

import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.bpe_reference import ReferenceEncoder, reference_train
from tests.tokenizer.bpe.bpe_texts import TextList, chinese_like, in_parts
from zero2all.tokenizer.bpe import learn as learn_module
from zero2all.tokenizer.bpe import merging
from zero2all.tokenizer.bpe.learn import BpeResources, BpeRules, Memory, learn_bpe
from zero2all.tokenizer.parts import parts_from_texts

TEXTS = chinese_like(seed=3, clauses=9000)


def same(one, other) -> bool:
    return one.pieces == other.pieces and one.merges == other.merges


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trained without any cut, on one thread, with all memory."""
    folder = tmp_path_factory.mktemp("plain")
    return learn_bpe([TextList(TEXTS)], 1500, BpeResources(folder, threads=1), BpeRules(cut=False))


@pytest.mark.slow
def test_uncut_run_equals_the_naive_trainer(learn):
    texts = TEXTS[:60]
    pieces, merges, short = reference_train(texts, 900)
    learned = learn(texts, 900, cut=False)
    assert (learned.pieces, learned.merges, short) == (pieces, merges, 0)


@pytest.mark.parametrize("share", [0.4, 3.0])
def test_cut_equals_uncut(learn, plain, share, monkeypatch):
    monkeypatch.setattr(learn_module, "FIRST_SHARE", share)
    learned = learn(TEXTS, 1500, say=lambda _: None)
    assert learned.threshold > 2, "this text must really be cut"
    assert learned.last_count >= learned.threshold
    assert learned.exact
    assert learned.facts["symbols"] < plain.facts["symbols"]
    assert same(learned, plain)
    assert (len(learned.facts["thresholds_tried"]) > 1) == (share == 3.0)


def test_the_same_for_any_number_of_threads_and_texts_that_come_once(learn, plain, tmp_path):
    for threads in (2, 5):
        assert same(learn(in_parts(TEXTS, 4), 1500, threads=threads), plain)
    parts = parts_from_texts(iter(TEXTS), tmp_path / "spool", part_bytes=50_000)
    assert len(parts) > 3
    assert same(learn(parts, 1500), plain)


def test_the_same_with_spilling_and_a_sketch_of_the_pairs(learn, plain, monkeypatch):
    monkeypatch.setattr(Memory, "for_tables", lambda _: 64 * 2000)
    monkeypatch.setattr(Memory, "for_places", lambda _: 4000)
    monkeypatch.setattr(merging, "SMALLEST_POOL", 100)
    messages: list[str] = []
    learned = learn(in_parts(TEXTS, 8), 1500, threads=2, save_every_seconds=0, say=messages.append)
    assert learned.facts["spills"] > 0
    assert learned.facts["pairs_counted_by_sketch"]
    assert learned.facts["arrangements"] > 1
    assert learned.exact
    assert "still exact" in " ".join(messages)
    assert same(learned, plain)


class Interrupted(TextList):
    """Stops the run when it is read for the `stop_at`-th time."""

    stop_at = 0

    def texts(self):
        if len(self.reads) + 1 == self.stop_at:
            self.stop_at = 0
            raise KeyboardInterrupt
        return super().texts()


@pytest.mark.parametrize("in_pass", [1, 2])
def test_resumed_run_reads_no_finished_part_again_and_is_the_same(learn, plain, in_pass, tmp_path):
    parts = in_parts(TEXTS, 6)
    parts[4] = Interrupted(parts[4].kept, parts[4].name)
    parts[4].stop_at = in_pass
    options = {"scratch": tmp_path / "kept", "save_every_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        learn(parts, 1500, **options)
    assert same(learn(parts, 1500, **options), plain)
    assert [len(part.reads) for part in parts] == [2] * 6


def test_killed_run_goes_on_and_is_the_same(learn, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "for_tables", lambda _: 64 * 2000)

    class Deadly(TextList):
        def texts(self):
            yield from super().texts()
            if len(self.reads) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    parts = in_parts(TEXTS, 6)
    options = {"scratch": tmp_path / "kept", "save_every_seconds": 0, "say": lambda _: None}
    learn(TEXTS[:10], 300)  # the native code is loaded before the fork
    child = os.fork()
    if child == 0:
        try:
            learn([*parts[:4], Deadly(parts[4].kept, parts[4].name), parts[5]], 1500, **options)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    learned = learn(parts, 1500, **options)
    assert [len(part.reads) for part in parts] == [0, 0, 0, 0, 1, 1]
    assert learned.facts["spills"] > 0
    assert same(learned, plain)


def test_state_of_another_text_is_not_used(learn, tmp_path):
    options = {"scratch": tmp_path / "kept", "save_every_seconds": 0}
    learn(in_parts(TEXTS, 2), 700, **options)
    other = chinese_like(seed=4, clauses=1500)
    assert same(learn(in_parts(other, 2), 700, **options), learn(other, 700))


ALPHABETS = st.sampled_from(["ab", "aab ", "天地人", "天地人a ，", "é天\U00020000\U00020001 'sx", "\n 天a"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_small_text_equals_the_naive_trainer(data, tmp_path_factory):
    alphabet = data.draw(ALPHABETS)
    texts = data.draw(st.lists(st.text(alphabet=alphabet, min_size=1, max_size=40), min_size=1, max_size=6))
    wanted = data.draw(st.integers(257, 300))
    limits = {"min_piece_count": data.draw(st.integers(1, 3))}
    limits["max_piece_bytes"] = data.draw(st.sampled_from([None, 2, 3, 6, 8]))
    pieces, merges, short = reference_train(texts, wanted, **limits)
    while short:  # ask for what is possible
        if len(pieces) <= 256:
            return
        pieces, merges, short = reference_train(texts, len(pieces), **limits)
    for cut in (True, False):
        resources = BpeResources(tmp_path_factory.mktemp("small"), threads=1)
        learned = learn_bpe([TextList(texts)], len(pieces), resources, BpeRules(cut=cut, **limits))
        assert (learned.pieces, learned.merges) == (pieces, merges)


def test_long_pieces_without_a_space_are_learned_whole(learn):
    """More than 65,535 symbols in one word: nothing is cut off."""
    line = "天地玄黄" * 30_000 + "a" * 70_001
    learned = learn([line, line], 256 + 40)
    assert len(ReferenceEncoder(learned.merges).encode("天地玄黄" * 64)) < 16
    assert learned.last_count > 0
    assert learned.merges == learn([line, line], 256 + 40, cut=False).merges
