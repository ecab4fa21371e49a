"""Faults injected into real processes: a run that was taken over, weights that are not finite, replicas that differ."""

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch

from tests.train.checkpoints.conftest import set_value
from tests.train.ranks import CODE, Launch, RankStarter
from zero2all.common.errors import AnomalyError, LostRunError
from zero2all.common.workspace import Workspace
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.checkpoints.retention import pins

NO_DROPOUT = {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
STEPS, STEP_TOKENS = 16, 160


@pytest.fixture(scope="module")
def lab(shared_work, tmp_path_factory) -> Workspace:
    """A workspace that all tests here share; each has runs of its own name."""
    root = tmp_path_factory.mktemp("chaos") / "work"
    shutil.copytree(shared_work.root, root)
    return Workspace(root)


@pytest.fixture(scope="module")
def ranks(warm, lab, tmp_path_factory):
    starter = RankStarter(warm, lab.root, tmp_path_factory.mktemp("ranks"))
    yield starter
    starter.stop()


def chaos_config(config, name, guards=None, **parallel):
    return config(
        model=NO_DROPOUT,
        train={"name": name, "steps": STEPS, "tokens_per_step": STEP_TOKENS, "precision": "float64"},
        checkpoint={"every_steps": 4},
        validation={"every_steps": 0, "tokens_per_source": 128},
        guards=guards or {},
        parallel=parallel,
    )


def steps_in(run: Path) -> list[int]:
    return sorted(step_of(folder) for folder in list_checkpoints(run))


def files_in(run: Path) -> dict[str, bytes]:
    """Every file, byte for byte; a process may be stopped in the middle of one that it removes when it goes on."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and ".partial-" not in path.name]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def events(run: Path, kind: str) -> list[dict]:
    return [event.data for event in read_run(run).events if event.kind == kind]


def last_bits(run: Path) -> dict[str, bytes]:
    """Every weight, moment and counter of the last checkpoint."""
    folder = run / f"checkpoints/step-{STEPS:08d}"
    assert verified_checkpoint(folder).step == STEPS
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


# ---- a run that was taken over ----


def wait_until_stopped(launch: Launch) -> None:
    for trainer in launch.trainers:
        trainer.wait_until(lambda pid=trainer.pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def taken_over(launch: Launch, run: Path, finish) -> tuple[list[int], dict[str, bytes]]:
    """Stop a run, remove its lock, let another process finish it, continue the first; how it ended, and what the other
    one left."""
    wait_until_stopped(launch)
    (run / "lock").unlink()
    finish()
    left = files_in(run)
    for trainer in launch.trainers:
        trainer.signal(signal.SIGCONT)
    return launch.wait(), left


OWN_METRICS = "metrics/train-1.jsonl"
"""Begun by the process that lost the run: a row that was on its way there when it was stopped may follow."""


def is_left_as_it_was(run: Path, left: dict[str, bytes]) -> bool:
    found = files_in(run)
    return found.pop(OWN_METRICS).startswith(left[OWN_METRICS]) and found == {
        name: data for name, data in left.items() if name != OWN_METRICS
    }


def test_processes_that_lost_their_run_end_with_code_14_and_change_nothing_of_it(ranks, lab, config):
    settings = chaos_config(config, "lost", zero=3)
    launch = ranks(settings, 2, signals=dict.fromkeys((0, 1), (6, signal.SIGSTOP, 0.0)))
    ended, left = taken_over(launch, lab.run("lost"), lambda: ranks.finished(settings))
    assert ended == [LostRunError.exit_code] * 2, launch.text()
    assert is_left_as_it_was(lab.run("lost"), left)
    said = launch.trainers[0].text()
    assert "z2a: The run lost has lost its lock" in said
    assert "Traceback" not in launch.text()
    assert steps_in(lab.run("lost")) == [12, 16]


STOPPED_BEFORE_GOING_BACK = f"""
import os, signal
from zero2all.train.checkpoints.store import CheckpointStore

go_back_to = CheckpointStore.go_back_to

def stop_first(store, *arguments):
    store.wait()  # so that there is a newer checkpoint than the one to go back to
    os.kill(os.getpid(), signal.SIGSTOP)
    return go_back_to(store, *arguments)

CheckpointStore.go_back_to = stop_first
{CODE}
"""
SPIKES = {
    "spike_window_steps": 8,
    "spike_min_steps": 8,
    "spike_sigmas": 2.0,
    "spike_mads": 3.0,
    "rollback_after_spikes": 1,
    "rollback_margin_steps": 2,
    "skip_steps_after": 1,
}


def test_a_process_that_lost_its_run_while_going_back_leaves_the_new_checkpoints_where_they_are(ranks, lab, config):
    settings, garbled = chaos_config(config, "back", SPIKES), (12 * STEP_TOKENS,)
    launch = ranks(settings, garbled=garbled, code=STOPPED_BEFORE_GOING_BACK)
    ended, left = taken_over(launch, lab.run("back"), lambda: ranks.finished(settings, garbled=garbled))
    assert ended == [LostRunError.exit_code], launch.text()
    assert is_left_as_it_was(lab.run("back"), left)
    assert steps_in(lab.run("back")) == [8, 12, 16]
    assert list(pins(lab.run("back"))) == [8]


# ---- weights and moments that are not finite ----


@pytest.fixture(scope="module")
def left_alone(ranks, lab, config):
    ranks.finished(chaos_config(config, "left alone"))
    return last_bits(lab.run("left alone"))


@pytest.fixture(scope="module")
def stopped_at_8(ranks, lab, config, tmp_path_factory):
    """A run with checkpoints at steps 4 and 8; to be copied."""
    launch = ranks(chaos_config(config, "stopped"), signals={0: (7, signal.SIGTERM, 0.0)})
    assert launch.wait() == [10], launch.text()
    kept = tmp_path_factory.mktemp("stopped") / "run"
    shutil.copytree(lab.run("stopped"), kept)
    assert steps_in(kept) == [4, 8]
    return kept


@pytest.mark.parametrize(
    ("file", "name", "value", "said"),
    [
        ("model-00000-00000.safetensors", "norm.weight", torch.inf, "contains NaN or infinite values"),
        ("optimizer-00000-00000.safetensors", "exp_avg/norm.weight", torch.nan, "contains NaN or infinite values"),
        ("optimizer-00000-00000.safetensors", "exp_avg_sq/norm.weight", -1e-9, "contains negative values"),
        # no window of losses yet, but worse than any step before
        ("model-00000-00000.safetensors", "norm.weight", 1e4, "no step after the checkpoint of step 8 was accepted"),
        # finite, but nothing that is computed with it is
        ("model-00000-00000.safetensors", "norm.weight", 1e308, "no step after the checkpoint of step 8 was accepted"),
    ],
    ids=["weight", "moment", "negative", "young", "overflow"],
)
def test_a_run_resumed_with_a_bad_state_falls_back_by_itself_says_so_and_ends_like_the_one_left_alone(
    ranks, lab, config, left_alone, stopped_at_8, file, name, value, said
):
    run = lab.run("stopped")
    shutil.rmtree(run)
    shutil.copytree(stopped_at_8, run)
    set_value(run, 8, file, name, value)
    launch = ranks.finished(chaos_config(config, "stopped"))
    assert said in launch.text()
    assert "back to the checkpoint of step 4" in launch.text()
    (rollback,) = events(run, "rollback")
    assert (rollback["to_step"], rollback["withdrawn"]) == (4, [8])
    assert said in rollback["reason"]
    assert last_bits(run) == left_alone
    assert steps_in(run) == [4, 12, 16]  # 4 is pinned


# ---- replicas that differ ----


def test_one_changed_weight_on_one_rank_ends_the_run_before_it_is_saved_and_names_the_rank(ranks, lab, config):
    settings = chaos_config(config, "replicas", zero=0)
    launch = ranks(settings, 2, spoiled={1: 6})
    assert launch.wait() == [AnomalyError.exit_code] * 2, launch.text()
    said = launch.trainers[0].text()
    assert (
        "z2a: The replicas of ranks 0 and 1 differ, in model/norm.weight: value 0 of model/norm.weight|[0:32] is"
        in said
    )
    assert "Traceback" not in launch.text()
    assert steps_in(lab.run("replicas")) == [4]
    assert json.loads((lab.run("replicas") / "checkpoints/latest.json").read_text()) == {"step": 4}
    again = ranks.finished(settings, 2)  # from step 4, with the same bits everywhere
    assert "step 8 was computed again" in again.text()
    assert "so rank 1 was wrong then" in again.text()
    assert steps_in(lab.run("replicas")) == [12, 16]
