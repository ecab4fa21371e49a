"""Which sample stands where: a permutation within each source, an even interleave between them."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero2all.packed.order import MixtureCycle, Order, OrderedSource, permutation_key, permuted, rounded_weights

KEYS = st.integers(0, 2**64 - 1)


def whole(size: int, key: int) -> np.ndarray:
    return permuted(np.arange(size), size, key)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 3000), key=KEYS)
@example(size=1, key=0)
@example(size=2, key=0)
@example(size=1024, key=5)
@example(size=1025, key=5)
@example(size=(1 << 18) + 1, key=7)
def test_permutation_meets_every_index_exactly_once(size, key):
    assert (np.bincount(whole(size, key), minlength=size) == np.ones(size)).all()


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 10**15), key=KEYS, seed=st.integers(0, 1000))
def test_one_index_alone_has_the_image_it_has_among_others(size, key, seed):
    some = np.random.default_rng(seed).integers(0, size, 20)
    together = permuted(some, size, key)
    assert ((together >= 0) & (together < size)).all()
    assert [int(permuted(some[n : n + 1], size, key)[0]) for n in range(20)] == together.tolist()


def test_other_keys_give_other_orders():
    assert len({tuple(whole(50, key)) for key in range(200)}) == 200
    keys = {permutation_key(seed, name, epoch) for seed in (1, 2) for name in ("a", "b") for epoch in range(10)}
    assert len(keys) == 40


@pytest.mark.parametrize("size", [10, 37])
def test_every_index_lands_everywhere_equally_often(size):
    # Chi-square over (index, place) for 800 keys: size^2 cells, (size - 1)^2 degrees of freedom, mean equal to them,
    # standard deviation sqrt(2 x them). Five of those is beyond what chance does.
    keys = 800
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), whole(size, key)] += 1
    chi_square = float(((counts - keys / size) ** 2).sum() / (keys / size))
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_are_scattered():
    # In a random order of n, the mean distance of neighbours is n / 3.
    assert np.abs(np.diff(whole(100_000, 3))).mean() == pytest.approx(100_000 / 3, rel=0.02)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.floats(0, 1e12) | st.just(0.0) | st.floats(1e-300, 1e-6), min_size=1, max_size=12))
@example([0.9 / 65536, 0.1, 0.2, 0.3])
@example([5e-324, 1e300])
@example([1e308, 1e308, 1e308])
@example([1.0, 1.0, 1.0])
def test_rounded_weights_sum_to_all_units_and_lose_no_source(weights):
    if not any(weights):
        weights[0] = 1.0
    units = rounded_weights(weights)
    assert sum(units) == 65536
    assert [unit > 0 for unit in units] == [weight > 0 for weight in weights]
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) * 65536 / total for weight in weights]
    lifted = sum(0 < value < 1 for value in exact)  # sources lifted to one unit take theirs from the others
    assert all(abs(unit - value) < 1 + lifted for unit, value in zip(units, exact, strict=True))


def test_a_source_lifted_to_one_unit_is_not_rounded_up_again():
    assert rounded_weights([0.9, 65535.1])[0] == 1
    assert rounded_weights([0.9, 0.45, 65534.65])[:2] == [1, 1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any))
@example([0, 5, 0])
@example([1, 1, 1, 1])
@example([59, 1])
@example(rounded_weights([0.47, 0.45, 0.08]))
@example(rounded_weights([1e-9, 3.0, 7.0]))
@example(rounded_weights([0.1, 0.2, 0.3, 0.15, 0.25]))
def test_every_prefix_of_a_cycle_is_within_one_sample_of_its_share(units):
    cycle = MixtureCycle(units)
    slots = np.arange(1, cycle.length + 1)
    for source, count in enumerate(cycle.counts):
        taken = np.cumsum(cycle.picks == source)
        assert taken[-1] == count
        assert (np.abs(taken * cycle.length - slots * count) < cycle.length).all()


ORDERS = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),  # samples of each source
    st.lists(st.tuples(st.integers(1, 90), st.lists(st.integers(0, 9), min_size=4, max_size=4)), max_size=3),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(0, 5),  # seed
)


def make_order(samples, later_stages, first_units, seed):
    sources = [OrderedSource(f"source{n}", size) for n, size in enumerate(samples)]

    def usable(units):
        return units[: len(samples)] if any(units[: len(samples)]) else [1] * len(samples)

    stages, start = [(0, usable(first_units))], 0
    for length, units in later_stages:
        start += length
        stages.append((start, usable(units)))
    return Order(sources, stages, seed), stages


def slow_lookup(order: Order, stages: list[tuple[int, list[int]]], positions: int) -> list[tuple[int, int]]:
    """The definition, one position after the other: count what each source gave so far, shuffle each epoch whole."""
    taken = [0] * len(order.sources)
    epochs: dict[int, list[int]] = {}
    found = []
    for position in range(positions):
        start, units = max(stage for stage in stages if stage[0] <= position)
        if position == start:
            debts = [Fraction(0)] * len(units)
        share = [Fraction(unit, sum(units)) for unit in units]
        debts = [debt + part for debt, part in zip(debts, share, strict=True)]
        active = [n for n, unit in enumerate(units) if unit]
        slack = Fraction(1, 2 * len(active) - 2) if len(active) > 1 else Fraction(0)
        due = [n for n in active if debts[n] >= slack]
        source = min(due, key=lambda n: ((1 - slack - debts[n]) / share[n], n))
        debts[source] -= 1
        epoch, index = divmod(taken[source], order.sources[source].samples)
        if index == 0:
            key = permutation_key(order.seed, order.sources[source].name, epoch)
            epochs[source] = whole(order.sources[source].samples, key).tolist()
        found.append((source, epochs[source][index]))
        taken[source] += 1
    return found


@settings(max_examples=25, deadline=None)
@given(ORDERS)
def test_lookup_equals_the_slow_definition(case):
    order, stages = make_order(*case)
    sources, samples = order.lookup(np.arange(150))
    assert list(zip(sources.tolist(), samples.tolist(), strict=True)) == slow_lookup(order, stages, 150)
    assert order.taken(150).tolist() == np.bincount(sources, minlength=len(order.sources)).tolist()


@settings(max_examples=25, deadline=None)
@given(case=ORDERS, start=st.integers(0, 240), length=st.integers(0, 60), seed=st.integers(0, 9))
def test_lookup_of_any_positions_equals_that_part_of_the_whole(case, start, length, seed):
    order, _ = make_order(*case)
    everything = order.lookup(np.arange(300))
    piece = np.arange(start, start + length)
    np.random.default_rng(seed).shuffle(piece)
    for found, all_of_it in zip(order.lookup(piece), everything, strict=True):
        assert found.tolist() == all_of_it[piece].tolist()


def test_a_position_far_away_costs_no_more_than_the_first():
    sources = [OrderedSource("web", 3 * 10**11), OrderedSource("books", 1000), OrderedSource("code", 7)]
    order = Order(sources, [(0, [40000, 20000, 5536]), (10**11, [1, 1, 2])], seed=3)
    numbers, samples = order.lookup(np.arange(10**12, 10**12 + 64))  # counting up to there takes hours
    assert (samples < np.array([source.samples for source in sources])[numbers]).all()
    assert (samples >= 0).all()
    assert np.abs(order.taken(10**12 + 64) - order.taken(10**12) - np.array([16, 16, 32])).max() <= 1
    late = Order([OrderedSource("a", 1000)], [(0, [1])], seed=1).lookup(np.arange(10**12, 10**12 + 1000))[1]
    assert sorted(late) == list(range(1000))
