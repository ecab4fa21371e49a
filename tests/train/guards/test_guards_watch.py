"""All guards together, on simulated losses: what they decide is recorded, and exact over a crash."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from zero2all.common import jsonio
from zero2all.common.errors import LostRunError
from zero2all.config.training import GuardsConfig
from zero2all.train.guards.policy import Continue, Rollback, SkipWindow
from zero2all.train.guards.watch import INCIDENTS_FOLDER, RunGuards

STEP_TOKENS = 100
CONFIG = GuardsConfig(spike_min_steps=16, rollback_after_spikes=3, skip_steps_after=2, rollback_margin_steps=2)


def disk(*steps, rotten=()):
    """The good checkpoints, of which some cannot be read."""
    return SimpleNamespace(good_steps=lambda: list(steps), opens=lambda step: step not in rotten)


class Seen(NamedTuple):
    """What the guards read of a step."""

    step: int
    tokens: tuple[int, int]
    loss: float
    grad_norm: float = 1.0
    core_loss: float | None = None


def at(step, loss=3.0):
    return Seen(step, ((step - 1) * STEP_TOKENS, step * STEP_TOKENS), loss)


def run_steps(guards, first, last, log, spikes):
    for step in range(first, last):
        seen = at(step, 3.0 * (1 + 0.01 * np.random.default_rng(step).standard_normal()) * (2 if step in spikes else 1))
        if guards.ledger.skips(*seen.tokens):
            continue
        found = guards.observe(seen, {"en": seen.loss}, disk(1))
        limits = guards.limits(step + 2)
        if limits.usual_grad_norm:  # with too short a window, loaded weights are judged all the same
            log.append((step, limits, [one.text for one in found.findings], type(found.action).__name__))


def test_guards_restored_from_a_checkpoint_go_on_to_the_bit(tmp_path):
    whole, expected = RunGuards(tmp_path / "whole", CONFIG, 0), []
    run_steps(whole, 1, 49, expected, spikes=(40,))
    for cut in (7, 20, 39, 41):
        folder, log = tmp_path / f"cut-{cut}", []
        first = RunGuards(folder, CONFIG, 0)
        run_steps(first, 1, cut, log, spikes=(40,))
        state = jsonio.loads(jsonio.dumps_line(first.state()))
        run_steps(first, cut, 45, [], spikes=(40,))  # goes on, decides, and is killed
        resumed = RunGuards(folder, CONFIG, 0)
        of_an_earlier_version = {"quarantine": [], "shards": {"format": 2}, "waiting_rows": None}
        resumed.restore({**state, **of_an_earlier_version}, cut - 1)
        run_steps(resumed, cut, 49, log, spikes=(40,))
        assert [entry for entry in log if entry[0] != 40] == [entry for entry in expected if entry[0] != 40]
        assert resumed.ledger.entries == whole.ledger.entries


def test_nothing_is_decided_on_disk_once_the_run_is_lost(tmp_path):
    def fence():
        raise LostRunError("taken over")

    guards = RunGuards(tmp_path, CONFIG, 0, fence)
    for step in range(1, 40):
        guards.observe(at(step), {}, disk())
    with pytest.raises(LostRunError):
        guards.observe(at(40, 9.0), {}, disk())
    assert not guards.folder.exists()


def test_a_rollback_keeps_what_was_decided_and_forgets_what_was_seen(tmp_path):
    guards = RunGuards(tmp_path, CONFIG, 0)
    state = None
    for step in range(1, 60):
        loss = 9.0 if step in (40, 41, 43) else 3.0 + 0.01 * (step % 5)
        seen = guards.observe(at(step, loss), {}, disk(30))
        if step == 30:
            state = guards.state()
        if isinstance(seen.action, Rollback):
            break
    assert (step, seen.action.to_step) == (43, 30)
    guards.restore(state, 30)
    assert guards.detector.last_step == 30
    assert [s for s in range(31, 60) if guards.ledger.skips((s - 1) * 100, s * 100)] == [40, 41, 42, 43, 44, 45]
    assert RunGuards(tmp_path, CONFIG, 0).ledger.entries == guards.ledger.entries
    assert (tmp_path / INCIDENTS_FOLDER / "skipped.json").is_file()
    assert isinstance(guards.observe(at(31), {}, disk(30)).action, Continue)


def test_the_device_refuses_only_what_is_not_merely_logged(tmp_path):
    guards = RunGuards(tmp_path, GuardsConfig(spike_min_steps=16, grad_spike="log", loss_drop="skip"), 0)
    for step in range(1, 40):
        guards.observe(at(step), {}, disk())
    limits, refusal = guards.limits(42), guards.refusal_limits(42)
    assert (refusal.loss, refusal.loss_low) == (limits.loss, limits.loss_low)
    assert math.isfinite(limits.grad_norm)
    assert math.isinf(refusal.grad_norm)


def test_a_rollback_takes_the_newest_good_checkpoint_that_can_be_read_and_none_that_cannot(tmp_path):
    def last_action(name, *steps, rotten=()):
        guards = RunGuards(tmp_path / name, CONFIG, 0)
        for step in range(1, 44):
            seen = guards.observe(at(step, 9.0 if step > 40 else 3.0), {}, disk(*steps, rotten=rotten))
        assert guards.ledger.entries[-1] == seen.action.skip, "recorded once it is known"
        return seen.action

    assert last_action("whole", 10, 20, 30).to_step == 30
    assert last_action("older", 10, 20, 30, rotten=(30, 20)).to_step == 10
    assert isinstance(last_action("none", 30, rotten=(30,)), SkipWindow)
