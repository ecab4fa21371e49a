"""The run is the same run: killed, stopped, annealed, spread over other processes or cut into other micro-batches.

Bit for bit where nothing but time was lost; to the last digits of float64 where sums are made in another order.
"""

import math
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.train.ranks import Launch, RankStarter
from tests.train.states import copies
from zero2all.common.errors import PeerFailureError
from zero2all.common.workspace import Workspace
from zero2all.config.schedule import learning_rate
from zero2all.config.training import AnnealConfig
from zero2all.track.reader import read_run
from zero2all.train import state as state_module
from zero2all.train import trainer
from zero2all.train.anneal import read_anneal, request_anneal
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.run import train

NO_DROPOUT = {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
STEPS = 10
STOPPED_AT = 4


def bits(run: Path, step: int) -> dict[str, bytes]:
    """Every weight, every moment, every counter of a checkpoint."""
    folder = run / f"checkpoints/step-{step:08d}"
    assert verified_checkpoint(folder).step == step
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    assert {name.split("-")[0] for name in files} >= {"model", "optimizer"}
    return files


@pytest.fixture(scope="module")
def lab(shared_work, tmp_path_factory) -> Workspace:
    """A workspace that all tests of many processes share; each has runs of its own name."""
    root = tmp_path_factory.mktemp("exact") / "work"
    shutil.copytree(shared_work.root, root)
    return Workspace(root)


@pytest.fixture(scope="module")
def ranks(warm, lab, tmp_path_factory):
    starter = RankStarter(warm, lab.root, tmp_path_factory.mktemp("ranks"))
    yield starter
    starter.stop()


# ---- one process, killed ----


# ---- many processes ----


def spread_config(config, name, zero=3, precision="float64", micro=2, save_every=0, optim=None, layers=1, **parallel):
    """5 samples a step, which neither 2 nor 3 processes divide."""
    return config(
        model={**NO_DROPOUT, "layers": layers},
        train={
            "name": name,
            "steps": STEPS,
            "tokens_per_step": 160,
            "precision": precision,
            "micro_batch_samples": micro,
        },
        optim=optim or {},
        checkpoint={"every_steps": save_every},
        # 4 passes, which 3 processes do not divide
        validation={"every_steps": 6, "tokens_per_source": 128, "batch_samples": 2},
        parallel={"zero": zero, **parallel},
    )


@dataclass(frozen=True)
class Course:
    """What a run did from its first step to its last."""

    losses: list[float]
    row_nats: list[list[float]]
    rows: dict[int, list[str]]
    held_out: dict[str, list[float]]

    def assert_same(self, other: "Course", tolerance: float, steps: int = STEPS) -> None:
        """The same samples in the same global order, every one once, and losses that agree."""
        assert self.rows == other.rows
        assert self.losses[:steps] == pytest.approx(other.losses[:steps], rel=tolerance, abs=0)
        for nats, wanted in zip(self.row_nats[:steps], other.row_nats[:steps], strict=True):
            assert nats == pytest.approx(wanted, rel=tolerance, abs=0)
        if steps == STEPS:
            assert self.held_out == {
                name: pytest.approx(curve, rel=tolerance) for name, curve in other.held_out.items()
            }


def course(run: Path, *launches: Launch) -> Course:
    """The attempts at one run, put together."""
    steps = [step for launch in launches for step in launch.steps()]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))  # none twice, none left out
    batches = [batch for launch in launches for batch in launch.global_rows().items()]
    assert [first for first, _ in batches] == list(range(0, STEPS * 160, 160))
    series = read_run(run).series
    held_out = {name: curve.value.tolist() for name, curve in series.items() if name.startswith("eval/")}
    assert len(held_out) == 6, "loss and bits per byte of two channels, and of both"
    return Course([step.loss for step in steps], [step.row_nats for step in steps], dict(batches), held_out)


