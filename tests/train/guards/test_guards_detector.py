"""Planted spikes and drops are found, clean curves are left alone, and a restored detector goes on to the bit."""

import json
import math

import numpy as np
import pytest

from zero2all.common import jsonio
from zero2all.config.training import GuardsConfig
from zero2all.train.guards.detector import Detector, level_of

WARMUP = 100
FACTORS = {"loss_spike": 1.5, "loss_drop": 0.6, "grad_spike": 30}


def clean_curve(seed: int, steps: int) -> tuple[list[float], list[float]]:
    """A power law from 10.8 to about 2, relative noise of 0.5 to 3 % with correlation between steps, and a log-normal
    gradient norm that falls and scatters by 10 to 40 %."""
    rng = np.random.default_rng(seed)
    noise = (0.005, 0.01, 0.02, 0.03)[seed % 4]
    correlation, scatter = ((0.0, 0.1), (0.3, 0.25), (0.6, 0.4))[seed % 3]
    at = np.arange(1, steps + 1)
    errors = rng.standard_normal(steps) * noise
    for step in range(1, steps):
        errors[step] += correlation * errors[step - 1]
    losses = (1.8 + 9 * (1 + at / 30) ** -0.55) * (1 + errors)
    norms = (0.25 + 6 * (1 + at / 50) ** -0.7) * np.exp(scatter * rng.standard_normal(steps))
    return losses.tolist(), norms.tolist()


def observe_all(detector, losses, norms, first_step=1):
    found = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first_step):
        found += detector.observe(step, loss, norm, {"en": loss}, (step * 100, step * 100 + 100))
    return found


