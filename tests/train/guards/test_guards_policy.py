"""What follows from findings: nothing, a step left out, a way back, or the end; and how that survives a crash."""

import os
from dataclasses import asdict

import pytest

from zero2all.common import jsonio
from zero2all.config.training import GuardsConfig
from zero2all.train.guards.detector import GuardFinding
from zero2all.train.guards.ledger import LEDGER_FILE, DamagedLedgerError, SkipLedger, Skipped, rebuilt_ledger
from zero2all.train.guards.policy import Continue, Policy, Rollback, SkipWindow, Stop

STEP_TOKENS = 100


def spike(step: int, kind: str = "loss_spike", onset: int | None = None) -> GuardFinding:
    tokens = ((step - 1) * STEP_TOKENS, step * STEP_TOKENS)
    onset = onset or step
    return GuardFinding(kind, step, tokens, f"{kind} at {step}", 9.0, 3.0, 4.0, onset, (onset - 1) * STEP_TOKENS)


def decide(policy, ledger, step, findings, checkpoints):
    """Decide, and record as the run does."""
    action = policy.decide(step, findings, ledger, checkpoints)
    if isinstance(action, SkipWindow | Rollback) and action.skip is not None:
        ledger.add(action.skip)
    return action


def after_bad_steps(policy, ledger, steps, checkpoints, kind="loss_spike", onset=None):
    return [decide(policy, ledger, step, [spike(step, kind, onset)], checkpoints) for step in steps]


@pytest.mark.parametrize(("fields", "steps"), [({"loss_spike": "log"}, range(100, 140)), ({}, range(100, 400, 17))])
def test_spikes_that_are_only_logged_or_far_apart_are_not_added_up(fields, steps):
    policy, ledger = Policy(GuardsConfig(**fields)), SkipLedger()
    actions = after_bad_steps(policy, ledger, steps, [1])
    assert {type(action) for action in actions} == {Continue if fields else SkipWindow}
    assert len(ledger.entries) == (0 if fields else len(steps))


def test_skip_leaves_out_the_data_of_the_step():
    policy, ledger = Policy(GuardsConfig(loss_spike="skip")), SkipLedger()
    action = decide(policy, ledger, 200, [spike(200)], [100])
    assert isinstance(action, SkipWindow)
    assert (action.skip.first, action.skip.end, action.skip.action) == (19_900, 20_000, "refuse")
    assert [first for first in range(19_700, 20_300, 100) if ledger.skips(first, first + 100)] == [19_900]
    assert [first for first in range(19_700, 20_300, 100) if ledger.skips(first + 50, first + 150)] == [19_800, 19_900]
    with pytest.raises(ValueError, match="not a range"):
        ledger.add(entry(5, 5))


def test_rollback_goes_to_the_newest_checkpoint_before_the_first_spike_and_leaves_the_window_out():
    policy, ledger = Policy(GuardsConfig(loss_spike="rollback", skip_steps_after=4)), SkipLedger()
    actions = after_bad_steps(policy, ledger, [200, 201, 203], [100, 150, 195, 200], onset=200)
    assert [type(action) for action in actions] == [SkipWindow, SkipWindow, Rollback]
    third = actions[-1]
    assert third.to_step == 150, "195 is only 5 steps older than the first spike, and the margin is 8"
    assert (third.skip.first, third.skip.end) == (19_900, 20_300 + 4 * STEP_TOKENS)
    assert "back to the checkpoint of step 150" in third.reason


def test_without_a_checkpoint_old_enough_only_the_data_is_left_out():
    policy, ledger = Policy(GuardsConfig(rollback_after_spikes=1)), SkipLedger()
    action = decide(policy, ledger, 20, [spike(20)], [15])
    assert isinstance(action, SkipWindow)
    assert "no good checkpoint" in action.reason
    assert action.skip.action == "window"


def test_going_back_twice_to_the_same_checkpoint_goes_one_further():
    policy, ledger = Policy(GuardsConfig(rollback_after_spikes=1)), SkipLedger()
    assert [action.to_step for action in after_bad_steps(policy, ledger, [200, 230], [100, 150])] == [150, 100]


def test_a_run_that_keeps_failing_stops_with_its_own_exit_code():
    policy, ledger = Policy(GuardsConfig(rollback_after_spikes=1, max_rollbacks=2)), SkipLedger()
    actions = after_bad_steps(policy, ledger, [100, 200, 300, 5000], [10])
    assert [type(action) for action in actions] == [Rollback, Rollback, Stop, Rollback], "long ago does not count"
    assert actions[2].exit_code == 12
    assert "gone back 2 times" in actions[2].reason


