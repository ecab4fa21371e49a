"""Real processes, killed: a run interrupted anywhere ends with the same bits as one that was left alone."""

import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes import Z2A
from zero2all.common.workspace import Workspace
from zero2all.config import config_yaml
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint

STEPS = 24
LENGTH = {"train": {"steps": STEPS}, "checkpoint": {"every_steps": 3}, "validation": {"every_steps": 8}}
FILES = ("model-00000-00000.safetensors", "optimizer-00000-00000.safetensors", "state.json")
NO_DROPOUT = {"model": {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}}


def train_words(config_file: Path, work, name: str) -> list[object]:
    return ["train", config_file, "--work", work.root, "--train.name", name]


def rows_in(run: Path, attempt: int) -> int:
    path = run / "metrics" / f"train-{attempt}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def signalled(step: int, number: int, after: float = 0.0) -> str:
    """Code of a command that gets a signal in that step."""
    return f"from tests.moments import signal_in_step; signal_in_step({step}, {number}, {after}); {Z2A}"


def final(run: Path) -> dict[str, bytes]:
    """Every weight, every moment, every counter of the last step."""
    folder = run / f"checkpoints/step-{STEPS:08d}"
    assert verified_checkpoint(folder).step == STEPS
    return {
        name: (folder / name).read_bytes()
        for name in ("model-00000-00000.safetensors", "optimizer-00000-00000.safetensors", "state.json")
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What runs that were left alone ended with, by kind of config; filled by the first test that needs it."""
    return {}


@pytest.fixture
def left_alone(alone, start, work):
    """The bits of an uninterrupted run of a config."""

    def bits(config_file: Path, kind: str) -> dict[str, bytes]:
        if kind not in alone:
            trainer = start(*train_words(config_file, work, "alone"))
            assert trainer.wait() == 0, trainer.text()
            alone[kind] = final(work.run("alone"))
        return alone[kind]

    return bits


@pytest.fixture(scope="module", autouse=True)
def killed_command(shared_work, config, tmp_path_factory):
    """`python -m zero2all train`, killed and run again; beside the other tests, because it imports torch twice."""
    root = tmp_path_factory.mktemp("command")
    work = Workspace(root / "work")
    shutil.copytree(shared_work.root, work.root)
    (root / "config.yaml").write_text(config_yaml(config(**LENGTH)))
    command = [sys.executable, "-m", "zero2all", *map(str, train_words(root / "config.yaml", work, "command"))]
    run = work.run("command")

    def kill_and_run_again():
        for _ in range(5):
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while not list_checkpoints(run) and process.poll() is None:
                    time.sleep(0.002)
                process.kill()
            if newest_checkpoint(run).step < STEPS:
                break
            shutil.rmtree(run)  # this process was held up, and the kill came after the last step
        return run, subprocess.run(command, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(kill_and_run_again).result


def test_a_run_killed_at_random_points_equals_the_run_left_alone(start, work, config_file, left_alone):
    """Without dropout; test_train_exact.py has a longer run with it."""
    path = config_file(**LENGTH, **NO_DROPOUT)
    wanted = left_alone(path, "dropout False")
    rng = random.Random(1)
    run = work.run("killed")
    kills = 0
    for _ in range(4):
        code = signalled(rng.randint(2, 9), signal.SIGKILL, rng.uniform(0, 0.02))
        kills += start(*train_words(path, work, "killed"), code=code).wait() == -signal.SIGKILL
        if list_checkpoints(run):
            newest_checkpoint(run)  # raises when something under a final name is damaged
    assert kills >= 2
    trainer = start(*train_words(path, work, "killed"))
    assert trainer.wait() == 0, trainer.text()
    assert final(run) == wanted
    kept = [path.name for path in sorted((run / "checkpoints").iterdir()) if path.is_dir()]
    # A start that is killed before eight steps have proven its state deletes no good checkpoint.
    assert kept[-2:] == [f"step-{step:08d}" for step in (STEPS - 3, STEPS)]
    assert len(kept) <= 5, "twice keep_last, and one"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_asked_to_stop_saves_and_says_so_and_its_rerun_ends_with_the_same_bits(
    start, work, config_file, left_alone, number
):
    wanted = left_alone(config_file(**LENGTH), "dropout True")
    path = config_file(**{**LENGTH, "checkpoint": {"every_steps": 0}})
    run = work.run("stopped")
    trainer = start(*train_words(path, work, "stopped"), code=signalled(3, number))
    assert trainer.wait() == 10, trainer.text()
    assert number.name in trainer.text()
    stopped_at = newest_checkpoint(run).step
    assert 3 <= stopped_at < STEPS
    assert f"stopped and saved at step {stopped_at}. Run the same command again" in trainer.text()
    again = start(*train_words(path, work, "stopped"))
    assert again.wait() == 0, again.text()
    assert f"resumed stopped at step {stopped_at}" in again.text()
    assert final(run) == wanted


def test_a_run_asked_to_stop_without_saving_does_not_save(start, work, config_file):
    path = config_file(**{**LENGTH, "checkpoint": {"every_steps": 0}}, resilience={"save_on_signal": False})
    trainer = start(*train_words(path, work, "stopped"), code=signalled(3, signal.SIGTERM))
    assert trainer.wait() == 10
    assert "stopped without a save (resilience.save_on_signal is false)" in trainer.text()
    assert list_checkpoints(work.run("stopped")) == []


def test_a_second_process_on_the_same_run_is_refused_and_a_dead_one_holds_nothing(start, work, config_file):
    path = config_file(train={"steps": 100_000}, checkpoint={"every_steps": 50})
    first = start(*train_words(path, work, "shared"))
    first.wait_until(lambda: rows_in(work.run("shared"), 1) >= 2)
    second = start(*train_words(path, work, "shared"))
    assert second.wait() == 13
    assert f"process {first.pid} on " in second.text()
    assert first.poll() is None
    first.signal(signal.SIGKILL)
    first.wait()
    third = start(*train_words(path, work, "shared"))
    third.wait_until(lambda: rows_in(work.run("shared"), 2) >= 2)


# The limit holds the optimizer's file back, not the weights': the save fails in its middle.
SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000))
from zero2all.cli import main
sys.exit(main())
"""


def test_a_disk_that_is_full_in_the_middle_of_a_save_leaves_no_half_and_the_rerun_finishes(
    start, work, config_file, left_alone
):
    path = config_file(**LENGTH)
    wanted = left_alone(path, "dropout True")
    assert len(wanted["model-00000-00000.safetensors"]) > 90_000
    trainer = start(*train_words(path, work, "full"), code=SMALL_FILES)
    assert trainer.wait() == 4, trainer.text()
    assert "The checkpoint of step 3 was not saved" in trainer.text()
    assert "If the disk is full, free some space. Run the same command again" in trainer.text()
    assert "Traceback" not in trainer.text()
    assert list_checkpoints(work.run("full")) == []
    assert not [path for path in (work.run("full") / "checkpoints").rglob("*") if path.is_file()]
    again = start(*train_words(path, work, "full"))
    assert again.wait() == 0, again.text()
    assert final(work.run("full")) == wanted


def test_a_terminal_that_goes_away_does_not_stop_the_run(start, work, config_file):
    code = """
import os, sys
from zero2all.common import progress
progress.LOG_EVERY_SECONDS = 0.0
reading, writing = os.pipe()
os.dup2(writing, 2)
os.close(reading)
os.close(writing)
from zero2all.cli import main
sys.exit(main())
"""
    path = config_file(**LENGTH)
    start(*train_words(path, work, "hangup"), code=code).wait()
    assert newest_checkpoint(work.run("hangup")).step == STEPS


def test_changed_settings_stop_the_command_with_code_2(start, work, config_file):
    words = train_words(config_file(train={"steps": 3}), work, "changed")
    assert start(*words).wait() == 0
    refused = start(*words, "--optim.lr_max", "0.5")
    assert refused.wait() == 2
    assert "optim.lr_max: 0.01 -> 0.5" in refused.text()
    assert start(*words, "--optim.lr_max", "0.5", "--accept-changes").wait() == 0
    assert start(*words, "--optim.lr_max", "0.7", "--fresh").wait() == 0
    shutil.rmtree(work.run("changed") / "checkpoints/step-00000003")
    (work.run("changed") / "checkpoints/step-00000003").mkdir()
    damaged = start(*words, "--optim.lr_max", "0.7")
    assert damaged.wait() == 3
    assert "No checkpoint of" in damaged.text()


def test_a_run_whose_checkpoints_are_gone_does_not_start_over_without_asking(start, work, config_file):
    words = train_words(config_file(train={"steps": 3}), work, "gone")
    assert start(*words).wait() == 0
    run = work.run("gone")
    shutil.rmtree(run / "checkpoints")
    before = sorted((run / "metrics").iterdir())
    (run / "metrics").rename(run / "away")
    refused = start(*words)
    assert refused.wait() == 3
    assert f"step 3 was saved, but {run / 'checkpoints'} no longer contains it" in refused.text()
    (run / "away").rename(run / "metrics")
    (run / "last_saved.json").unlink()
    refused = start(*words)
    assert refused.wait() == 3
    assert "the metrics say that step 3 was saved, but" in refused.text()
    assert "--fresh" in refused.text()
    assert "another --train.name" in refused.text()
    assert sorted((work.run("gone") / "metrics").iterdir()) == before
    assert start(*words, "--fresh").wait() == 0


FOLDER_REMOVED = """
import shutil, sys
from pathlib import Path
from zero2all.cli import main
from zero2all.train import trainer

train_step, run = trainer.train_step, Path(sys.argv.pop())

def step(state, *arguments):
    if state.step == 5:
        shutil.rmtree(run)
    return train_step(state, *arguments)

trainer.train_step = step
sys.exit(main())
"""


def test_a_run_whose_folder_is_removed_says_so_and_promises_nothing(start, work, config_file):
    words = train_words(config_file(), work, "removed")
    removed = start(*words, work.run("removed"), code=FOLDER_REMOVED)
    assert removed.wait() == 14, removed.text()
    assert f"The folder of the run, {work.run('removed')}, is gone, and its checkpoints with it." in removed.text()
    assert "newest checkpoint" not in removed.text()


def test_the_command_itself_killed_and_run_again_equals_the_run_left_alone(
    killed_command, work, config_file, left_alone
):
    run, done = killed_command()
    assert done.returncode == 0, done.stderr
    assert "resumed command at step" in done.stdout
    assert f"command: step {STEPS}, {STEPS * 128:,} tokens" in done.stdout
    assert final(run) == left_alone(config_file(**LENGTH), "dropout True")
