"""The learning rate over the steps: every kind, stages with schedules of their own, and an anneal on top."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.config import config_from_values, config_yaml
from zero2all.config.schedule import (
    learning_rate,
    muon_momentum,
    schedule_lines,
    schedule_problems,
    steps_with_anneal,
    weight_decay_share,
)
from zero2all.config.training import (
    AnnealConfig,
    MuonConfig,
    OptimConfig,
    ScheduleConfig,
    StageConfig,
    StageScheduleConfig,
    model_at,
)
from zero2all.model.config import ModelConfig, RopeScaling

KINDS = ["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
SHAPES = ["linear", "1-sqrt", "cosine"]


def rates(steps, stages=(), anneal=None, until=None, **options):
    config = ScheduleConfig(**options)
    return [learning_rate(step, steps, 2.0, config, stages, anneal) for step in range(until or steps)]


def stage(from_step, **options):
    return StageConfig(f"from {from_step}", from_step, schedule=StageScheduleConfig(**options))


def test_linear_falls_in_equal_steps_to_its_lowest_share():
    found = rates(14, kind="linear", warmup_steps=4, min_lr_ratio=0.1)
    assert found[4:] == pytest.approx([2.0 - 0.2 * k for k in range(10)])


def test_inverse_sqrt_halves_when_the_steps_have_quadrupled():
    found = rates(401, kind="inverse_sqrt", warmup_steps=25, min_lr_ratio=0.0)
    assert found[24] == 2.0
    assert found[99] == pytest.approx(1.0)
    assert found[399] == pytest.approx(0.5)
    assert min(rates(4000, kind="inverse_sqrt", warmup_steps=4, min_lr_ratio=0.25)) == 0.5


@pytest.mark.parametrize(
    ("shape", "formula"),
    [
        ("linear", lambda y: 1 - y),
        ("1-sqrt", lambda y: 1 - y**0.5),
        ("cosine", lambda y: math.cos(math.pi * y / 2) ** 2),
    ],
)
def test_wsd_stays_at_the_top_and_then_falls_in_its_shape(shape, formula):
    found = rates(50, kind="wsd", warmup_steps=5, decay_steps=20, decay_shape=shape, min_lr_ratio=0.1)
    assert found[5:30] == [2.0] * 25
    assert found[30:] == pytest.approx([0.2 + 1.8 * formula((k + 1) / 20) for k in range(20)])
    assert found == rates(50, kind="wsd", warmup_steps=5, decay_share=0.4, decay_shape=shape, min_lr_ratio=0.1)


def test_a_schedule_spans_the_steps_up_to_the_next_stage_that_brings_its_own():
    stages = [StageConfig("data only", 10), stage(20, kind="linear", min_lr_ratio=0.0)]
    found = rates(30, stages, warmup_steps=4, min_lr_ratio=0.5)
    assert found[:20] == rates(20, warmup_steps=4, min_lr_ratio=0.5)
    # The stage goes on at the rate that was reached, and takes it to 0.
    assert found[20:] == pytest.approx([1.0 - k / 9 for k in range(10)])


def test_a_stage_moves_from_the_rate_that_was_reached_to_its_own_in_equal_steps():
    stages = [stage(10, kind="constant", lr_max=3.0, warmup_steps=4)]
    found = rates(20, stages, kind="constant", warmup_steps=0)
    assert found == [2.0] * 10 + [2.25, 2.5, 2.75] + [3.0] * 7
    down = rates(20, [stage(10, kind="constant", lr_max=1.0, warmup_steps=2)], kind="constant", warmup_steps=0)
    assert down[9:13] == [2.0, 1.5, 1.0, 1.0]


def test_a_stage_takes_what_it_does_not_set_from_the_run():
    options = {"kind": "wsd", "warmup_steps": 0, "decay_steps": 2, "decay_shape": "linear", "min_lr_ratio": 0.5}
    found = rates(20, [stage(10)], **options)
    assert found[8:10] == [1.5, 1.0]
    assert found[10:18] == [1.0] * 8
    assert found[18:] == [0.75, 0.5]
    assert rates(20, [stage(10, decay_share=0.4)], **options)[16:] == [0.875, 0.75, 0.625, 0.5]


def test_a_first_stage_replaces_the_schedule_of_the_run():
    stages = [stage(0, kind="linear", lr_max=1.0, warmup_steps=2, min_lr_ratio=0.0)]
    assert rates(5, stages, warmup_steps=3) == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert rates(5, [stage(0, kind="constant", warmup_steps=2)])[1:] == [2.0] * 4


@pytest.mark.parametrize("shape", SHAPES)
def test_an_anneal_falls_from_the_rate_of_the_step_before_to_its_share_of_it(shape):
    anneal = AnnealConfig(from_step=20, steps=10, shape=shape, to_share=0.25)
    plain, found = rates(50, warmup_steps=5), rates(50, anneal=anneal, warmup_steps=5)
    assert found[:20] == plain[:20]
    assert found[29] == pytest.approx(0.25 * plain[19])
    assert found[30:] == [found[29]] * 20
    assert all(later < earlier for earlier, later in itertools.pairwise(found[19:30]))
    assert steps_with_anneal(50, anneal) == 30
    assert steps_with_anneal(50, None) == 50


def test_an_anneal_overrules_the_schedules_of_later_stages():
    anneal = AnnealConfig(from_step=5, steps=10, shape="linear")
    stages = [stage(8, lr_max=9.0, warmup_steps=1)]
    assert rates(20, stages, anneal, kind="constant", warmup_steps=0)[5:15] == pytest.approx(
        [2.0 - 0.2 * k for k in range(1, 11)]
    )


schedules = st.builds(
    ScheduleConfig,
    kind=st.sampled_from(KINDS),
    warmup_steps=st.integers(0, 40),
    min_lr_ratio=st.floats(0, 1),
    decay_share=st.floats(0, 0.5),
    decay_steps=st.none() | st.integers(0, 30),
    decay_shape=st.sampled_from(SHAPES),
)
overrides = st.builds(
    StageScheduleConfig,
    lr_max=st.none() | st.floats(0.1, 4),
    warmup_steps=st.integers(1, 20),
    kind=st.none() | st.sampled_from(KINDS),
    min_lr_ratio=st.none() | st.floats(0, 1),
    decay_share=st.none() | st.floats(0, 0.5),
    decay_steps=st.none() | st.integers(0, 20),
    decay_shape=st.none() | st.sampled_from(SHAPES),
)
anneals = st.none() | st.builds(
    AnnealConfig, st.integers(1, 160), st.integers(1, 40), st.sampled_from(SHAPES), st.floats(0, 1)
)


@given(schedules, st.lists(st.tuples(st.integers(1, 40), overrides), max_size=3), anneals, st.integers(60, 150))
@settings(max_examples=150, deadline=None)
def test_no_rate_jumps_and_none_leaves_its_bounds(config, later, anneal, steps):
    borders = itertools.accumulate(gap for gap, _ in later)
    stages = [
        StageConfig(str(at), at + 45, schedule=override) for at, (_, override) in zip(borders, later, strict=True)
    ]
    if schedule_problems(steps, 2.0, config, stages):
        return
    end = max(steps, steps_with_anneal(steps, anneal))
    found = [learning_rate(step, steps, 2.0, config, stages, anneal) for step in range(end)]
    tops = [2.0] + [override.lr_max for _, override in later if override.lr_max is not None]
    assert all(math.isfinite(rate) and 0 <= rate <= max(tops) * (1 + 1e-12) for rate in found)

    # The longest stride any piece may take: 1 / warmup up, 1 / sqrt(decay) or 1 / length down.
    def stride(warmup, decay, kind, length):
        falls = {"wsd": decay and decay**-0.5, "constant": 0.0, "inverse_sqrt": 0.3 if warmup else 1.0}
        down = falls.get(kind, math.pi / 2 / max(1, length - 1 - warmup))
        return max(1 / warmup if warmup else 0.0, down)

    border_steps = [0, *(s.from_step for s in stages if s.from_step < steps), steps]
    lengths = [b - a for a, b in itertools.pairwise(border_steps)]
    allowed = 0.0
    for index, length in enumerate(lengths):
        over = stages[index - 1].schedule if index else None
        shares = over.decay_share if over and over.decay_share is not None else config.decay_share
        decay = over.decay_steps if over and over.decay_steps is not None else config.decay_steps
        if over and over.decay_share is not None and over.decay_steps is None:
            decay = None
        decay = round(length * shares) if decay is None else decay
        warmup = over.warmup_steps if over else config.warmup_steps
        allowed = max(allowed, stride(warmup, decay, (over and over.kind) or config.kind, length))
    if anneal:
        allowed = max(allowed, anneal.steps**-0.5, math.pi / 2 / anneal.steps)
    jumps = np.abs(np.diff(found))
    assert jumps.max() <= max(tops) * allowed * (1 + 1e-9)
    if config.warmup_steps and not (anneal and anneal.from_step < config.warmup_steps):
        assert found[0] <= 2.0 / config.warmup_steps


def test_the_lines_of_a_schedule_name_what_begins_where():
    config = ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20, decay_shape="linear", min_lr_ratio=0.0)
    stages = [StageConfig("long", 40), stage(60, kind="linear")]
    assert schedule_lines(100, 2.0, config, stages) == [
        "step         0  lr 2.000e-01  warmup",
        "step        10  lr 2.000e+00  stable",
        "step        40  lr 1.900e+00  stage long: decay (linear)",
        "step        60  lr 0.000e+00  stage from 60: linear",
        "step        99  lr 0.000e+00  last step",
    ]
    lines = schedule_lines(100, 2.0, config, [stage(70, kind="wsd", decay_share=1.0)])
    assert [line.split("  ")[-1] for line in lines if "step        70" in line] == ["stage from 70: decay (linear)"]
    lines = schedule_lines(100, 2.0, config, [StageConfig("long", 35)], AnnealConfig(50, 10))
    assert lines[2] == "step        35  lr 2.000e+00  stage long"
    assert lines[3].endswith("anneal (1-sqrt)")
    assert lines[-1] == "step        59  lr 0.000e+00  last step"


@pytest.mark.parametrize(
    ("config", "stages", "field"),
    [
        (ScheduleConfig(warmup_steps=101), [], "schedule.warmup_steps"),
        (ScheduleConfig(warmup_steps=60), [stage(50)], "schedule.warmup_steps"),
        (ScheduleConfig("wsd", warmup_steps=50, decay_share=0.51), [], "schedule.decay_share"),
        (ScheduleConfig("wsd", warmup_steps=50, decay_steps=51), [], "schedule.decay_steps"),
        (ScheduleConfig(warmup_steps=1), [stage(90, lr_max=1.0, warmup_steps=11)], "stages[0].schedule.warmup_steps"),
        (ScheduleConfig(warmup_steps=1, min_lr_ratio=0.0), [stage(90)], "stages[0].schedule.lr_max"),
    ],
)
def test_what_does_not_fit_is_named(config, stages, field):
    (problem,) = schedule_problems(100, 2.0, config, stages)
    assert problem.field == field


def test_a_stage_that_would_jump_must_say_how_long_it_takes():
    (problem,) = stage(10, lr_max=1.0).problems("stages[0]")
    assert problem.field == "stages[0].schedule.warmup_steps"
    assert stage(10, lr_max=1.0, warmup_steps=1).problems("s") == []


def test_the_example_of_the_guide_is_a_config_without_problems():
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    example = text.split("## Stages\n\n```yaml\n")[1].split("```")[0]
    config = config_from_values(yaml.safe_load(example), "docs/optimizers.md")
    assert config_from_values(yaml.safe_load(config_yaml(config)), "itself") == config
    assert schedule_problems(config.train.steps, config.optim.lr_max, config.schedule, config.stages) == []
    steps = config.train.steps
    rates = [learning_rate(at, steps, 3e-4, config.schedule, config.stages) for at in (*range(0, steps, 97), steps - 1)]
    assert (max(rates), rates[-1]) == (3e-4, 0.0)
    assert model_at(99_999, config.model, config.stages).rope_scaling.kind == "yarn"


def test_a_stretching_without_its_original_length_is_named():
    (problem,) = StageConfig("long", 10, rope_scaling=RopeScaling("yarn", 4.0)).problems("stages[1]")
    assert problem.field == "stages[1].rope_scaling.original_seq_len"


def test_rotary_positions_stay_stretched_until_a_stage_says_otherwise():
    model, yarn = ModelConfig(vocab_size=8), RopeScaling("yarn", 4.0, 2048)
    stages = [
        StageConfig("longer", 10, rope_theta=5e5),
        StageConfig("longest", 20, rope_scaling=yarn),
        StageConfig("anneal", 30),
        StageConfig("back", 40, rope_theta=10000.0, rope_scaling=RopeScaling()),
    ]
    seen = [
        (model_at(step, model, stages).rope_theta, model_at(step, model, stages).rope_scaling) for step in range(50)
    ]
    assert seen[0] == seen[9] == (10000.0, RopeScaling())
    assert seen[10] == seen[19] == (5e5, RopeScaling())
    assert seen[20] == seen[39] == (5e5, yarn)
    assert seen[40] == seen[49] == (10000.0, RopeScaling())


def test_cosine_rises_in_equal_steps_and_falls_to_its_lowest_share_exactly_at_the_last_step():
    found = rates(50, warmup_steps=4, min_lr_ratio=0.1)
    assert found[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert found[-1] == pytest.approx(0.2, rel=1e-12)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[4:]))
    assert rates(51, warmup_steps=0, min_lr_ratio=0.1)[25] == pytest.approx((2.0 + 0.2) / 2)


def momenta(steps, anneal=None, stages=(), top=0.95, warmup_share=0.2, **schedule):
    optim = OptimConfig("muon", momentum=top, muon=MuonConfig(momentum_warmup_share=warmup_share))
    config = ScheduleConfig(warmup_steps=0, **schedule)
    return [muon_momentum(step, steps, optim, config, stages, anneal) for step in range(steps)]


def test_muons_momentum_rises_over_a_share_of_the_run_and_falls_with_the_rate():
    found = momenta(20, kind="wsd", decay_steps=5)
    assert found == pytest.approx([0.875, 0.9, 0.925, *[0.95] * 12, 0.94, 0.93, 0.92, 0.91, 0.9])
    assert momenta(20, kind="constant") == pytest.approx([0.875, 0.9, 0.925, *[0.95] * 17])
    falls = [0.95 - 0.05 * step / 19 for step in range(20)]
    assert momenta(20, kind="cosine") == pytest.approx([0.875, 0.9, 0.925, *falls[3:]])  # the lower one of both


def test_an_anneal_and_the_last_stage_end_muons_momentum():
    anneal = AnnealConfig(from_step=10, steps=5)
    assert momenta(20, anneal, kind="constant")[9:] == pytest.approx([0.95, 0.94, 0.93, 0.92, 0.91, *[0.9] * 6])
    end = stage(16, kind="linear")
    assert momenta(20, None, [end], kind="constant")[15:] == pytest.approx(
        [0.95, 0.95, 0.95 - 0.05 / 3, 0.95 - 0.1 / 3, 0.9]
    )


def test_the_decay_is_constant_or_falls_by_a_half_cosine_to_0():
    assert {weight_decay_share(step, 10, OptimConfig()) for step in range(12)} == {1.0}
    found = [weight_decay_share(step, 10, OptimConfig(decay_schedule="cosine")) for step in (0, 5, 10, 15)]
    assert found == pytest.approx([1.0, 0.5, 0.0, 0.0])
