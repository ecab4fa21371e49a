"""Simulated runs: a bad shard scattered by the shuffle is named after few rows, and clean runs name nobody."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from zero2all.common import jsonio
from zero2all.train.guards.detector import Finding
from zero2all.train.guards.ledger import Quarantine
from zero2all.train.guards.rows import StepRows
from zero2all.train.guards.shards import ShardWatch

SHARDS = {"web": 24, "books": 8, "code": 8}
CHANNEL_OF = np.array([0, 0, 1])
CHANNELS = ["text", "code"]
FIRST = np.array([0, 24, 32])
ROWS, ROW_TOKENS = 32, 512


class Simulation:
    """Rows in random order. Shards of a source differ (8 %), rows scatter (12 %), one row in a hundred is odd."""

    def __init__(self, seed: int, bad: dict[int, float] | None = None, first_step: int = 200) -> None:
        self.rng = np.random.default_rng(seed)
        self.bad = bad or {}
        """Loss of the rows of a bad shard."""
        self.levels = np.exp(0.08 * self.rng.standard_normal(40))
        self.step = first_step

    def next(self) -> tuple[StepRows, np.ndarray, np.ndarray]:
        self.step += 1
        shard = self.rng.integers(0, 40, ROWS)
        source = np.searchsorted(FIRST, shard, side="right") - 1
        level = (2.0 + 6.0 * (1 + self.step / 20) ** -0.6) * np.where(source == 2, 0.6, 1.0)
        losses = level * self.levels[shard] * np.exp(0.12 * self.rng.standard_normal(ROWS))
        losses[self.rng.random(ROWS) < 0.01] *= 2.0
        for number, loss in self.bad.items():
            losses[shard == number] = loss * np.exp(0.02 * self.rng.standard_normal(int((shard == number).sum())))
        counts = np.full(ROWS, float(ROW_TOKENS))
        first = (self.step - 1) * ROWS * ROW_TOKENS
        rows = StepRows(
            first, ROW_TOKENS, source, shard * 100, shard - FIRST[source], CHANNEL_OF[source], tuple(SHARDS)
        )
        return rows, losses * counts, counts


def watch_of(simulation: Simulation, steps: int, watch: ShardWatch | None = None) -> tuple[ShardWatch, list[Finding]]:
    watch = watch or ShardWatch(SHARDS, CHANNELS)
    found = []
    for _ in range(steps):
        rows, nats, counts = simulation.next()
        tokens = (rows.first_token, rows.first_token + ROWS * ROW_TOKENS)
        found += watch.observe(simulation.step, rows, nats, counts, tokens)
    return watch, found


@pytest.mark.parametrize("runs", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_clean_runs_name_no_shard(runs):
    named = []
    for seed in range(runs):
        watch, found = watch_of(Simulation(seed, first_step=seed % 2 * 300), 120)
        named += found
        assert sum(row["rows"] for row in watch.table()) > 60 * ROWS, "most rows were judged"
    assert [one.text for one in named] == []


@pytest.mark.parametrize(
    ("loss", "kind", "rows_allowed"),
    [(11.0, "hard_shard", 18), (6.5, "hard_shard", 32), (0.02, "easy_shard", 30), (0.8, "easy_shard", 50)],
    ids=["random bytes", "twice as hard", "newlines", "seen before"],
)
def test_a_bad_shard_is_named_and_no_other(loss, kind, rows_allowed):
    _, found = watch_of(Simulation(0, {29: loss}), 120)
    assert [(one.kind, one.details["source"], one.details["shard"]) for one in found] == [(kind, "books", 5)]
    assert found[0].details["rows"] <= rows_allowed
    assert all(example["loss"] == pytest.approx(loss, rel=0.2) for example in found[0].details["examples"])


def test_two_bad_shards_at_once_are_both_named():
    _, found = watch_of(Simulation(3, {2: 10.5, 35: 0.01}), 120)
    assert {(one.kind, one.details["source"], one.details["shard"]) for one in found} == {
        ("hard_shard", "web", 2),
        ("easy_shard", "code", 3),
    }


def test_one_monstrous_row_names_nobody():
    simulation = Simulation(5)
    watch, _ = watch_of(simulation, 100)
    rows, nats, counts = simulation.next()
    nats[0] = 1e6 * counts[0]
    assert watch.observe(simulation.step, rows, nats, counts, (0, 1)) == []
    assert watch_of(simulation, 50, watch)[1] == []


def test_rows_that_count_nothing_or_are_not_finite_are_left_out():
    simulation = Simulation(6)
    watch, _ = watch_of(simulation, 60)
    before = watch.state()
    rows, nats, counts = simulation.next()
    counts[:], nats[:5] = 0.0, math.nan
    assert watch.observe(simulation.step, rows, nats, counts, (0, 1)) == []
    assert watch.state() == before


def test_a_restored_watch_goes_on_to_the_bit():
    whole, expected = watch_of(Simulation(7, {29: 11.0}), 80)
    simulation = Simulation(7, {29: 11.0})
    first, found = watch_of(simulation, 40)
    resumed = ShardWatch(SHARDS, CHANNELS)
    resumed.restore(jsonio.loads(jsonio.dumps_line(first.state())))
    found += watch_of(simulation, 40, resumed)[1]
    assert found == expected
    assert resumed.state() == whole.state()


def test_a_source_that_joins_later_changes_nothing_for_the_others():
    first, _ = watch_of(Simulation(8), 60)
    wider = ShardWatch({"new": 5, **SHARDS}, ["new", *CHANNELS])
    wider.restore(first.state())
    assert [row for row in wider.table() if row["source"] != "new"] == first.table()
    again = ShardWatch(SHARDS, CHANNELS)
    again.restore(wider.state())
    assert again.state() == first.state(), "windows included"


def test_a_source_packed_into_other_shards_begins_with_an_empty_window():
    first, _ = watch_of(Simulation(8), 60)
    packed_anew = ShardWatch({**SHARDS, "books": 7}, CHANNELS)
    packed_anew.restore(first.state())
    windows = packed_anew.state()["source_windows"]
    assert "books" not in windows
    assert windows["web"] == first.state()["source_windows"]["web"]


# ---- sources of one channel that differ -----------------------------------------------------------------------


class Channel:
    """One channel of sources with levels of their own that fall slowly; rows of a source are normal around its level.

    `shares` says how much of the batch each shard of each source makes up, `bad` the loss of a bad shard.
    """

    def __init__(self, seed: int, levels: list[float], shares: list[list[float]], noise=0.8, bad=None, rows=64) -> None:
        self.rng = np.random.default_rng(seed)
        self.levels, self.noise, self.rows, self.bad = np.array(levels), noise, rows, bad or {}
        self.names = tuple(f"source-{number}" for number in range(len(levels)))
        self.shards = dict(zip(self.names, map(len, shares), strict=True))
        self.pairs = np.array([(source, shard) for source, few in enumerate(shares) for shard in range(len(few))])
        self.shares = np.concatenate(shares) / np.concatenate(shares).sum()
        self.step = 0

    def found(self, steps: int, watch: ShardWatch | None = None) -> list[Finding]:
        watch = watch or ShardWatch(self.shards, ["zh"])
        found = []
        for _ in range(steps):
            self.step += 1
            sources, shards = self.pairs[self.rng.choice(len(self.pairs), self.rows, p=self.shares)].T
            falling = 1 - 0.2 * self.step / 600
            losses = falling * self.levels[sources] + self.noise * self.rng.standard_normal(self.rows)
            for (source, shard), loss in self.bad.items():
                losses[(sources == source) & (shards == shard)] = loss
            first, counts = self.step * self.rows, np.ones(self.rows)
            rows = StepRows(first, 1, sources, shards, shards, np.zeros_like(sources), self.names)
            found += watch.observe(self.step, rows, np.maximum(losses, 0.0), counts, (first, first + self.rows))
        return found


def named(found: list[Finding]) -> set[tuple[str, str, int]]:
    return {(one.kind, one.details["source"], one.details["shard"]) for one in found}


SHARES_AND_NOISES = list(itertools.product((0.1, 0.35, 0.65, 0.9), (0.6, 0.8, 1.0)))


@pytest.mark.parametrize(
    ("share", "noise", "steps"),
    [(0.1, 0.6, 150), (0.9, 1.0, 150)]
    + [pytest.param(*case, 600, marks=pytest.mark.slow) for case in SHARES_AND_NOISES],
)
def test_a_sound_source_of_one_shard_and_of_another_kind_of_text_is_not_named(share, noise, steps):
    """Chronicles (8.5) and manuals (5.3) in one channel, each a source of one shard, in any proportion."""
    assert named(Channel(1, [8.5, 5.3], [[share], [1 - share]], noise).found(steps)) == set()


@pytest.mark.parametrize(("loss", "kind"), [(0.02, "easy_shard"), (11.0, "hard_shard")], ids=["newlines", "noise"])
def test_a_bad_source_of_one_shard_is_still_named(loss, kind):
    channel = Channel(1, [3.4, 3.0], [[1.0] * 9, [1.0]], noise=0.4, bad={(1, 0): loss})
    (one,) = channel.found(60)
    assert named([one]) == {(kind, "source-1", 0)}
    assert one.text.endswith("; source-1 has no other shard to compare with")
    assert one.details["usual_beside"] is None
    assert one.details["rows"] <= 40


def test_beside_a_bad_shard_the_good_one_of_its_source_is_not_named():
    levels, shares = [3.4, 3.3], [[1.0] * 8, [1.0, 1.0]]
    for loss, kind in ((11.0, "hard_shard"), (0.1, "easy_shard")):
        channel = Channel(0, levels, shares, noise=0.4, bad={(1, 1): loss})
        assert named(channel.found(100)) == {(kind, "source-1", 1)}


@pytest.mark.parametrize(
    "share", [0.2, pytest.param(0.5, marks=pytest.mark.slow), pytest.param(0.8, marks=pytest.mark.slow)]
)
def test_sources_of_several_shards_may_differ_and_a_bad_shard_in_either_is_named(share):
    levels, shares = [4.0, 2.5], [[share / 5] * 5, [(1 - share) / 5] * 5]
    assert named(Channel(4, levels, shares, noise=0.3).found(100)) == set()
    for source in (0, 1):
        hard = Channel(5, levels, shares, noise=0.3, bad={(source, 3): 11.0})
        assert named(hard.found(100)) == {("hard_shard", f"source-{source}", 3)}
        easy = Channel(6, levels, shares, noise=0.3, bad={(source, 3): 0.05})
        assert named(easy.found(100)) == {("easy_shard", f"source-{source}", 3)}


def test_a_bad_shard_that_is_most_of_its_source_is_compared_with_the_few_rows_of_the_others():
    channel = Channel(7, [3.4, 3.3], [[0.09] * 10, [0.095, 0.005]], noise=0.4, bad={(1, 0): 11.0})
    assert named(channel.found(200)) == {("hard_shard", "source-1", 0)}


def test_a_restored_watch_also_knows_sources_of_one_shard_and_large_shards_to_the_bit():
    def channel() -> Channel:
        shares = [[0.09] * 8, [0.1, 0.006], [0.1]]
        return Channel(10, [3.4, 3.3, 4.0], shares, noise=0.4, bad={(1, 0): 11.0, (2, 0): 0.02})

    left_alone, interrupted = channel(), channel()
    whole = ShardWatch(left_alone.shards, ["zh"])
    expected = left_alone.found(200, whole)
    assert named(expected) == {("hard_shard", "source-1", 0), ("easy_shard", "source-2", 0)}
    found, watch = [], ShardWatch(left_alone.shards, ["zh"])
    for steps in (5, 20, 75, 100):
        found += interrupted.found(steps, watch)
        state, watch = watch.state(), ShardWatch(left_alone.shards, ["zh"])
        watch.restore(jsonio.loads(jsonio.dumps_line(state)))
    assert found == expected
    assert watch.state() == whole.state()


def test_a_shard_is_judged_only_when_other_shards_of_its_source_were_read():
    channel = Channel(8, [3.4, 3.3], [[0.9], [0.1, 0.0]], noise=0.4, bad={(1, 0): 11.0})
    watch = ShardWatch(channel.shards, ["zh"])
    assert channel.found(100, watch) == []
    assert {row["source"] for row in watch.table()} == {"source-0"}


def test_a_shard_that_was_set_aside_is_no_company_for_the_other_of_its_source():
    """It was named on a branch that was given up, and its rows count nothing."""
    channel = Channel(11, [3.4, 3.3], [[0.09] * 10, [0.1, 0.0]], noise=0.4, bad={(1, 0): 11.0})
    watch = ShardWatch(channel.shards, ["zh"])
    for _ in range(2):  # saying it twice is saying it once
        watch.set_aside("source-1", 1, "hard_shard")
    watch.set_aside("source-1", 2, "hard_shard")  # of data that was packed anew
    watch.set_aside("elsewhere", 0, "hard_shard")
    assert named(channel.found(100, watch)) == {("hard_shard", "source-1", 0)}


def test_easy_is_called_trivial_only_below_a_quarter_of_what_is_usual():
    for loss, words in ((0.3, "trivially easy"), (1.2, "far easier")):
        (one,) = Channel(9, [4.0], [[1.0] * 8], noise=0.4, bad={(0, 2): loss}).found(60)
        assert one.text == (
            f"shard 2 of source-0 is {words}: mean loss {loss:g} over {one.details['rows']} samples, "
            f"its channel {one.usual:.4g}, the other shards of source-0 {one.details['usual_beside']:.4g}"
        )
        assert one.usual < one.details["usual_beside"] == pytest.approx(4.0, rel=0.03)


# ---- quarantine -----------------------------------------------------------------------------------------------


def finding(source: str = "books", shard: int = 5) -> Finding:
    return Finding("hard_shard", 10, (0, 1), "it is hard", details={"source": source, "shard": shard})


def test_auto_takes_the_weight_of_a_shard_from_a_step_on():
    quarantine = Quarantine("auto")
    assert quarantine.add(finding(), from_step=12) is not None
    assert quarantine.add(finding(), from_step=99) is None, "known already"
    assert quarantine.weight_of("books", 5) == 0.0
    assert quarantine.weight_of("books", 5, step=11) == 1.0
    assert quarantine.weight_of("books", 4) == 1.0
    rows = next(
        rows for rows, _, _ in iter(Simulation(0).next, None) if ((rows.sources == 1) & (rows.shards == 5)).any()
    )
    weights = quarantine.row_weights(rows, 12)
    assert weights.tolist() == [
        0.0 if (s, n) == (1, 5) else 1.0 for s, n in zip(rows.sources, rows.shards, strict=True)
    ]
    assert quarantine.row_weights(rows, 11) is None


@pytest.mark.parametrize("mode", ["off", "log"])
def test_off_and_log_change_no_weight(mode):
    quarantine = Quarantine(mode)
    assert (quarantine.add(finding(), 12) is None) == (mode == "off")
    assert quarantine.weight_of("books", 5) == 1.0
    assert quarantine.row_weights(Simulation(0).next()[0], 20) is None


def test_the_state_of_a_quarantine_comes_back():
    quarantine = Quarantine("auto")
    quarantine.add(finding(), 12)
    quarantine.add(finding("web", 1), 30)
    other = Quarantine("auto")
    other.merge(jsonio.loads(jsonio.dumps_line(quarantine.state())))
    assert other.shards == quarantine.shards