@pytest.fixture(scope="module")
def alone(ranks, lab, config):
    """One process, never interrupted."""
    course_of = course(lab.run("alone"), ranks.finished(spread_config(config, "alone", zero=0)))
    rows = [row for batch in course_of.rows.values() for row in batch]
    assert len(rows) == len(set(rows)) == 5 * STEPS  # less than an epoch: every sample once
    return course_of


@pytest.fixture(scope="module")
def stopped(ranks, lab, config, tmp_path_factory):
    """A run sharded over two processes, one of which was asked to stop; and a copy of what it left."""
    launch = ranks(spread_config(config, "stopped"), 2, signals={1: (STOPPED_AT, signal.SIGTERM, 0.0)})
    launch.wait()
    kept = tmp_path_factory.mktemp("stopped") / "run"
    shutil.copytree(lab.run("stopped"), kept)
    return launch, kept


def test_two_processes_of_which_one_is_asked_to_stop_both_stop_at_the_same_step_and_save_once(stopped):
    launch, kept = stopped
    assert [trainer.wait() for trainer in launch.trainers] == [10, 10], launch.text()
    steps = [[step.step for step in launch.steps(rank)] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert STOPPED_AT <= steps[0][-1] <= STOPPED_AT + 1
    assert [folder.name for folder in list_checkpoints(kept)] == [f"step-{steps[0][-1]:08d}"]
    events = [event.kind for event in read_run(kept).events]
    assert (events.count("checkpoint"), events.count("preempted")) == (1, 1)


@pytest.mark.parametrize(("processes", "micro"), [(1, 5), (3, 1)])
def test_a_sharded_run_resumes_at_any_number_of_processes_and_micro_batch(
    ranks, lab, config, alone, stopped, processes, micro
):
    launch, kept = stopped
    shutil.rmtree(lab.run("stopped"))
    shutil.copytree(kept, lab.run("stopped"))
    rest = ranks.finished(spread_config(config, "stopped", micro=micro), processes)
    course(lab.run("stopped"), launch, rest).assert_same(alone, 1e-9)


def test_a_run_in_stages_that_is_stopped_goes_on_in_one_process(ranks, lab, config):
    def settings(name, **parallel):
        return spread_config(config, name, zero=0, layers=4, **parallel)

    def held_out(name):
        return {key: curve.value.tolist() for key, curve in read_run(lab.run(name)).series.items() if "eval/" in key}

    whole = ranks.finished(settings("whole")).steps()
    stages = settings("stages", pipeline=2, schedule="interleaved", chunks=2)
    first = ranks(stages, 2, signals={0: (7, signal.SIGTERM, 0.0)})
    assert first.wait() == [10, 10], first.text()
    steps = [*first.steps(), *ranks.finished(settings("stages")).steps()]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in whole], rel=1e-9, abs=0)
    assert [nats for step in steps for nats in step.row_nats] == pytest.approx(
        [nats for step in whole for nats in step.row_nats], rel=1e-9, abs=0
    )
    assert held_out("stages") == {name: pytest.approx(curve, rel=1e-9) for name, curve in held_out("whole").items()}
    bubble = read_run(lab.run("stages")).series["pipeline/bubble"].value
    assert len(bubble) == len(first.steps())
    assert all(0 < share < 1 for share in bubble)


