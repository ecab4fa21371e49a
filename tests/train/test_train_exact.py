"""The run is the same run: killed, stopped, annealed, spread over other processes or cut into other micro-batches."""

import math
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.train.conftest import EARLY_ROLLBACK, NO_DROPOUT, quiet
from tests.train.ranks import Launch
from tests.train.states import bits, copies, steps_of
from zero2all.common.errors import PeerFailureError
from zero2all.config.schedule import learning_rate
from zero2all.config.training import AnnealConfig
from zero2all.track.reader import read_run
from zero2all.train import state as state_module
from zero2all.train import trainer
from zero2all.train.anneal import read_anneal, request_anneal
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.run import train

STEPS, STEP_TOKENS = 10, 160
STOPPED_AT = 4
FLOAT64 = {"steps": STEPS, "tokens_per_step": STEP_TOKENS, "precision": "float64"}


# ---- many processes ----


def spread_config(config, name, zero=3, micro=2, save_every=0, layers=1, **parallel):
    """5 samples a step, which neither 2 nor 3 processes divide."""
    return config(
        model={**NO_DROPOUT, "layers": layers},
        train={**FLOAT64, "name": name, "micro_batch_samples": micro},
        checkpoint={"every_steps": save_every},
        # 4 passes, which 3 processes do not divide
        validation={"every_steps": 6, "tokens_per_source": 128, "batch_samples": 2},
        parallel={"zero": zero, **parallel},
    )


@dataclass(frozen=True)
class Course:
    losses: list[float]
    row_nats: list[list[float]]
    held_out: dict[str, list[float]]
    rows: dict[int, list[str]]

    def assert_same(self, other: "Course") -> None:
        """The same samples in the same global order, every one once, and losses that agree."""
        assert self.rows == other.rows
        assert self.losses == pytest.approx(other.losses, rel=1e-9, abs=0)
        for nats, wanted in zip(self.row_nats, other.row_nats, strict=True):
            assert nats == pytest.approx(wanted, rel=1e-9, abs=0)
        assert self.held_out == {name: pytest.approx(curve, rel=1e-9) for name, curve in other.held_out.items()}


def course(run: Path, *launches: Launch, rows: dict[int, list[str]] | None = None) -> Course:
    """The attempts at one run, put together; `rows`: where each stage of a pipeline reads them all."""
    steps = [step for launch in launches for step in launch.steps()]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))  # none twice, none left out
    if rows is None:
        batches = [batch for launch in launches for batch in launch.global_rows().items()]
        assert [first for first, _ in batches] == list(range(0, STEPS * STEP_TOKENS, STEP_TOKENS))
        rows = dict(batches)
    held_out = {name: curve.value.tolist() for name, curve in read_run(run).series.items() if name.startswith("eval/")}
    assert len(held_out) == 6, "loss and bits per byte of two channels, and of both"
    return Course([step.loss for step in steps], [step.row_nats for step in steps], held_out, rows)


@pytest.fixture(scope="module")
def alone(ranks, lab, config):
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
    assert steps_of(kept) == [steps[0][-1]]
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
    course(lab.run("stopped"), launch, rest).assert_same(alone)


def test_a_run_in_stages_that_is_stopped_goes_on_in_one_process(ranks, lab, config):
    def settings(name, **parallel):
        return spread_config(config, name, zero=0, layers=4, **parallel)

    wanted = course(lab.run("whole"), ranks.finished(settings("whole")))
    staged = settings("stages", pipeline=2, schedule="interleaved", chunks=2)
    first = ranks(staged, 2, signals={0: (7, signal.SIGTERM, 0.0)})
    assert first.wait() == [10, 10], first.text()
    course(lab.run("stages"), first, ranks.finished(settings("stages")), rows=wanted.rows).assert_same(wanted)
    bubble = read_run(lab.run("stages")).series["pipeline/bubble"].value
    assert len(bubble) == len(first.steps())
    assert all(0 < share < 1 for share in bubble)


