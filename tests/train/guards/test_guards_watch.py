"""All guards together, on real packed data and simulated losses: named, put in quarantine, and exact over a crash."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zero2all.common import jsonio
from zero2all.common.errors import LostRunError
from zero2all.config.training import GuardsConfig
from zero2all.train.guards.policy import Continue, Rollback, SkipWindow
from zero2all.train.guards.rows import RowFinder
from zero2all.train.guards.watch import INCIDENTS_FOLDER, RunGuards

SEQ_LEN, ROWS = 32, 8
STEP_TOKENS = SEQ_LEN * ROWS
CONFIG = GuardsConfig(spike_min_steps=16, rollback_after_spikes=3, skip_steps_after=2, rollback_margin_steps=2)


class Disk:
    """The steps of good checkpoints, of which some cannot be read."""

    def __init__(self, steps=(), rotten=()):
        self.steps, self.rotten = list(steps), rotten

    def good_steps(self):
        return self.steps

    def opens(self, step):
        return step not in self.rotten


def simulated(finder, step, poisoned=("en", 2), spikes=()):
    """Losses as a function of the step and of which rows it has, like a run that is resumed."""
    tokens = ((step - 1) * STEP_TOKENS, step * STEP_TOKENS)
    rows = finder.rows(tokens[0], ROWS)
    noise = np.random.default_rng(step).standard_normal(ROWS)
    losses = 3.0 + 0.3 * noise
    for row, (source, shard) in enumerate(zip(rows.source_names(), rows.shards.tolist(), strict=True)):
        if (source, shard) == poisoned:
            losses[row] = 9.0
    loss = 3.0 * (1 + 0.01 * noise[0]) * (2 if step in spikes else 1)
    return loss, tokens, losses * SEQ_LEN, np.full(ROWS, float(SEQ_LEN)), rows


def run_steps(guards, finder, first, last, log, spikes=(), checkpoints=(1,)):
    step = first
    while step < last:
        loss, tokens, nats, counts, rows = simulated(finder, step, spikes=spikes)
        if guards.ledger.skips(*tokens):
            step += 1
            continue
        weights = guards.quarantine.row_weights(rows, step)
        if weights is not None:
            nats, counts = nats * weights, counts * weights
        seen = guards.observe(step, loss, 1.0, {"en": loss}, tokens, Disk(checkpoints), nats, counts)
        limits = guards.limits(step + 2)
        limits = (
            limits if limits.usual_grad_norm else None
        )  # with too short a window, loaded weights are judged all the same
        log.append((step, limits, [one.text for one in seen.findings], type(seen.action).__name__))
        if isinstance(seen.action, Rollback):
            return seen.action
        step += 1
    return None


def test_a_poisoned_shard_is_named_and_its_rows_stop_counting(sharded_work, open_data, tmp_path):
    data = open_data(sharded_work)
    finder = RowFinder(data)
    guards = RunGuards(tmp_path, CONFIG, 0, data, "auto")
    log = []
    run_steps(guards, finder, 1, 49, log)
    (named,) = guards.quarantine.shards
    assert (named.source, named.shard, named.kind) == ("en", 2, "hard_shard")
    assert guards.quarantine.weight_of("en", 2) == 0.0
    resumed = RunGuards(tmp_path, CONFIG, 0, data, "auto")
    assert resumed.quarantine.shards == guards.quarantine.shards, "kept beside the run, not only in checkpoints"


def test_guards_restored_from_a_checkpoint_go_on_to_the_bit(sharded_work, open_data, tmp_path):
    data = open_data(sharded_work)
    finder = RowFinder(data)
    whole, expected = RunGuards(tmp_path / "whole", CONFIG, 0, data, "auto"), []
    run_steps(whole, finder, 1, 49, expected, spikes=(40,))
    for cut in (7, 20, 39, 41):
        folder, log = tmp_path / f"cut-{cut}", []
        first = RunGuards(folder, CONFIG, 0, data, "auto")
        run_steps(first, finder, 1, cut, log, spikes=(40,))
        state = jsonio.loads(jsonio.dumps_line(first.state()))
        run_steps(first, finder, cut, 45, [], spikes=(40,))  # goes on, decides, and is killed
        resumed = RunGuards(folder, CONFIG, 0, data, "auto")
        resumed.restore(state, cut - 1)
        run_steps(resumed, finder, cut, 49, log, spikes=(40,))
        assert [entry for entry in log if entry[0] != 40] == [entry for entry in expected if entry[0] != 40]
        assert resumed.ledger.entries == whole.ledger.entries
        assert resumed.quarantine.shards == whole.quarantine.shards
        assert resumed.shards.state() == whole.shards.state()


def test_a_damaged_list_of_shards_is_written_anew_from_the_checkpoint(sharded_work, open_data, tmp_path):
    data = open_data(sharded_work)
    first = RunGuards(tmp_path, CONFIG, 0, data, "auto")
    run_steps(first, RowFinder(data), 1, 49, [])
    path = tmp_path / INCIDENTS_FOLDER / "quarantine.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    resumed = RunGuards(tmp_path, CONFIG, 0, data, "auto")
    (note,) = resumed.restore(first.state(), 48)
    assert "quarantine.json could not be read. It was written again with the 1 shard in" in note
    assert resumed.quarantine.shards == first.quarantine.shards != ()
    assert path.read_bytes() == whole


def test_nothing_is_decided_on_disk_once_the_run_is_lost(tmp_path):
    def fence():
        raise LostRunError("taken over")

    guards = RunGuards(tmp_path, CONFIG, 0, fence=fence)
    for step in range(1, 40):
        guards.observe(step, 3.0, 1.0, {}, (step, step + 1), Disk())
    with pytest.raises(LostRunError):
        guards.observe(40, 9.0, 1.0, {}, (40, 41), Disk())
    assert not guards.folder.exists()


def test_statistics_of_shards_by_older_rules_begin_anew_and_the_rest_is_taken_over(sharded_work, open_data, tmp_path):
    data = open_data(sharded_work)
    finder = RowFinder(data)
    first = RunGuards(tmp_path, CONFIG, 0, data, "auto")
    run_steps(first, finder, 1, 49, [])
    state = first.state()
    resumed = RunGuards(tmp_path, CONFIG, 0, data, "auto")
    assert resumed.restore(state, 48) == []
    (note,) = resumed.restore({**state, "shards": {**state["shards"], "format": 1}}, 48)
    assert "shard statistics in the checkpoint come from another version" in note
    assert resumed.shards.table() == [], "nothing is left of what was known"
    assert resumed.quarantine.shards == first.quarantine.shards != ()
    assert resumed.detector.state() == first.detector.state()


def test_a_shard_that_was_named_stays_named_when_its_statistics_begin_anew(sharded_work, open_data, tmp_path):
    data = open_data(sharded_work)
    finder = RowFinder(data)
    first = RunGuards(tmp_path, CONFIG, 0, data, "log")  # its rows go on to count, and to stand out
    run_steps(first, finder, 1, 49, [])
    (before,) = first.quarantine.shards
    resumed = RunGuards(tmp_path, CONFIG, 0, data, "log")
    state = first.state()
    resumed.restore({**state, "shards": {**state["shards"], "format": 1}}, 48)
    log = []
    run_steps(resumed, finder, 49, 120, log)
    assert [text for _, _, texts, _ in log for text in texts] == []
    assert resumed.quarantine.shards == (before,)


def test_a_rollback_keeps_what_was_decided_and_forgets_what_was_seen(tmp_path):
    guards = RunGuards(tmp_path, CONFIG, 0)
    state = None
    for step in range(1, 60):
        tokens = ((step - 1) * 100, step * 100)
        loss = 9.0 if step in (40, 41, 43) else 3.0 + 0.01 * (step % 5)
        seen = guards.observe(step, loss, 1.0, {}, tokens, Disk([30]))
        if step == 30:
            state = guards.state()
        if isinstance(seen.action, Rollback):
            break
    assert (step, seen.action.to_step) == (43, 30)
    guards.restore(state, 30)
    assert guards.detector.last_step == 30
    assert [s for s in range(31, 60) if guards.ledger.skips((s - 1) * 100, s * 100)] == [40, 41, 42, 43, 44, 45]
    on_disk = RunGuards(tmp_path, CONFIG, 0)
    assert on_disk.ledger.entries == guards.ledger.entries
    assert (tmp_path / INCIDENTS_FOLDER / "skipped.json").is_file()
    after = guards.observe(31, 3.0, 1.0, {}, (3000, 3100), Disk([30]))
    assert isinstance(after.action, Continue)


def test_the_device_refuses_only_what_is_not_merely_logged(tmp_path):
    guards = RunGuards(tmp_path, GuardsConfig(spike_min_steps=16, grad_spike="log", loss_drop="skip"), 0)
    for step in range(1, 40):
        guards.observe(step, 3.0, 1.0, {}, (step, step + 1), Disk())
    limits, refusal = guards.limits(42), guards.refusal_limits(42)
    assert (refusal.loss, refusal.loss_low) == (limits.loss, limits.loss_low)
    assert math.isfinite(limits.grad_norm)
    assert math.isinf(refusal.grad_norm)


def test_off_leaves_the_shards_alone(sharded_work, open_data, tmp_path):
    guards = RunGuards(tmp_path, CONFIG, 0, open_data(sharded_work), "off")
    seen = guards.observe(1, 3.0, 1.0, {}, (0, STEP_TOKENS), Disk(), np.full(ROWS, 1e9), np.ones(ROWS))
    assert seen.findings == []
    assert guards.state()["shards"] is None
    assert math.isinf(guards.limits(2).loss)


def test_a_rollback_takes_the_newest_good_checkpoint_that_can_be_read_and_none_that_cannot(tmp_path):
    def last_action(folder, disk):
        guards = RunGuards(folder, CONFIG, 0)
        for step in range(1, 44):
            tokens = (step * 100, step * 100 + 100)
            seen = guards.observe(step, 9.0 if step > 40 else 3.0, 1.0, {}, tokens, disk)
        assert guards.ledger.entries[-1] == seen.action.skip, "recorded once it is known"
        return seen.action

    assert last_action(tmp_path / "whole", Disk([10, 20, 30])).to_step == 30
    assert last_action(tmp_path / "older", Disk([10, 20, 30], rotten=(30, 20))).to_step == 10
    assert isinstance(last_action(tmp_path / "none", Disk([30], rotten=(30,))), SkipWindow)
