"""Simulated runs: a bad shard scattered by the shuffle is named after few rows, and clean runs name nobody."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zero2all.common import jsonio
from zero2all.train.guards.findings import Finding
from zero2all.train.guards.quarantine import Quarantine
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


def test_a_hundred_clean_runs_name_no_shard():
    named = []
    for seed in range(100):
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
    for seed in range(3):
        simulation = Simulation(seed, {29: loss})
        _, found = watch_of(simulation, 250)
        assert [(one.kind, one.details["source"], one.details["shard"]) for one in found] == [(kind, "books", 5)]
        assert found[0].details["rows"] <= rows_allowed
        assert all(example["loss"] == pytest.approx(loss, rel=0.2) for example in found[0].details["examples"])


def test_two_bad_shards_at_once_are_both_named():
    _, found = watch_of(Simulation(3, {2: 10.5, 35: 0.01}), 500)
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
    whole, expected = watch_of(Simulation(7, {29: 11.0}), 300)
    simulation = Simulation(7, {29: 11.0})
    first, found = watch_of(simulation, 40)
    resumed = ShardWatch(SHARDS, CHANNELS)
    resumed.restore(jsonio.loads(jsonio.dumps_line(first.state())))
    found += watch_of(simulation, 260, resumed)[1]
    assert found == expected
    assert resumed.state() == whole.state()


def test_a_source_that_joins_later_changes_nothing_for_the_others():
    first, _ = watch_of(Simulation(8), 60)
    wider = ShardWatch({"new": 5, **SHARDS}, ["new", *CHANNELS])
    wider.restore(first.state())
    assert [row for row in wider.table() if row["source"] != "new"] == first.table()


def test_how_many_rows_it_takes_is_said():
    assert ShardWatch({"a": 1000}, ["a"]).rows_to_name == {"hard_shard": 16, "easy_shard": 21}


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
    other.restore(jsonio.loads(jsonio.dumps_line(quarantine.state())))
    assert other.shards == quarantine.shards
    with pytest.raises(ValueError, match="expected one of off, log, auto"):
        Quarantine("maybe")