@pytest.mark.parametrize(
    ("victim", "number", "step", "zero"), [(0, signal.SIGKILL, 7, 3), (1, signal.SIGSTOP, 9, 1)], ids=["dies", "hangs"]
)
def test_a_process_that_is_gone_ends_the_others_in_time_and_the_run_resumes(
    ranks, lab, config, alone, victim, number, step, zero
):
    name, timeout_seconds = f"lost {victim}", 8.0
    settings = spread_config(config, name, zero, save_every=3, timeout_seconds=timeout_seconds)
    launch = ranks(settings, 2, signals={victim: (step, number, 0.0)})
    other = launch.trainers[1 - victim]
    other.wait_until(lambda: len(launch.steps(victim)) >= step)
    assert other.wait() == PeerFailureError.exit_code, launch.text()
    said, traceback = other.text(), lab.run(name) / f"peer_failure-{1 - victim}.txt"
    assert f"z2a: Rank {1 - victim} of 2 of `{name}` failed after step {launch.steps(1 - victim)[-1].step}." in said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert str(traceback) in said
    assert "Traceback" in traceback.read_text()
    launch.trainers[victim].signal(signal.SIGKILL)
    assert launch.trainers[victim].wait() == -signal.SIGKILL
    rest = ranks.finished(settings, 2)
    first = rest.steps()[0].step
    assert first in (4, 7)  # a save that nobody waited for may not have been through
    assert [step.loss for step in rest.steps()] == pytest.approx(alone.losses[first - 1 :], rel=1e-9, abs=0)


def test_two_processes_go_back_together_and_leave_the_same_data_out(ranks, lab, config):
    steps = {}
    for processes in (1, 2):
        name = f"garbled {processes}"
        settings = config(
            model=NO_DROPOUT,
            train={"name": name, "steps": 16, "tokens_per_step": 160, "precision": "float64"},
            checkpoint={"every_steps": 4},
            validation={"every_steps": 0},
            guards={
                "spike_window_steps": 8,
                "spike_min_steps": 8,
                "spike_sigmas": 2.0,
                "spike_mads": 3.0,
                "rollback_after_spikes": 1,
                "rollback_margin_steps": 2,
                "skip_steps_after": 1,
            },
            parallel={"zero": 3},
        )
        launch = ranks.finished(settings, processes, garbled=(12 * 160,))
        steps[processes] = launch.steps()
        for rank in range(processes):
            assert [step.step for step in launch.steps(rank)] == [step.step for step in launch.steps()]
        events = [event.kind for event in read_run(lab.run(name)).events]
        assert "spike" in events
        assert (events.count("rollback"), events.count("finish")) == (1, 1)
    made = [step.step for step in steps[1]]
    assert made == [*range(1, 14), 9, 10, 11, 12, 15, 16]  # 13 spiked; back to 8; 13 and the one after left out
    assert [(step.step, step.first_token, step.updated) for step in steps[2]] == [
        (step.step, step.first_token, step.updated) for step in steps[1]
    ]
    assert [step.loss for step in steps[2]] == pytest.approx([step.loss for step in steps[1]], rel=1e-9, abs=0)


# ---- what changes in the middle of a run ----


class CrashError(Exception):
    """The end of an attempt, as far as the loop is concerned a process that was killed."""


@pytest.fixture
def after_step(monkeypatch):
    """Call something after a step of the runs that follow; a second call replaces the first."""
    train_step = trainer.train_step

    def arrange(step, action):
        def watched(*arguments):
            pending = train_step(*arguments)
            if pending.step == step:
                action()
            return pending

        monkeypatch.setattr(trainer, "train_step", watched)

    return arrange


def crash():
    raise CrashError


def quiet(_text):
    pass