@pytest.mark.parametrize("curves", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_clean_curves_of_ten_thousand_steps_give_no_alarm(curves):
    alarms = []
    for seed in range(curves):
        alarms += observe_all(Detector(warmup_steps=WARMUP), *clean_curve(seed, 10_000))
    assert [alarm.text for alarm in alarms] == []


@pytest.mark.parametrize(
    ("kind", "seed"), [("loss_spike", 0), ("loss_spike", 3), ("loss_drop", 0), ("grad_spike", 1), ("grad_spike", 2)]
)
def test_planted_spikes_and_drops_are_found_at_their_step_and_nothing_else(kind, seed):
    losses, norms = clean_curve(seed, 1200)
    assert losses[1199] < 0.4 * losses[0], "the curve itself falls far"
    planted = sorted(np.random.default_rng(seed + 50).choice(np.arange(300, 1190, 12), 10, replace=False).tolist())
    for step in planted:
        (norms if kind == "grad_spike" else losses)[step - 1] *= FACTORS[kind]
    found = observe_all(Detector(warmup_steps=WARMUP), losses, norms)
    assert [(one.kind, one.step) for one in found] == [(kind, step) for step in planted]
    assert all(one.tokens == (one.step * 100, one.step * 100 + 100) for one in found)


def rare_rows(seed, steps, rows=16, share=0.004):
    """Rows of a clean run: now and then one is of a rare domain, at twice to four times the usual loss and with up to
    25 times the usual gradient. Returns their losses, the means without the highest quarter, and the norms."""
    rng = np.random.default_rng(seed)
    usual = 2.0 + 6 * (1 + np.arange(steps) / 60) ** -0.6
    losses = usual[:, None] * (1 + 0.08 * rng.standard_normal((steps, rows)))
    is_rare = rng.random((steps, rows)) < share
    is_rare[3500] = False
    losses = np.where(is_rare, np.minimum(usual[:, None] * rng.uniform(2, 4, (steps, rows)), 11.0), losses)
    norms = 0.23 * np.exp(0.1 * rng.standard_normal(steps))
    norms *= np.where(is_rare.any(axis=1), rng.uniform(3, 25, steps), 1.0)
    return losses, np.sort(losses, axis=1)[:, : rows * 3 // 4].mean(axis=1), norms


@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_of_rare_domains_are_no_spike_and_a_rise_of_all_rows_is_one(seed):
    rows, cores, norms = rare_rows(seed, 4000)
    losses = rows.mean(axis=1)
    losses[3000], cores[3000], norms[3500] = losses[3000] * 1.5, cores[3000] * 1.5, 7.0
    detector, found = Detector(warmup_steps=WARMUP, clip_grad_norm=1.0), []
    for step in range(1, 4001):
        values = (float(losses[step - 1]), float(norms[step - 1]), {}, (step, step + 1), float(cores[step - 1]))
        found += detector.observe(step, *values)
    assert [(one.kind, one.step) for one in found] == [("loss_spike", 3001), ("grad_spike", 3501)]


def test_a_norm_below_the_clip_norm_is_no_spike():
    """The norms of clean runs whose updates were refused: 0.74 where 0.23 is usual, clipped at 1.0."""
    losses, norms = zip(*((1.8 + 0.01 * (step % 7), 0.22 + 0.01 * (step % 3)) for step in range(300)), strict=True)
    norms = [*norms[:200], 0.74, *norms[201:250], 1.3, *norms[251:]]
    clipped, unclipped = Detector(clip_grad_norm=1.0), Detector()
    assert [one.step for one in observe_all(clipped, losses, norms)] == [251]
    assert [one.step for one in observe_all(unclipped, losses, norms)] == [201, 251]
    assert clipped.limits(302).grad_norm == 1.0


def test_a_long_gradient_without_an_unusual_row_is_a_spike_also_where_a_step_has_one_row():
    detector, found = Detector(clip_grad_norm=1.0), []
    for step in range(1, 301):
        loss, norm = 2.0 + 0.01 * (step % 7), 7.0 if step % 50 == 0 else 0.23
        found += detector.observe(step, loss, norm, {}, (step, step + 1), loss - 1e-16 * (step % 3))
    assert [(one.kind, one.step) for one in found] == [("grad_spike", step) for step in (100, 150, 200, 250, 300)]


def test_a_state_without_core_losses_is_continued():
    """As older versions wrote it."""
    losses, norms = clean_curve(6, 330)
    losses[300:] = [loss * 1.8 for loss in losses[300:]]
    first, resumed = Detector(), Detector()
    observe_all(first, losses[:310], norms[:310])
    state = first.state()
    del state["cores"]
    state["limits"] = [row[:6] for row in state["limits"]]
    state["flagged_in_a_row"] = [row[:2] for row in state["flagged_in_a_row"]]
    resumed.restore(state)
    found = observe_all(resumed, losses[310:], norms[310:], 311)
    assert {one.kind for one in found} == {"loss_spike"}
    assert found == observe_all(first, losses[310:], norms[310:], 311)


def test_the_first_steps_after_a_load_are_judged_by_the_highest_loss_known_where_the_window_is_short():
    detector = Detector()
    observe_all(detector, [5.0, 4.0, 4.5], [1.0] * 3)
    assert math.isinf(detector.limits(4).loss)
    detector.distrust()
    assert (detector.limits(4).loss, detector.limits(11).usual_loss) == (10.0, 4.5)
    assert math.isinf(detector.limits(12).loss), "8 steps"
    assert [one.kind for one in observe_all(detector, [10.5], [1.0], 4)] == ["loss_spike"]


def test_noise_in_a_flat_curve_is_no_spike():
    losses = [2.0 + 1e-6 * (step % 3) for step in range(400)]
    losses[300] = 2.0 + 5e-3  # thousands of sigma, a quarter of a percent
    detector = Detector()
    assert observe_all(detector, losses, [1.0] * 400) == []
    assert detector.limits(402).loss == pytest.approx(2.0 * 1.05, rel=1e-4)


def test_nobody_is_judged_before_there_are_values_enough_or_before_from_step():
    losses = [3.0] * 250
    losses[60] = losses[150] = 30.0  # the first before min_steps, both before from_step
    losses[240] = 300.0
    assert [one.step for one in observe_all(Detector(GuardsConfig(spike_from_step=200)), losses, [1.0] * 250)] == [241]


def test_a_spike_in_the_warmup_is_found_and_limits_there_are_wider():
    losses, norms = clean_curve(2, 900)
    losses[599] *= 3.0
    norms[799] *= 300
    warming, settled = Detector(warmup_steps=1000), Detector()
    found = observe_all(warming, losses, norms)
    assert [(one.kind, one.step) for one in found] == [("loss_spike", 600), ("grad_spike", 800)]
    observe_all(settled, losses, norms)
    wide, narrow = warming.limits(902), settled.limits(902)
    assert wide.loss - wide.usual_loss == pytest.approx(2 * (narrow.loss - narrow.usual_loss))
    assert wide.loss_low - wide.usual_loss == pytest.approx(2 * (narrow.loss_low - narrow.usual_loss))
    assert wide.grad_norm / wide.usual_grad_norm == pytest.approx((narrow.grad_norm / narrow.usual_grad_norm) ** 2)
    assert warming.limits(1002) == narrow


def test_a_spike_does_not_enter_the_window():
    losses, norms = clean_curve(1, 400)
    spiked = [50.0 if step in (300, 303, 306) else loss for step, loss in enumerate(losses)]
    detector, left_alone = Detector(), Detector()
    observe_all(detector, spiked, norms)
    observe_all(left_alone, losses, norms)
    assert detector.limits(410).loss < 1.3 * left_alone.limits(410).loss


def test_a_step_is_judged_by_the_limits_the_device_had():
    """Gate and verdict agree: limits(step) asked before the last two steps were observed are those used later."""
    losses, norms = clean_curve(2, 500)
    losses[449] *= 1.4
    detector, asked = Detector(), {}
    refused = []
    for step in range(1, 501):
        asked[step] = detector.limits(step)
        if step > 2:  # values arrive two steps late
            late = step - 2
            found = detector.observe(late, losses[late - 1], norms[late - 1], {}, (late, late + 1))
            gated = losses[late - 1] > asked[late].loss
            assert gated == any(one.kind == "loss_spike" for one in found)
            refused += [late] if gated else []
    assert refused == [450]


def test_limits_of_a_step_do_not_depend_on_how_early_values_arrive():
    losses, norms = clean_curve(5, 300)
    eager, late = Detector(), Detector()
    for step in range(1, 299):
        eager.observe(step, losses[step - 1], norms[step - 1], {}, (step, step + 1))
        if step > 1:
            late.observe(step - 1, losses[step - 2], norms[step - 2], {}, (step - 1, step))
        assert eager.limits(step + 1) == late.limits(step + 1)


def test_what_is_not_finite_is_reported_and_poisons_nothing():
    losses, norms = clean_curve(4, 400)
    losses[300], norms[310] = math.nan, math.inf
    detector = Detector()
    found = observe_all(detector, losses, norms)
    assert [(one.kind, one.step) for one in found] == [("nonfinite", 301), ("nonfinite", 311)]
    assert math.isfinite(detector.limits(402).loss)
    assert json.loads(jsonio.dumps_line(detector.state())) == detector.state()


def test_a_level_that_stays_is_the_new_level():
    losses = [2.0 + 0.01 * (step % 5) for step in range(400)] + [4.0 + 0.01 * (step % 5) for step in range(400)]
    found = observe_all(Detector(), losses, [1.0] * 800)
    assert [one.kind for one in found].count("loss_spike") == 32
    assert [one.step for one in found if one.kind == "level_shift"] == [432]
    assert all(one.onset_step == 401 for one in found if one.kind == "loss_spike")


def test_another_stage_starts_with_an_empty_window():
    detector = Detector()
    observe_all(detector, [2.0 + 0.01 * (step % 5) for step in range(200)], [1.0] * 200)
    with pytest.raises(ValueError, match="step 200 was observed after step 200"):
        detector.observe(200, 3.0, 1.0, {}, (0, 1))
    detector.restart()
    assert observe_all(detector, [5.0 + 0.01 * (step % 5) for step in range(200)], [1.0] * 200, 201) == []


@pytest.mark.parametrize("cut", [1, 64, 301, 340])
def test_a_restored_detector_goes_on_to_the_bit(cut):
    losses, norms = clean_curve(6, 400)
    for step in (*range(300, 340), 380):
        losses[step] *= 1.8
    whole = Detector(warmup_steps=10)
    expected = observe_all(whole, losses, norms)
    first = Detector(warmup_steps=10)
    found = observe_all(first, losses[:cut], norms[:cut])
    resumed = Detector(warmup_steps=10)
    resumed.restore(jsonio.loads(jsonio.dumps_line(first.state())))
    assert resumed.limits(cut + 1) == first.limits(cut + 1)
    found += observe_all(resumed, losses[cut:], norms[cut:], cut + 1)
    assert found == expected
    assert resumed.state() == whole.state()


def test_the_rule_follows_the_config_and_the_figures_of_a_window():
    level = level_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (level.mean, level.median, level.mad) == (22.0, 3.0, 1.0)
    assert level.sigma == pytest.approx(np.std([1, 2, 3, 4, 100]))
    losses = [3.0 + 0.01 * (step % 2) for step in range(60)]
    narrow = Detector(GuardsConfig(spike_window_steps=32, spike_sigmas=4.0, spike_from_step=50))
    assert observe_all(narrow, losses, [1.0] * 60) == []
    assert math.isinf(narrow.limits(49).loss)
    assert math.isfinite(narrow.limits(62).loss), "the window needs no more values than it holds"
    early = Detector(GuardsConfig(spike_window_steps=32, spike_from_step=40))
    observe_all(early, losses[:45], [1.0] * 45)
    assert math.isfinite(early.limits(47).loss)
