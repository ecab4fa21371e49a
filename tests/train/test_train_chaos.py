"""Real processes that lost their run to others, who took it over, change nothing of it."""

import signal
from pathlib import Path

import psutil

from tests.train.conftest import EARLY_ROLLBACK, NO_DROPOUT
from tests.train.ranks import CODE, Launch
from tests.train.states import steps_of
from zero2all.common.errors import LostRunError
from zero2all.train.checkpoints.retention import pins

STEP_TOKENS = 160
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


def chaos_config(config, name, **sections):
    train = {"name": name, "steps": 16, "tokens_per_step": STEP_TOKENS, "precision": "float64"}
    valid = {"every_steps": 0, "tokens_per_source": 128}
    return config(model=NO_DROPOUT, train=train, checkpoint={"every_steps": 4}, validation=valid, **sections)


def files_in(run: Path) -> dict[str, bytes]:
    """Every file, byte for byte; a process may be stopped in the middle of one that it removes when it goes on."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and ".partial-" not in path.name]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def assert_taken_over(launch: Launch, run: Path, finish) -> None:
    """Stop a run, remove its lock, let another process finish it, continue the first: it ends with code 14 and changes
    nothing of what the other one left."""
    for trainer in launch.trainers:
        trainer.wait_until(lambda pid=trainer.pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    (run / "lock").unlink()
    finish()
    left = files_in(run)
    for trainer in launch.trainers:
        trainer.signal(signal.SIGCONT)
    assert set(launch.wait()) == {LostRunError.exit_code}, launch.text()
    found, own = files_in(run), "metrics/train-1.jsonl"
    assert found.pop(own).startswith(left.pop(own)), "a row that was on its way there may follow"
    assert found == left


def test_processes_that_lost_their_run_end_with_code_14_and_change_nothing_of_it(ranks, lab, config):
    settings = chaos_config(config, "lost", parallel={"zero": 3})
    launch = ranks(settings, 2, signals=dict.fromkeys((0, 1), (6, signal.SIGSTOP, 0.0)))
    assert_taken_over(launch, lab.run("lost"), lambda: ranks.finished(settings))
    assert "z2a: The run lost has lost its lock" in launch.trainers[0].text()
    assert "Traceback" not in launch.text()
    assert steps_of(lab.run("lost")) == [16, 12]


def test_a_process_that_lost_its_run_while_going_back_leaves_the_new_checkpoints_where_they_are(ranks, lab, config):
    settings, garbled = chaos_config(config, "back", guards=EARLY_ROLLBACK), (12 * STEP_TOKENS,)
    launch = ranks(settings, garbled=garbled, code=STOPPED_BEFORE_GOING_BACK)
    assert_taken_over(launch, lab.run("back"), lambda: ranks.finished(settings, garbled=garbled))
    assert steps_of(lab.run("back")) == [16, 12, 8]
    assert list(pins(lab.run("back"))) == [8]