def test_float16_skips_and_halves_where_gradients_overflow_and_resumes_exactly(work, config, monkeypatch, after_step):
    less = {"tokens_per_step": 64, "precision": "float16"}  # the CPU takes its time over float16
    settings = config(train=less, validation={"every_steps": 0, "tokens_per_source": 32})
    monkeypatch.setattr(state_module, "FIRST_SCALE", 2.0**20)  # too large for this model
    monkeypatch.setattr(state_module, "GROWTH_STEPS", 3)
    train_step, seen = trainer.train_step, []

    def watched(state, *rest):
        before = {name: value for name, value in copies(state).items() if "loss_scale" not in name}
        scale = float(state.loss_scale.scale)
        pending = train_step(state, *rest)
        result = pending.result()
        after = copies(state)
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        assert bool(changed) == result.updated == math.isfinite(result.grad_norm)
        assert math.isfinite(result.loss)
        seen.append((result.updated, scale, float(state.loss_scale.scale)))
        return pending

    monkeypatch.setattr(trainer, "train_step", watched)
    train(settings, work, say=quiet)
    monkeypatch.setattr(trainer, "train_step", train_step)
    assert not seen[0][0]
    assert all(after == before / 2 for updated, before, after in seen if not updated)
    updates = [(before, after) for updated, before, after in seen if updated]
    assert len(updates) >= 4
    assert [after / before for before, after in updates[:4]] == [1.0, 1.0, 2.0, 1.0]
    wanted = bits(work.run("run"), 8)
    shutil.rmtree(work.run("run"))
    with monkeypatch.context() as again:
        after_step(5, crash)  # between checkpoints, in the middle of the count that ends in a doubling
        with pytest.raises(CrashError):
            train(settings, work, say=quiet)
        again.setattr(state_module, "FIRST_SCALE", 1.0)  # what a checkpoint that forgot the scale would go on with
        after_step(0, crash)
        train(settings, work, say=quiet)
    assert bits(work.run("run"), 8) == wanted


def test_an_offloaded_run_that_crashed_ends_with_the_bits_of_the_run_left_alone(work, config, after_step):
    def settings(name):
        return config(
            train={"name": name, "steps": 7},
            parallel={"offload": "optimizer"},
            track={"update_ratios_every_steps": 2},
        )

    train(settings("alone"), work, say=quiet)
    after_step(5, crash)
    with pytest.raises(CrashError):
        train(settings("crashed"), work, say=quiet)
    after_step(0, crash)
    train(settings("crashed"), work, say=quiet)
    assert bits(work.run("crashed"), 7) == bits(work.run("alone"), 7)


def test_muon_follows_its_schedules_and_a_crashed_run_ends_with_the_bits_of_the_run_left_alone(
    work, config, after_step, monkeypatch
):
    def settings(name):
        return config(
            train={"name": name, "steps": 8, "tokens_per_step": 64},
            optim={"kind": "muon", "lr_max": 0.02, "decay_schedule": "cosine", "muon": {"momentum_warmup_share": 0.5}},
            schedule={"kind": "wsd", "decay_share": 0.25, "warmup_steps": 1},
        )

    train_step, seen = trainer.train_step, []

    def watched(*arguments):
        pending = train_step(*arguments)
        optimizer = arguments[0].optimizer
        seen.append((optimizer.momentum, optimizer.param_groups[0].decay / 0.1))
        return pending

    monkeypatch.setattr(trainer, "train_step", watched)
    train(settings("alone"), work, say=quiet)
    assert [momentum for momentum, _ in seen] == pytest.approx([0.875, 0.9, 0.925, 0.95, 0.95, 0.95, 0.925, 0.9])
    assert [share for _, share in seen] == pytest.approx([0.5 + 0.5 * math.cos(math.pi * k / 8) for k in range(8)])
    monkeypatch.setattr(trainer, "train_step", train_step)
    after_step(5, crash)
    with pytest.raises(CrashError):
        train(settings("crashed"), work, say=quiet)
    after_step(0, crash)
    train(settings("crashed"), work, say=quiet)
    assert bits(work.run("crashed"), 8) == bits(work.run("alone"), 8)


