"""The loader hands out exactly the batches that their tokens name: for any ranks, any readers, from anywhere."""

import dataclasses
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import wait_until
from zero2all.common.errors import BadInputError
from zero2all.packed import loader as loader_module
from zero2all.packed import readers as readers_module
from zero2all.packed.config import DataConfig
from zero2all.packed.loader import BlockLookup, Loader, LoaderOptions, rank_rows, read_batch
from zero2all.packed.mixture import open_training_data
from zero2all.packed.order import Order, OrderedSource
from zero2all.packed.stages import Stage

SEQ_LEN = 32
LONG = 64
SAMPLES = 12
STEP = SAMPLES * SEQ_LEN
CHANGE = 20 * STEP
"""Token at which the mixture and the sequence length change."""


@pytest.fixture(scope="module")
def data(by_hand, tmp_path_factory):
    """Three sources in two channels, one of them with a loss mask; later another mixture, then longer sequences."""
    rng = np.random.default_rng(5)
    lengths = {name: rng.integers(2, 90, 150).tolist() for name in ("novels", "letters", "zh")}
    channels = {"novels": "en", "letters": "en", "zh": "zh"}
    made = by_hand(tmp_path_factory.mktemp("loader"), lengths, channels, masked=["letters"])
    mixture = {"en": 2.0, "zh": 1.0}
    late = Stage("late", 7 * STEP, {"zh": 1.0, "novels": 3.0}, SEQ_LEN)
    stages = [Stage("main", 0, mixture, SEQ_LEN), late, Stage("long", CHANGE, mixture, LONG)]
    return open_training_data(made.packed, DataConfig(seq_len=SEQ_LEN, mixture=mixture), stages)


def loaders_alive() -> int:
    return sum(thread.name.startswith("z2a-loader") for thread in threading.enumerate())


def rows_of(batch):
    """Everything that decides what a trainer computes from the real rows of a batch."""
    own = batch.samples
    weights = np.ones_like(batch.tokens[:, 1:], dtype=np.float32) if batch.weights is None else batch.weights
    return [batch.tokens[:own], weights[:own], batch.channels[:own], batch.sources[:own]]


