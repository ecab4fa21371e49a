"""Whole runs of two groups over the real link, each with a folder of its own."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from tests.train.conftest import small_config
from tests.train.ranks import Launch, RankStarter
from tests.train.states import assert_same_bits
from zero2all.common.workspace import Workspace
from zero2all.infer.load import load_run
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.load import verified_checkpoint

SLOW_STEPS = "import time; from tests.train import ranks; from zero2all.train import trainer; "
SLOW_STEPS += "step = trainer.train_step; trainer.train_step = lambda *g: (time.sleep(0.4), step(*g))[1]; ranks.main()"


def addresses() -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(2)]


def group_config(groups: list[str], group: int, steps: int = 14, **fields: float):
    link = {"groups": groups, "group": group, "every": 6, "fragment_layers": 1, "tau": 2, "compress": "int4", **fields}
    return small_config(diloco=link, train={"steps": steps, "precision": "float32"})


@pytest.fixture
def start_group(shared_work, warm, tmp_path):
    """Starts processes of a group of a run; each has a workspace of its own, with the secret that the groups share."""
    starters: dict[Path, RankStarter] = {}

    def starter_of(name: str, group: int) -> RankStarter:
        folder = tmp_path / f"{name}-{group}"
        if folder not in starters:
            shutil.copytree(shared_work.root, folder / "work")
            secret = folder / "work" / "runs" / "run.secret"
            secret.parent.mkdir(exist_ok=True)
            secret.touch(0o600)
            secret.write_text("the secret of these two groups")
            starters[folder] = RankStarter(warm, folder / "work", folder)
        return starters[folder]

    yield starter_of
    for starter in starters.values():
        starter.stop()


@pytest.fixture
def start_both(start_group):

    def started(name: str, signals=None, processes=1) -> list[Launch]:
        groups = addresses()
        return [start_group(name, group)(group_config(groups, group), processes, signals=signals) for group in (0, 1)]

    return started


def tensors_of(work: Path) -> dict[str, torch.Tensor]:
    return newest_checkpoint(work / "runs" / "run").tensors("")


def test_groups_stopped_with_a_fragment_in_flight_go_on_to_the_same_bits(start_both, start_group):
    launches = start_both("whole")
    for launch in launches:
        assert launch.wait() == [0], launch.text()
    # The groups divide every global batch.
    rows = [launch.global_rows() for launch in launches]
    assert all(len({*rows[0][at], *rows[1][at]}) == 4 for at in rows[0])
    stop = {0: (6, signal.SIGTERM, 0.0)}  # read in step 7, while the fragment of step 6 is on its way
    for launch in start_both("stopped", stop):
        assert launch.wait() == [10], launch.text()
    for launch in start_both("stopped"):
        assert launch.wait() == [0], launch.text()
        assert launch.steps()[0].step == 8
    whole, stopped = ([tensors_of(start_group(name, group).root) for group in (0, 1)] for name in ("whole", "stopped"))
    for one, other in zip(whole, stopped, strict=True):
        assert_same_bits(one, other)
    assert any(not torch.equal(value, whole[1][name]) for name, value in whole[0].items())  # errors are a group's own
    work = start_group("whole", 0).root
    loaded = load_run(Workspace(work), "run", 12)  # in the middle of a round: the outer weights are the model
    kept = verified_checkpoint(work / "runs" / "run" / "checkpoints" / "step-00000012").tensors("")
    assert torch.equal(loaded.model.norm.weight, kept["outer/norm.weight"])
    assert not torch.equal(loaded.model.norm.weight, kept["model/norm.weight"])
    series = read_run(work / "runs" / "run").series
    assert {"diloco/round", "diloco/sent_bytes", "diloco/outer_grad_norm"} <= set(series)
    for launch in start_both("ranks", processes=2):  # two ranks of each group divide the outer work
        assert launch.wait() == [0, 0], launch.text()


@pytest.mark.slow
def test_a_group_killed_in_a_round_comes_back_and_all_end_with_the_same_outer_weights(start_group, tmp_path):
    """It is started again when the other has made a round alone: a quick machine would bring it back before that."""
    groups = addresses()

    def begin(group: int, signals=None) -> Launch:
        config = group_config(groups, group, 56, wait_seconds=2.0)
        return start_group("killed", group)(config, signals=signals, code=SLOW_STEPS)

    living, killed = begin(0), begin(1, {0: (10, signal.SIGKILL, 0.05)})  # the fragment of step 9 is on its way
    assert killed.wait() == [-signal.SIGKILL], killed.text()
    living.trainers[0].wait_until(lambda: len(living.steps()) > 15)  # past the fragment of step 12: alone
    back = begin(1)
    assert [*living.wait(), *back.wait()] == [0, 0], living.text() + back.text()
    assert "continues at step" in back.text()
    assert "group 1 did not come to round" in living.text()
    assert "group 1 is back in round" in living.text()
    ended = [tensors_of(start_group("killed", group).root) for group in range(2)]
    shared = [name for name in ended[0] if name.startswith(("outer/", "outer_momentum/"))]
    assert shared
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in shared)
    series = read_run(start_group("killed", 0).root / "runs" / "run").series
    assert list(series["diloco/round"].step) == sorted(set(series["diloco/round"].step))  # no round is counted twice
    assert {1, 2} == set(series["diloco/groups"].value)
