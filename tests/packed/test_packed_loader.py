"""The loader hands out exactly the batches that their positions name, and gets out of the way."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from zero2all.packed.config import DataConfig
from zero2all.packed.loader import PREFETCH_STEPS, Loader, read_batch
from zero2all.packed.mixture import Stage, open_training_data
from zero2all.packed.order import Order, Source

SEQ_LEN = 32
SAMPLES = 4


@pytest.fixture(scope="module")
def data(shared_work):
    mixture = {"en": 2, "zh": 1}
    stages = [Stage("main", 0, mixture), Stage("late", 20, {"zh": 1})]
    return open_training_data(shared_work.packed, DataConfig(seq_len=SEQ_LEN, mixture=mixture), stages)


def loaders_alive() -> int:
    return sum(thread.name == "z2a-loader" for thread in threading.enumerate())


def test_a_batch_holds_the_tokens_source_and_channel_of_its_positions(data):
    batch = read_batch(data, SEQ_LEN, 18, SAMPLES)
    sources, samples = data.order.lookup(np.arange(18, 18 + SAMPLES))
    assert batch.tokens.shape == (SAMPLES, SEQ_LEN + 1)
    assert batch.tokens.dtype == np.int64
    assert batch.first_position == 18
    for row in range(SAMPLES):
        split = data.splits[sources[row]]
        assert batch.tokens[row].tolist() == split.read(samples[row] * SEQ_LEN, SEQ_LEN + 1).tolist()
        assert data.channels[batch.channels[row]] == split.channel
        assert batch.sources[row] == sources[row]


@pytest.mark.parametrize("first_position", [0, 1, 4, 37, 10_000])
def test_batches_equal_read_batch_from_any_position(data, first_position):
    loader = Loader(data, SEQ_LEN, SAMPLES, first_position, steps=5)
    batches = list(loader)
    loader.close()
    assert len(batches) == 5
    for step, batch in enumerate(batches):
        wanted = read_batch(data, SEQ_LEN, first_position + step * SAMPLES, SAMPLES)
        assert batch.first_position == wanted.first_position
        assert (batch.tokens == wanted.tokens).all()
        assert (batch.channels == wanted.channels).all()
    assert loader.wait_seconds >= 0


def test_the_same_samples_come_in_the_same_order_whatever_the_batch(data):
    whole = read_batch(data, SEQ_LEN, 0, 24).tokens
    for samples in (1, 2, 3, 8):
        pieces = [batch.tokens for batch in Loader(data, SEQ_LEN, samples, 0, steps=24 // samples)]
        assert (np.concatenate(pieces) == whole).all()


def test_a_run_without_steps_left_gives_no_batch(data):
    assert list(Loader(data, SEQ_LEN, SAMPLES, 400, steps=0)) == []
    assert list(Loader(data, SEQ_LEN, SAMPLES, 400, steps=-3)) == []


def test_reading_ahead_is_bounded_and_ends_with_close(data):
    before = loaders_alive()
    loader = Loader(data, SEQ_LEN, SAMPLES, 0, steps=10**9)
    batches = iter(loader)
    next(batches)
    time.sleep(0.05)
    assert loader._ready.qsize() <= PREFETCH_STEPS
    assert loaders_alive() == before + 1
    loader.close()
    assert loaders_alive() == before


def test_an_error_while_reading_reaches_the_trainer(data):
    # An order that believes in more samples than there are, as after a shard was exchanged under the run.
    beyond = Order([Source(split.name, 10**9) for split in data.splits], [(0, [1] * len(data.splits))], seed=1)
    loader = Loader(dataclasses.replace(data, order=beyond), SEQ_LEN, SAMPLES, 0, steps=10)
    with pytest.raises(IndexError, match="beyond the"):
        next(iter(loader))
    loader.close()
    assert loaders_alive() == 0