def test_an_anneal_wished_in_a_run_falls_from_there_ends_the_run_and_resumes_exactly(work, config, after_step):
    settings = config(train={"steps": 8}, schedule={"kind": "constant"}, checkpoint={"keep_last": 9})
    run = work.run("run")
    after_step(4, lambda: request_anneal(run, 7, "linear", 0.1))
    summary = train(settings, work, say=quiet)
    assert summary.step == 11  # longer than it was to be
    record = read_anneal(run, 99)
    assert record == AnnealConfig(from_step=4, steps=7, shape="linear", to_share=0.1)
    rates = read_run(run).series["lr"].value.tolist()
    assert rates[:4] == [learning_rate(step, 8, 0.01, settings.schedule) for step in range(4)]
    assert rates[4:] == pytest.approx([0.01 * (1 - 0.9 * (step + 1) / 7) for step in range(7)])
    wanted = bits(run, 11)
    for step in (9, 6):  # the end, and then the request, forgotten by the checkpoint that is left
        for folder in list_checkpoints(run):
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
        after_step(0, crash)
        assert train(settings, work, say=quiet).step == 11
        assert bits(run, 11) == wanted


def test_a_run_killed_before_the_checkpoint_after_an_anneal_began_anneals_from_the_same_step(work, config, after_step):
    settings = config(train={"steps": 8})
    run = work.run("run")
    after_step(4, lambda: request_anneal(run, 4, "1-sqrt", 0.0))
    train(settings, work, say=quiet)
    wanted = bits(run, 8)
    after_step(5, crash)
    for name in ("checkpoints", "metrics"):  # as it was before the first save
        shutil.rmtree(run / name)
    (run / "last_saved.json").unlink()
    record = (run / "anneal.json").read_bytes()
    with pytest.raises(CrashError):
        train(settings, work, say=quiet)
    after_step(0, crash)
    train(settings, work, say=quiet)
    assert (run / "anneal.json").read_bytes() == record
    assert bits(run, 8) == wanted


def test_positions_changed_by_a_stage_survive_a_resume(work, config, after_step):
    change = {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_seq_len": 32}}

    def settings(stage):
        return config(model={"max_seq_len": 64}, stages=[{"name": "long", "from_step": 4, "seq_len": 64, **stage}])

    run = work.run("run")
    train(settings({}), work, say=quiet)
    unchanged = bits(run, 8)
    shutil.rmtree(run)
    train(settings(change), work, say=quiet)
    wanted = bits(run, 8)
    assert wanted["model-00000-00000.safetensors"] != unchanged["model-00000-00000.safetensors"]
    shutil.rmtree(run)
    after_step(7, crash)
    with pytest.raises(CrashError):
        train(settings(change), work, say=quiet)
    after_step(0, crash)
    train(settings(change), work, say=quiet)
    assert bits(run, 8) == wanted


@pytest.mark.slow  # test_train_resume.py kills a shorter one
def test_a_run_of_60_steps_killed_five_times_ends_with_the_bits_of_the_run_left_alone(ranks, lab, config):
    def settings(name):
        length = {"name": name, "steps": 60}
        return config(train=length, checkpoint={"every_steps": 4}, validation={"every_steps": 25})

    ranks.finished(settings("left alone"))
    rng = random.Random(7)
    for attempt in range(5):
        # Somewhere in every sixth of the run, at no particular point of a step or a save.
        moment = (10 * attempt + rng.randint(5, 12), signal.SIGKILL, rng.uniform(0, 0.05))
        launch = ranks(settings("killed"), signals={0: moment})
        assert launch.wait() == [-signal.SIGKILL], launch.text()
    last = ranks.finished(settings("killed"))
    assert last.steps()[0].step > 40  # it did go on, and did not start over
    assert bits(lab.run("killed"), 60) == bits(lab.run("left alone"), 60)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)], ids=["dies", "hangs"])
def test_a_stage_that_is_gone_ends_the_others_in_time(ranks, config, victim, number):
    settings = spread_config(config, f"lost stage {victim}", zero=0, layers=2, pipeline=2, timeout_seconds=8.0)
    launch = ranks(settings, 2, signals={victim: (6, number, 0.0)})
    other = launch.trainers[1 - victim]
    other.wait_until(lambda: len(launch.steps(victim)) >= 6)
    assert other.wait() == PeerFailureError.exit_code, launch.text()
    assert "run the same command again" in other.text()
    launch.trainers[victim].signal(signal.SIGKILL)