@pytest.mark.parametrize(
    ("victim", "number", "step", "zero"), [(0, signal.SIGKILL, 7, 3), (1, signal.SIGSTOP, 9, 1)], ids=["dies", "hangs"]
)
def test_a_process_that_is_gone_ends_the_others_in_time_and_the_run_resumes(
    ranks, lab, config, alone, victim, number, step, zero
):
    name = f"lost {victim}"
    settings = spread_config(config, name, zero, save_every=3, timeout_seconds=8.0)
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
    fields = {"model": NO_DROPOUT, "guards": EARLY_ROLLBACK, "parallel": {"zero": 3}}
    fields |= {"checkpoint": {"every_steps": 4}, "validation": {"every_steps": 0}}
    made = []
    for processes in (1, 2):
        name = f"garbled {processes}"
        settings = config(train={**FLOAT64, "name": name, "steps": 16}, **fields)
        launch = ranks.finished(settings, processes, garbled=(12 * STEP_TOKENS,))
        made += [launch.steps(rank) for rank in range(processes)]
        events = [event.kind for event in read_run(lab.run(name)).events]
        assert "spike" in events
        assert (events.count("rollback"), events.count("finish")) == (1, 1)
    alone, *together = made
    # 13 spiked; back to 8; 13 and the one after left out
    assert [step.step for step in alone] == [*range(1, 14), 9, 10, 11, 12, 15, 16]
    for steps in together:
        for step, wanted in zip(steps, alone, strict=True):
            assert (step.step, step.first_token, step.updated) == (wanted.step, wanted.first_token, wanted.updated)
            assert step.loss == pytest.approx(wanted.loss, rel=1e-9, abs=0)


# ---- what changes in the middle of a run ----


class CrashError(Exception):
    """The end of an attempt, as far as the loop is concerned a process that was killed."""


@pytest.fixture
def crashed(work, after_step):
    """Train a config to its end in two attempts: the first crashes after a step."""

    def trained(settings, step):
        after_step(step, crash)
        with pytest.raises(CrashError):
            train(settings, work, say=quiet)
        after_step(0, crash)
        train(settings, work, say=quiet)

    return trained


def crash():
    raise CrashError


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
        seen.append((result.updated, float(state.loss_scale.scale) / scale))
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", watched)
        train(settings, work, say=quiet)
    assert not seen[0][0]
    assert {factor for updated, factor in seen if not updated} == {0.5}
    assert [factor for updated, factor in seen if updated][:4] == [1.0, 1.0, 2.0, 1.0]
    wanted = bits(work.run("run"), 8)
    shutil.rmtree(work.run("run"))
    after_step(5, crash)  # between checkpoints, in the middle of the count that ends in a doubling
    with pytest.raises(CrashError):
        train(settings, work, say=quiet)
    monkeypatch.setattr(state_module, "FIRST_SCALE", 1.0)  # what a checkpoint that forgot the scale would go on with
    after_step(0, crash)
    train(settings, work, say=quiet)
    assert bits(work.run("run"), 8) == wanted


def test_muon_follows_its_schedules_and_a_crashed_run_ends_with_the_same_bits(work, config, crashed, monkeypatch):
    def settings(name):
        optim = {"kind": "muon", "lr_max": 0.02, "decay_schedule": "cosine", "muon": {"momentum_warmup_share": 0.5}}
        schedule = {"kind": "wsd", "decay_share": 0.25, "warmup_steps": 1}
        ratios = {"update_ratios_every_steps": 2}
        return config(train={"name": name, "tokens_per_step": 64}, optim=optim, schedule=schedule, track=ratios)

    train_step, seen = trainer.train_step, []

    def watched(*arguments):
        pending = train_step(*arguments)
        optimizer = arguments[0].optimizer
        seen.append((optimizer.momentum, optimizer.param_groups[0].decay / 0.1))
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", watched)
        train(settings("alone"), work, say=quiet)
    assert [momentum for momentum, _ in seen] == pytest.approx([0.875, 0.9, 0.925, 0.95, 0.95, 0.95, 0.925, 0.9])
    assert [share for _, share in seen] == pytest.approx([0.5 + 0.5 * math.cos(math.pi * k / 8) for k in range(8)])
    crashed(settings("crashed"), 5)
    assert bits(work.run("crashed"), 8) == bits(work.run("alone"), 8)


