"""The learning rate over the steps: every kind, stages with schedules of their own, and an anneal on top."""

import itertools
import math
from pathlib import Path

import pytest
import yaml

from zero2all.config import config_from_values, schedule, training
from zero2all.config.schedule import learning_rate, schedule_lines, schedule_problems
from zero2all.config.training import AnnealConfig, OptimConfig, ScheduleConfig, StageConfig, model_at
from zero2all.model.config import ModelConfig, RopeScaling


def rates(steps, stages=(), anneal=None, **options):
    return [learning_rate(step, steps, 2.0, ScheduleConfig(**options), stages, anneal) for step in range(steps)]


def stage(from_step, **options):
    return StageConfig(f"from {from_step}", from_step, schedule=training.StageScheduleConfig(**options))


def test_cosine_and_linear_rise_in_equal_steps_and_fall_to_their_lowest_share_exactly_at_the_last_step():
    found = rates(50, warmup_steps=4, min_lr_ratio=0.1)
    assert found[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert found[-1] == pytest.approx(0.2, rel=1e-12)
    assert rates(51, warmup_steps=0, min_lr_ratio=0.1)[25] == pytest.approx((2.0 + 0.2) / 2)
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
    found = rates(20, [stage(10, kind="constant", lr_max=3.0, warmup_steps=4)], kind="constant", warmup_steps=0)
    assert found == [2.0] * 10 + [2.25, 2.5, 2.75] + [3.0] * 7
    down = rates(20, [stage(10, kind="constant", lr_max=1.0, warmup_steps=2)], kind="constant", warmup_steps=0)
    assert down[9:13] == [2.0, 1.5, 1.0, 1.0]


def test_a_stage_takes_what_it_does_not_set_from_the_run_and_a_first_one_replaces_its_schedule():
    options = {"kind": "wsd", "warmup_steps": 0, "decay_steps": 2, "decay_shape": "linear", "min_lr_ratio": 0.5}
    found = rates(20, [stage(10)], **options)
    assert found[8:10] == [1.5, 1.0]
    assert found[10:18] == [1.0] * 8
    assert found[18:] == [0.75, 0.5]
    assert rates(20, [stage(10, decay_share=0.4)], **options)[16:] == [0.875, 0.75, 0.625, 0.5]
    stages = [stage(0, kind="linear", lr_max=1.0, warmup_steps=2, min_lr_ratio=0.0)]
    assert rates(5, stages, warmup_steps=3) == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert rates(5, [stage(0, kind="constant", warmup_steps=2)])[1:] == [2.0] * 4


def test_an_anneal_falls_from_the_rate_of_the_step_before_to_its_share_of_it():
    anneal = AnnealConfig(from_step=20, steps=10, shape="1-sqrt", to_share=0.25)
    plain, found = rates(50, warmup_steps=5), rates(50, anneal=anneal, warmup_steps=5)
    assert found[:20] == plain[:20]
    shares = [1 - 0.75 * ((k + 1) / 10) ** 0.5 for k in range(10)]
    assert found[20:30] == pytest.approx([plain[19] * share for share in shares])
    assert found[30:] == [found[29]] * 20
    assert (schedule.steps_with_anneal(50, anneal), schedule.steps_with_anneal(50, None)) == (30, 50)
    anneal, late = AnnealConfig(from_step=5, steps=10, shape="linear"), [stage(8, lr_max=9.0, warmup_steps=1)]
    found = rates(20, late, anneal, kind="constant", warmup_steps=0)
    assert found[5:15] == pytest.approx([2.0 - 0.2 * k for k in range(1, 11)]), "later stages are overruled"


def test_an_anneal_with_another_end_goes_on_from_the_rate_that_was_reached_and_ends_at_the_same():
    first = AnnealConfig(from_step=10, steps=10, shape="linear", to_share=0.1)
    sooner = AnnealConfig(from_step=14, steps=3, shape="linear", to_share=0.1, before=first)
    later = AnnealConfig(from_step=14, steps=12, shape="linear", to_share=0.1, before=first)
    plain = rates(40, anneal=first, kind="constant", warmup_steps=0)
    for changed, end in ((sooner, 17), (later, 26)):
        found = rates(40, anneal=changed, kind="constant", warmup_steps=0)
        assert found[:14] == plain[:14]
        steps = [found[13] - (found[13] - 0.2) * (k + 1) / (end - 14) for k in range(end - 14)]
        assert found[14:end] == pytest.approx(steps)
        assert schedule.steps_with_anneal(40, changed) == end
        falls = momenta(changed, kind="constant")
        assert all(later <= before for before, later in itertools.pairwise(falls[9:]))
    assert momenta(sooner, kind="constant")[16] == pytest.approx(0.9)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (4, 4), (5, 4)])