def test_what_is_not_finite_is_not_recorded_as_bad_data_but_counts_in_a_row():
    policy, ledger = Policy(GuardsConfig(max_skips_in_a_row=3)), SkipLedger()
    assert {type(action) for action in after_bad_steps(policy, ledger, [100, 101], [10], "nonfinite")} == {Continue}
    assert ledger.entries == ()
    restored = Policy(policy.config)
    restored.restore(jsonio.loads(jsonio.dumps_line(policy.state())))
    for one in (policy, restored):
        assert isinstance(one.decide(102, [spike(102, "nonfinite")], ledger, [10]), Stop)
    assert isinstance(Policy(GuardsConfig(nonfinite="stop")).decide(7, [spike(7, "nonfinite")], ledger, []), Stop)


def test_rollback_for_what_is_not_finite_goes_back_to_the_good_checkpoint_right_before_and_leaves_the_data_out():
    policy, ledger = Policy(GuardsConfig(nonfinite="rollback", skip_steps_after=4)), SkipLedger()
    actions = after_bad_steps(policy, ledger, [200, 202, 203], [150, 199], "nonfinite", 200)
    assert [type(action) for action in actions] == [Continue, Continue, Rollback]
    assert actions[-1].to_step == 199
    assert (actions[-1].skip.first, actions[-1].skip.end) == (19_900, 20_300 + 4 * STEP_TOKENS)
    policy.restore(Policy(policy.config).state())  # as it was at step 199
    again = after_bad_steps(policy, ledger, [210, 211, 212], [150, 199], "nonfinite", 210)
    assert again[-1].to_step == 150, "one further than the time before"


@pytest.mark.parametrize("setting", ["skip", "rollback"])
def test_a_run_resumed_from_a_state_of_no_use_goes_further_back_and_leaves_no_data_out(setting):
    policy, ledger = Policy(GuardsConfig(nonfinite=setting)), SkipLedger()
    policy.begin_after(200)
    actions = after_bad_steps(policy, ledger, [201, 202, 203], [100, 150, 200], "nonfinite", 201)
    assert [type(action) for action in actions] == [Continue, Continue, Rollback]
    assert (actions[-1].to_step, actions[-1].skip, actions[-1].bad_since) == (150, None, 200)
    assert ledger.entries == ()
    for step in (204, 205, 206):  # nothing older that is good: the usual rules
        policy.begin_after(150)
        assert not isinstance(decide(policy, SkipLedger(), step, [spike(step, "nonfinite")], [150]), Stop)


@pytest.mark.parametrize("kind", ["loss_spike", "grad_spike"])
def test_a_run_resumed_right_before_bad_data_goes_back_proves_its_state_and_decides_as_the_one_left_alone(kind):
    bad, checkpoints = range(121, 140), [80, 100, 120]

    def run(policy: Policy, step: int, ledger: SkipLedger) -> Rollback:
        while True:
            if not ledger.skips((step - 1) * STEP_TOKENS, step * STEP_TOKENS):
                action = decide(policy, ledger, step, [spike(step, kind)] if step in bad else [], checkpoints)
                if isinstance(action, Rollback | Stop):
                    return action
            step += 1

    settings = GuardsConfig(grad_spike="rollback")
    whole, cut = SkipLedger(), SkipLedger()
    alone = run(Policy(settings), 101, whole)
    resumed = Policy(settings)
    resumed.begin_after(120)
    first = run(resumed, 121, cut)
    assert (first.to_step, first.skip, first.bad_since) == (100, None, 120)
    assert len(cut.entries) == 2
    assert cut.forget_after(120)
    resumed.begin_after(100)
    assert run(resumed, 101, cut) == alone
    assert cut.entries == whole.entries


@pytest.mark.parametrize(
    ("kind", "fields", "refused"),
    [
        ("loss_spike", {}, 10),
        ("loss_spike", {"loss_spike": "skip", "max_skips_in_a_row": 4}, 4),
        ("nonfinite", {"nonfinite": "rollback", "max_skips_in_a_row": 5}, 5),
    ],
)
def test_many_refused_updates_in_a_row_stop_a_run_that_cannot_go_back(kind, fields, refused):
    """A bad state is not taken to the end of the run by leaving out one window after the other."""
    policy, ledger, step, actions = Policy(GuardsConfig(**fields)), SkipLedger(), 100, []
    policy.begin_after(99)
    while not actions or not isinstance(actions[-1], Stop):
        if not ledger.skips((step - 1) * STEP_TOKENS, step * STEP_TOKENS):
            actions.append(decide(policy, ledger, step, [spike(step, kind)], []))
        step += 1
    assert len(actions) == refused
    assert (ledger.entries == ()) == (kind == "nonfinite")
    assert "weights are those of step 99" in actions[-1].reason


def test_a_run_does_not_end_with_a_state_that_no_step_has_proven():
    policy, ledger = Policy(GuardsConfig()), SkipLedger()
    policy.begin_after(100)
    assert policy.at_end(101, ledger, False, []) == Continue(), "nothing speaks against it"
    decide(policy, ledger, 101, [spike(101)], [])
    end = policy.at_end(101, ledger, False, [])
    assert isinstance(end, Stop)
    assert "no step after the checkpoint of step 100 was accepted" in end.reason
    assert policy.at_end(101, ledger, False, [50, 90, 100]).to_step == 90
    again = Policy(GuardsConfig())
    again.begin_after(101)  # saved in doubt, after the refused step
    assert isinstance(again.at_end(102, ledger, True, []), Stop)
    assert again.at_end(101, ledger, True, []) == Continue(), "it had ended there before"
    decide(policy, ledger, 102, [], [])
    assert policy.at_end(102, ledger, True, []) == Continue()


