"""Plans of sweeps: axes, factors, sizes, rungs; halving beside the full grid; searches that are continued; mixtures."""

import json
import shutil

import pytest

from tests.experiments.conftest import alone
from zero2all.common.errors import UsageError
from zero2all.config import load_config
from zero2all.experiments.study import LEDGER_NAME
from zero2all.experiments.sweep import HALVING_RUNGS, Axis, budget_rungs, parse_axis
from zero2all.experiments.sweep_report import findings, sweep_rows, table
from zero2all.model.config import parameter_counts
from zero2all.train.validate import all_rows

RATE, RATES = "optim.lr_max", "optim.lr_max=0.01,0.02"


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("optim.lr_max=1e-3,2e-3", Axis(RATE, ("1e-3", "2e-3"))),
        ("optim.lr_max=x0.5, x1,x2e0", Axis(RATE, (0.5, 1.0, 2.0), is_factor=True)),
        ("size=3M,6M", Axis("size", (3e6, 6e6))),
        ("optim.lr_max=1e-4..1e-2", Axis(RATE, (), 1e-4, 1e-2)),
        ("data.mixture={en: 1, zh: 2},{en: 2, zh: 1}", Axis("data.mixture", ("{en: 1, zh: 2}", "{en: 2, zh: 1}"))),
    ],
)
def test_an_axis_is_read(text, axis):
    assert parse_axis(text) == axis


VALUES = ["1e-3,,2e-3", "x1,xx", "x0,x1", "x-1,x1", "2e-3..1e-3", "0..1", "..", "1..b"]
NAMES = "train.name=quickstart,b"  # it would go on with a run that is no trial, and delete its checkpoints
NO_AXIS = [
    *(f"{RATE}={said}" for said in VALUES),
    "size=0,3M",
    "size=x2",
    "size=big",
    RATE,
    "lr_max=1,2",
    "=1",
    "",
    NAMES,
]


@pytest.mark.parametrize("text", NO_AXIS)
def test_what_is_no_axis_is_refused(text):
    with pytest.raises(
        UsageError, match=r"is not understood\. Expected FIELD|got .* expected values separated by commas|Use --name"
    ):
        parse_axis(text)


def test_a_factor_multiplies_what_a_rule_gives(work, sweep_of):
    muon = ("--optim.kind=muon", "--optim.lr_max=null", "--train.steps=null")
    sweep = sweep_of("train.tokens=4M,40M", "optim.lr_max=x0.5,x1", overrides=muon)
    rates = {trial.settings: trial.config.optim.lr_max for trial in sweep.trials}
    ruled = [load_config(work.root / "tiny.yaml", [*muon, f"--train.tokens={n}"]).optim.lr_max for n in ("4M", "40M")]
    assert list(rates.values()) == [0.5 * ruled[0], ruled[0], 0.5 * ruled[1], ruled[1]]
    with pytest.raises(UsageError, match=r"--over optim\.kind: factors need a field with a number; it is 'adamw'"):
        sweep_of("optim.kind=x1,x2")


def test_sizes_are_those_of_the_model_with_its_vocabulary(sweep_of):
    sweep = sweep_of("size=0.2M,1M,4M", seeds=2)
    counts = [parameter_counts(trial.config.model)["total"] for trial in sweep.trials]
    assert all(0.6 < count / trial.settings[0] < 1.6 for count, trial in zip(counts, sweep.trials, strict=True))
    assert [trial.config.train.seed for trial in sweep.trials] == [1234, 1235] * 3


def test_rungs_need_a_constant_rate_and_steps_beyond_the_warmup(sweep_of):
    with pytest.raises(UsageError, match=r"need a constant rate up to there: set --schedule\.kind wsd"):
        sweep_of(RATES, rungs=(0.25,), overrides=("--schedule.kind=cosine",))
    for rungs, warmup in (((1 / 9,), 3), ((0.5, 0.51), 1)):
        with pytest.raises(UsageError, match=f"leaves too few for a warmup of {warmup} and its decay"):
            sweep_of(RATES, rungs=rungs, overrides=(f"--schedule.warmup_steps={warmup}",)).planned_steps()
    with pytest.raises(UsageError, match="at most at the tokens of the run, 4,608"):
        budget_rungs([9000], 18 * 256)
    assert budget_rungs([2304, 1152, 4608], 18 * 256) == (0.25, 0.5)