def test_an_anneal_wished_in_a_run_falls_from_there_ends_the_run_and_resumes_exactly(work, config, after_step):
    settings = config(schedule={"kind": "constant"}, checkpoint={"keep_last": 9})
    run = work.run("run")
    after_step(4, lambda: request_anneal(run, 7, "linear", 0.1))
    assert train(settings, work, say=quiet).step == 11  # longer than it was to be
    assert read_anneal(run, 99) == AnnealConfig(from_step=4, steps=7, shape="linear", to_share=0.1)
    rates = read_run(run).series["lr"].value.tolist()
    assert rates[:4] == [learning_rate(step, 8, 0.01, settings.schedule) for step in range(4)]
    assert rates[4:] == pytest.approx([0.01 * (1 - 0.9 * (step + 1) / 7) for step in range(7)])
    wanted, noted = bits(run, 11), (run / "anneal.json").read_bytes()
    for step in (9, 6, 3):  # the end, then the request, then its step lie behind the checkpoint that is left
        for later in steps_of(run):
            if later > step:
                shutil.rmtree(checkpoint_folder(run, later))
        after_step(0, crash)
        assert train(settings, work, say=quiet).step == 11
        assert bits(run, 11) == wanted
        assert (run / "anneal.json").read_bytes() == noted


def test_an_anneal_that_is_given_another_end_on_the_way_resumes_exactly(work, config, monkeypatch):
    settings = config(schedule={"kind": "constant"}, checkpoint={"keep_last": 9})
    run, asked = work.run("run"), {4: 9, 7: 2}

    def watch(step):
        if steps := asked.pop(step, None):
            request_anneal(run, steps, "linear", 0.1)

    assert train(settings, work, say=quiet, watch=watch).step == 9
    record = read_anneal(run, 99)
    assert (record.from_step, record.steps, record.before.from_step, record.before.steps) == (7, 2, 4, 9)
    wanted, noted = bits(run, 9), (run / "anneal.json").read_bytes()
    for step in (6, 3):  # between both requests, and before them
        for later in steps_of(run):
            if later > step:
                shutil.rmtree(checkpoint_folder(run, later))
        assert train(settings, work, say=quiet).step == 9
        assert bits(run, 9) == wanted
        assert (run / "anneal.json").read_bytes() == noted


def test_a_run_that_is_trained_in_parts_ends_with_the_same_bits(work, config):
    for name, parts in (("whole", (None,)), ("parts", (3, 5, 5, None))):
        for until in parts:
            summary = train(config(train={"name": name}), work, say=quiet, until=until)
            assert summary.step == (until or 8)
            assert summary.held_out["eval/valid/loss"] > 0
    assert bits(work.run("parts"), 8) == bits(work.run("whole"), 8)


def test_positions_changed_by_a_stage_survive_a_resume(work, config, crashed):
    change = {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_seq_len": 32}}

    def settings(name, **stage):
        long = {"name": "long", "from_step": 4, "seq_len": 64, **stage}
        return config(model={"max_seq_len": 64}, train={"name": name}, stages=[long])

    for name, stage in (("unchanged", {}), ("changed", change)):
        train(settings(name, **stage), work, say=quiet)
    crashed(settings("crashed", **change), 7)
    unchanged, changed, found = (bits(work.run(name), 8) for name in ("unchanged", "changed", "crashed"))
    assert changed["model-00000-00000.safetensors"] != unchanged["model-00000-00000.safetensors"]
    assert found == changed


@pytest.mark.slow
def test_a_stage_that_hangs_ends_the_others_in_time(ranks, config):
    settings = spread_config(config, "lost stage", zero=0, layers=2, pipeline=2, timeout_seconds=8.0)
    launch = ranks(settings, 2, signals={1: (6, signal.SIGSTOP, 0.0)})
    other, hanging = launch.trainers
    other.wait_until(lambda: len(launch.steps(1)) >= 6)
    assert other.wait() == PeerFailureError.exit_code, launch.text()
    assert "run the same command again" in other.text()
    hanging.signal(signal.SIGKILL)