def test_a_state_is_in_doubt_while_it_is_unproven_and_while_updates_were_refused_lately():
    policy, ledger = Policy(GuardsConfig()), SkipLedger()
    assert policy.doubt(5, ledger) is None, "a new run"
    policy.begin_after(100)
    for step in range(101, 108):
        decide(policy, ledger, step, [], [])
        assert "of 8 have proven the checkpoint of step 100" in policy.doubt(step, ledger)
    decide(policy, ledger, 108, [], [])
    assert policy.doubt(108, ledger) is None
    decide(policy, ledger, 109, [spike(109)], [])
    assert policy.doubt(124, ledger) == "the updates of these steps were refused: 109"
    assert policy.doubt(125, ledger) is None


@pytest.mark.parametrize(("accepted", "ends"), [(1, Rollback), (8, Continue)])
def test_a_loaded_state_is_proven_by_as_many_accepted_steps_as_the_margin_has(accepted, ends):
    policy, ledger = Policy(GuardsConfig()), SkipLedger()
    policy.begin_after(200)
    for step in range(201, 201 + accepted):
        decide(policy, ledger, step, [], [100])
    bad = range(201 + accepted, 204 + accepted)
    actions = after_bad_steps(policy, ledger, bad, [100], "nonfinite", bad[0])
    assert [type(action) for action in actions] == [Continue, Continue, ends]
    assert getattr(actions[-1], "skip", None) is None


@pytest.mark.parametrize("resume_from", [101, 103])
def test_a_resumed_run_decides_as_the_one_that_was_left_alone(resume_from):
    """It passes over the steps it refused before, and still counts them."""
    bad = (101, 102, 104)

    def run(first: int, ledger: SkipLedger, last: int = 110) -> object:
        policy, action = Policy(GuardsConfig()), None
        for step in range(first, last):
            if not ledger.skips((step - 1) * STEP_TOKENS, step * STEP_TOKENS):
                action = decide(policy, ledger, step, [spike(step)] if step in bad else [], [50])
                if isinstance(action, Rollback):
                    break
        return action

    whole, cut = SkipLedger(), SkipLedger()
    run(90, whole)
    run(90, cut, last=103)
    resumed = SkipLedger.from_state(jsonio.loads(jsonio.dumps_line(cut.state())))
    assert isinstance(run(resume_from, resumed), Rollback)
    assert resumed.entries == whole.entries


def entry(first: int, end: int) -> Skipped:
    return Skipped(first, end, 7, "loss_spike", "refuse", "a reason")


def test_the_record_survives_on_disk_and_merges(tmp_path):
    ledger = SkipLedger([entry(100, 200), entry(500, 900)])
    ledger.save(tmp_path)
    loaded = SkipLedger.load(tmp_path)
    assert loaded.entries == ledger.entries
    loaded.merge(SkipLedger([entry(500, 900), entry(800, 1000)]))
    assert len(loaded.entries) == 3
    assert loaded.tokens() == 100 + 500
    assert SkipLedger.load(tmp_path / "nowhere").entries == ()


@pytest.mark.parametrize("content", ['{"format": 2, "skipped": []}', '{"format": 1, "skipped": [{}]}', "{"])
def test_a_damaged_record_is_an_error_and_never_an_empty_one(tmp_path, content):
    (tmp_path / LEDGER_FILE).write_text(content)
    with pytest.raises(DamagedLedgerError, match=rf"{LEDGER_FILE} is not a readable record"):
        SkipLedger.load(tmp_path)


def test_a_damaged_record_is_rebuilt_from_the_checkpoint_and_the_pages_in_their_order(tmp_path):
    before, *since = [entry(100, 200), entry(700, 800), entry(300, 400)]
    for number, one in enumerate(since):
        page = tmp_path / f"{one.first}-loss_spike.json"
        page.write_bytes(jsonio.dumps_line({"skipped": asdict(one)}))
        os.utime(page, (number, number))
    (tmp_path / "5-loss_drop.json").write_text('{"skipped": null}')
    (tmp_path / "6-loss_spike.json").write_text('{"skipped"')
    assert rebuilt_ledger(tmp_path, [asdict(before)]).entries == (before, *since)


def test_a_checkpoint_of_the_way_that_was_given_up_is_known_by_its_ledger():
    then = SkipLedger([entry(100, 200)])
    now = SkipLedger([entry(100, 200), Skipped(300, 900, 90, "loss_spike", "rollback", "why", to_step=50)])
    assert now.abandons(80, then), "written before the run went back from step 90 to step 50"
    assert not now.abandons(50, then)
    assert not now.abandons(80, now), "written after it"