def test_a_plan_is_continued_only_as_it_was(work, sweep_of):
    empty = {"search": "random", "trials": 0}  # no trial is run
    for _ in range(2):
        sweep_of(RATES, **empty).run(lambda *_: None)
    with pytest.raises(UsageError, match="with other values of: seeds"):
        sweep_of(RATES, seeds=2, **empty).run(lambda *_: None)
    config = work.root / "tiny.yaml"
    config.write_text(config.read_text().replace("warmup_steps: 1", "warmup_steps: 2"))
    with pytest.raises(UsageError, match="with other values of: values"):
        sweep_of(RATES, **empty).run(lambda *_: None)


def test_budgets_give_a_branch_of_every_trial_and_the_planned_steps(sweep_of):
    sweep = sweep_of("train.steps=12,18", rungs=(1 / 3, 2 / 3))
    sweep.run(lambda *_: None)
    results = sweep.study.results
    assert sum(result["steps"] for result in results.values()) == sweep.planned_steps()
    ends = {"s-000-at4": 4, "s-000-at8": 8, "s-000": 12, "s-001-at6": 6, "s-001-at12": 12, "s-001": 18}
    assert {key: results[key]["trained_tokens"] // 256 for key in results if "@" not in key} == ends


def test_halving_chooses_what_the_full_grid_chooses(work, sweep_of):
    words = ["optim.lr_max=1e-5,1e-4,1e-3,3e-3,1e-2,3e-2"]
    half = {"overrides": ("--train.steps=36",), "rungs": HALVING_RUNGS, "halving": True}
    sweep = sweep_of(*words, **half)
    sweep.run(lambda *_: None)
    grid = {run: all_rows(of)["bits_per_byte"] for run, of in alone(sweep, *(t.run for t in sweep.trials)).items()}
    best, second, *others = sweep_rows(sweep)
    assert sweep.value_of(sweep.trials[-1]) == min(grid.values()) == best.mean.value
    assert best.mean.value < second.mean.value < others[0].mean.value
    assert sum(result["steps"] for result in sweep.study.results.values()) == sweep.planned_steps() < 0.5 * 6 * 36
    assert "".join(map("".join, table(sweep, others))).count("not trained further") == 4
    assert not list(work.runs.glob("s-*/checkpoints"))
    again = sweep_of(*words, **half)
    again.run(lambda *_: None)
    assert table(again, sweep_rows(again)) == table(sweep, sweep_rows(sweep))


def test_a_search_that_is_continued_suggests_what_it_would_have(work, sweep_of):
    pytest.importorskip("optuna")
    axes = ["optim.lr_max=1e-4..1e-1", "optim.weight_decay=x0.70711,x1"]
    plan = {"search": "tpe", "trials": 4, "overrides": ("--train.steps=4",)}
    sweep, again = sweep_of(*axes, **plan), sweep_of(*axes, **plan)
    sweep.run(lambda *_: None)
    assert not any(RATE in line for line in findings(sweep, sweep_rows(sweep))), "the range goes on beyond its values"
    ledger = sweep.study.folder / LEDGER_NAME
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if json.loads(line)["task"] in ("s-000", "s-001")))
    for run in ("s-002", "s-003"):
        shutil.rmtree(work.run(run))
    again.run(lambda *_: None)
    assert [trial.settings for trial in again.trials] == [trial.settings for trial in sweep.trials]
    assert table(again, sweep_rows(again)) == table(sweep, sweep_rows(sweep))


def test_mixture_try_writes_the_config_of_the_best_mixture(work, z2a):
    words = ["mixture", "try", work.root / "tiny.yaml", "--work", work.root, "--target", "10K", "--at-once", 2]
    assert "expected channels with numbers" in z2a.refused(2, *words, "--weights", "fr=1")
    said = z2a.done(*words, "--runs", 4, "--weights", "en=2,zh=1")
    found = load_config(work.root / "studies" / "mixture" / "mixture.yaml").data.mixture
    assert sum(found.values()) == pytest.approx(1, abs=1e-3)
    assert f"en: {found['en']:.3f} (" in said