def test_the_shortest_runs_have_rates_too(kind, steps, warmup_steps):
    found = rates(steps, kind=kind, warmup_steps=warmup_steps, min_lr_ratio=0.0, decay_steps=steps - warmup_steps)
    assert all(0 <= rate <= 2.0 for rate in found)
    if warmup_steps:
        assert found[:warmup_steps] == [2.0 * (step + 1) / warmup_steps for step in range(warmup_steps)]


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
    lines = schedule_lines(100, 2.0, config, [StageConfig("long", 35)], AnnealConfig(50, 10))
    assert lines[2] == "step        35  lr 2.000e+00  stage long"
    assert lines[3].endswith("anneal (1-sqrt)")
    assert lines[-1] == "step        59  lr 0.000e+00  last step"


@pytest.mark.parametrize(
    ("config", "stages", "field"),
    [
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


def test_a_stage_must_say_how_long_a_jump_takes_and_from_which_length_it_stretches():
    (jump,) = stage(10, lr_max=1.0).problems("stages[0]")
    assert jump.field == "stages[0].schedule.warmup_steps"
    assert stage(10, lr_max=1.0, warmup_steps=1).problems("stages[0]") == []
    (stretching,) = StageConfig("long", 10, rope_scaling=RopeScaling("yarn", 4.0)).problems("stages[0]")
    assert stretching.field == "stages[0].rope_scaling.original_seq_len"


def test_the_example_of_the_guide_is_a_config_without_problems():
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    example = text.split("## Stages\n\n```yaml\n")[1].split("```")[0]
    config = config_from_values(yaml.safe_load(example), "docs/optimizers.md")
    steps, schedule, stages = config.train.steps, config.schedule, config.stages
    assert schedule_problems(steps, config.optim.lr_max, schedule, stages) == []
    assert learning_rate(steps - 1, steps, 3e-4, schedule, stages) == 0.0
    assert model_at(99_999, config.model, stages).rope_scaling.kind == "yarn"


def test_rotary_positions_stay_stretched_until_a_stage_says_otherwise():
    model, yarn = ModelConfig(vocab_size=8), RopeScaling("yarn", 4.0, 2048)
    stages = [StageConfig("longer", 10, rope_theta=5e5), StageConfig("longest", 20, rope_scaling=yarn)]
    stages += [StageConfig("anneal", 30), StageConfig("back", 40, rope_theta=10000.0, rope_scaling=RopeScaling())]
    seen = [model_at(step, model, stages) for step in range(50)]
    assert {each.rope_theta for each in seen[:10] + seen[40:]} == {10000.0}
    assert {each.rope_theta for each in seen[10:40]} == {5e5}
    assert all(each.rope_scaling == (yarn if 20 <= step < 40 else RopeScaling()) for step, each in enumerate(seen))


def momenta(anneal=None, stages=(), **options):
    optim = OptimConfig("muon", momentum=0.95, muon=training.MuonConfig(momentum_warmup_share=0.2))
    config = ScheduleConfig(warmup_steps=0, **options)
    return [schedule.muon_momentum(step, 20, optim, config, stages, anneal) for step in range(20)]


def test_muons_momentum_rises_over_a_share_of_the_run_and_falls_with_the_rate_an_anneal_or_the_last_stage():
    rise = [0.875, 0.9, 0.925]
    assert momenta(kind="wsd", decay_steps=5) == pytest.approx([*rise, *[0.95] * 12, 0.94, 0.93, 0.92, 0.91, 0.9])
    assert momenta(kind="constant") == pytest.approx([*rise, *[0.95] * 17])
    falls = [0.95 - 0.05 * step / 19 for step in range(20)]
    assert momenta(kind="cosine") == pytest.approx([*rise, *falls[3:]])  # the lower one of both
    anneal, end = AnnealConfig(from_step=10, steps=5), [stage(16, kind="linear")]
    assert momenta(anneal, kind="constant")[9:] == pytest.approx([0.95, 0.94, 0.93, 0.92, 0.91, *[0.9] * 6])
    ended = [0.95, 0.95, 0.95 - 0.05 / 3, 0.95 - 0.1 / 3, 0.9]
    assert momenta(None, end, kind="constant")[15:] == pytest.approx(ended)


def test_the_decay_is_constant_or_falls_by_a_half_cosine_to_0():
    assert {schedule.weight_decay_share(step, 10, OptimConfig()) for step in range(12)} == {1.0}
    found = [schedule.weight_decay_share(step, 10, OptimConfig(decay_schedule="cosine")) for step in (0, 5, 10, 15)]
    assert found == pytest.approx([1.0, 0.5, 0.0, 0.0])