def joined(batches):
    return [np.concatenate(parts) for parts in zip(*map(rows_of, batches), strict=True)]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("segment", "first_token", "position", "seq_len"),
    [(0, 18 * SEQ_LEN, 18, SEQ_LEN), (1, CHANGE + STEP, SAMPLES // 2, LONG)],  # another length begins another order
)
def test_a_batch_holds_the_tokens_source_and_channel_of_its_positions(data, segment, first_token, position, seq_len):
    batch = read_batch(data, first_token, SAMPLES)
    sources, samples = data.segments[segment].order.lookup(np.arange(position, position + SAMPLES))
    assert batch.tokens.shape == (SAMPLES, seq_len + 1)
    assert batch.tokens.dtype == np.int64
    assert (batch.first_position, batch.first_token) == (position, first_token)
    for row in range(SAMPLES):
        split = data.splits[sources[row]]
        assert batch.tokens[row].tolist() == split.read(samples[row] * seq_len, seq_len + 1).tolist()
        assert data.channels[batch.channels[row]] == split.channel
        assert batch.sources[row] == sources[row]


def test_only_batches_with_masked_sources_carry_weights(data):
    assert read_batch(data, 8 * STEP, SAMPLES).weights is None  # no letters here
    early = read_batch(data, 0, SAMPLES)
    assert early.weights.shape == (SAMPLES, SEQ_LEN)
    assert early.counted == early.weights.sum()
    assert 0 < early.counted < early.weights.size


@pytest.mark.parametrize(("samples", "ranks"), [(12, 1), (12, 2), (12, 3), (12, 8), (7, 3), (7, 8), (3, 8), (1, 2)])
def test_rows_are_dealt_out_once_and_ranks_have_equal_shapes(samples, ranks):
    dealt = [rank_rows(samples, rank, ranks) for rank in range(ranks)]
    assert [row for first, own, _ in dealt for row in range(first, first + own)] == list(range(samples))
    assert len({rows for _, _, rows in dealt}) == 1
    assert all(own <= rows for _, own, rows in dealt)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 26), st.sampled_from([1, 2, 3, 8]), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_global_batches_are_the_same_bits_for_any_ranks_prefetch_and_start(
    data, first_step, ranks, prefetch, readers, steps
):
    per_rank = []
    for rank in range(ranks):
        options = LoaderOptions(rank=rank, ranks=ranks, prefetch_steps=prefetch, readers=readers)
        loader = Loader(data, STEP, first_step * STEP, steps, options)
        per_rank.append(list(loader))
        loader.close()
    for number, together in enumerate(zip(*per_rank, strict=True)):
        token = (first_step + number) * STEP
        assert_equal(joined(together), rows_of(read_batch(data, token, STEP // data.segment_at(token).seq_len)))
        assert len({batch.tokens.shape for batch in together}) == 1
        for batch in together:
            if batch.samples < len(batch.tokens):  # zero-weight rows keep the collectives of short ranks alive
                assert not batch.weights[batch.samples :].any()
                assert batch.counted == batch.weights[: batch.samples].sum()


@settings(max_examples=25, deadline=None)
@given(split=st.integers(1, 23), samples=st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
def test_the_same_samples_come_in_the_same_order_whatever_the_step_and_wherever_it_resumed(data, split, samples):
    before = Loader(data, SEQ_LEN, 0, split)  # one sample a step up to here, then another step size
    after = Loader(data, samples * SEQ_LEN, split * SEQ_LEN, -(-(24 - split) // samples))
    assert_equal([part[:24] for part in joined([*before, *after])], rows_of(read_batch(data, 0, 24)))


def test_pickled_data_is_a_list_of_paths_and_reads_the_same(data):
    frozen = pickle.dumps(data)
    assert len(frozen) < 2_000_000  # cycles, not tokens
    assert_equal(rows_of(read_batch(pickle.loads(frozen), 0, 8)), rows_of(read_batch(data, 0, 8)))


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 400), count=st.integers(1, 150))
def test_blocks_give_what_single_lookups_give(data, position, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "LOOKUP_BLOCK", 64)
        found = BlockLookup()(data.segments[0], position, count)
    assert_equal(found, data.segments[0].order.lookup(np.arange(position, position + count)))


def test_reading_ahead_is_bounded_and_ends_with_close_and_without_steps_left_there_is_no_batch(data, monkeypatch):
    assert list(Loader(data, STEP, 400 * STEP, steps=0)) == []
    assert list(Loader(data, STEP, 400 * STEP, steps=-3)) == []
    before = loaders_alive()
    read = []
    original = loader_module.read_batch
    monkeypatch.setattr(loader_module, "read_batch", lambda *args: read.append(args[1]) or original(*args))
    loader = Loader(data, STEP, 0, steps=10**9, options=LoaderOptions(prefetch_steps=3))
    batches = iter(loader)
    next(batches)
    wait_until(lambda: len(read) >= 4)
    time.sleep(0.05)  # a fifth read would come at once
    assert read == [0, STEP, 2 * STEP, 3 * STEP]
    assert loaders_alive() == before + 1
    loader.close()
    assert loaders_alive() == before
    assert loader.total_wait_seconds >= loader.wait_seconds >= 0


def test_waiting_is_measured(data, monkeypatch):
    clock = itertools.count(100.0)  # a second later at every look
    monkeypatch.setattr(loader_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    loader = Loader(data, STEP, 0, 2)
    next(iter(loader))
    assert loader.wait_seconds == loader.total_wait_seconds == 1.0
    loader.close()


def test_an_error_while_reading_reaches_the_trainer(data):
    # An order that believes in more samples than there are, as after a shard was exchanged under the run.
    beyond = Order([OrderedSource(split.name, 10**9) for split in data.splits], [(0, [1] * len(data.splits))], seed=1)
    segments = [dataclasses.replace(data.segments[0], order=beyond)]
    loader = Loader(dataclasses.replace(data, segments=segments), STEP, 0, steps=10)
    with pytest.raises(IndexError, match="beyond the"):
        next(iter(loader))
    loader.close()
    assert loaders_alive() == 0


def reading_processes(of: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children() if "zero2all.packed.readers" in " ".join(child.cmdline())]


def test_a_reader_that_is_killed_is_replaced_and_no_batch_is_lost_or_changed(data):
    said: list[str] = []
    loader = Loader(data, STEP, 0, 6, LoaderOptions(reader_kind="process", prefetch_steps=1, on_problem=said.append))
    for number, batch in enumerate(loader):
        assert np.array_equal(batch.tokens, read_batch(data, number * STEP, SAMPLES).tokens)
        if number in (1, 3):
            (reader,) = reading_processes(os.getpid())
            reader.kill()
    loader.close()
    assert said == ["a reader process ended (SIGKILL); another one takes over"] * 2
    assert reading_processes(os.getpid()) == []


def test_readers_that_keep_dying_end_the_run_with_the_way_on(data, monkeypatch):
    monkeypatch.setattr(readers_module, "START", "import os; os.kill(os.getpid(), 9)")
    said: list[str] = []
    loader = Loader(data, STEP, 0, 6, LoaderOptions(reader_kind="process", on_problem=said.append))
    with pytest.raises(BadInputError, match=r"4 times in a row .*SIGKILL.*data\.reader_kind to thread"):
        next(iter(loader))
    assert len(said) == readers_module.RETRIES
    loader.close()


def test_an_error_in_a_reader_reaches_the_trainer(by_hand, tmp_path):
    made = by_hand(tmp_path, {"a": [30] * 20})
    data = open_training_data(made.packed, DataConfig(seq_len=SEQ_LEN), [Stage("main", 0, None, SEQ_LEN)])
    for shard in (tmp_path / "a/train").glob("tokens-*.bin"):
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    loader = Loader(data, STEP, 0, 6, LoaderOptions(reader_kind="process"))
    with pytest.raises(BadInputError, match="has the id 65535"):
        next(iter(loader))
    loader.close()


TRAINER = """
import pickle, sys, time
from zero2all.packed.loader import Loader, LoaderOptions
if __name__ == "__main__":
    data = pickle.load(open(sys.argv[1], "rb"))
    options = LoaderOptions(reader_kind="process", readers=2, prefetch_steps=4)
    batches = iter(Loader(data, 64, 0, 10**9, options))
    for _ in range(8):
        next(batches)
    print("reading", flush=True)
    for _ in batches:
        time.sleep(0.002)
"""


def test_readers_of_a_trainer_that_is_killed_end_by_themselves_and_leave_nothing_in_shared_memory(data, tmp_path):
    (tmp_path / "data.pickle").write_bytes(pickle.dumps(data))
    script = tmp_path / "trainer.py"  # a file, for processes that import their parent's main module
    script.write_text(TRAINER)
    trainer = subprocess.Popen([sys.executable, script, tmp_path / "data.pickle"], stdout=subprocess.PIPE)
    assert trainer.stdout.readline() == b"reading\n"
    processes = reading_processes(trainer.pid)
    assert len(processes) == 2
    mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in (trainer.pid, *(each.pid for each in processes))]
    trainer.send_signal(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    trainer.stdout.close()
    wait_until(lambda: not any(each.is_running() for each in processes))
    assert not any("/dev/shm/" in text for text in mapped)
