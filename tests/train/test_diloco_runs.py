"""Whole runs of two groups over the real link, each with a folder of its own."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from tests.processes import WarmProcess
from tests.train.conftest import small_config
from tests.train.ranks import Launch, RankStarter
from zero2all.common.workspace import Workspace
from zero2all.infer.load import load_run
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.load import verified_checkpoint


def free_ports() -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(2)]


def group_config(groups: list[str], group: int, steps: int = 14, **fields: float):
    link = {"groups": groups, "group": group, "every": 6, "fragment_layers": 1, "tau": 2, "compress": "int4", **fields}
    train = {"steps": steps, "precision": "float32"}
    return small_config(parallel={"device": "cpu", "cpu_threads": 1}, diloco=link, train={"name": "run", **train})


def copy_work(source: Path, target: Path) -> None:
    """A workspace of its own, with the secret that the groups share."""
    shutil.copytree(source, target)
    secret = target / "runs" / "run.secret"
    secret.parent.mkdir(exist_ok=True)
    secret.touch(0o600)
    secret.write_text("the secret of these two groups")


def start_both(starters: list[RankStarter], signals=None, processes=1) -> list[Launch]:
    groups = free_ports()
    return [starter(group_config(groups, group), processes, signals=signals) for group, starter in enumerate(starters)]


def tensors_of(work: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(work / "runs" / "run")
    return checkpoint.tensors("")


def test_groups_stopped_with_a_fragment_in_flight_go_on_to_the_same_bits(
    shared_work: Workspace, tmp_path: Path, warm: WarmProcess
):
    starters = {}
    for name in ("whole", "stopped", "ranks"):
        starters[name] = []
        for group in range(2):
            root, folder = tmp_path / f"{name}-{group}" / "work", tmp_path / f"{name}-{group}"
            copy_work(shared_work.root, root)
            starters[name].append(RankStarter(warm, root, folder))
    try:
        launches = start_both(starters["whole"])
        for launch in launches:
            assert launch.wait() == [0], launch.text()
        # The groups divide every global batch.
        rows = [launch.global_rows() for launch in launches]
        assert all(len({*rows[0][at], *rows[1][at]}) == 4 for at in rows[0])
        stop = {0: (6, signal.SIGTERM, 0.0)}  # read in step 7, while the fragment of step 6 is on its way
        for launch in start_both(starters["stopped"], stop):
            assert launch.wait() == [10], launch.text()
        for launch in start_both(starters["stopped"]):
            assert launch.wait() == [0], launch.text()
            assert launch.steps()[0].step == 8
        for group in range(2):
            one, other = (tensors_of(starters[name][group].root) for name in ("whole", "stopped"))
            assert one.keys() == other.keys()
            assert [name for name in one if not torch.equal(one[name], other[name])] == []
        first = tensors_of(starters["whole"][0].root)
        assert any(not torch.equal(value, other[name]) for name, value in first.items())  # errors are a group's own
        for launch in start_both(starters["ranks"], processes=2):  # two ranks of each group divide the outer work
            assert launch.wait() == [0, 0], launch.text()
    finally:
        for each in starters.values():
            for starter in each:
                starter.stop()
    work = starters["whole"][0].root
    loaded = load_run(Workspace(work), "run", 12)  # in the middle of a round: the outer weights are the model
    kept = verified_checkpoint(work / "runs" / "run" / "checkpoints" / "step-00000012").tensors("")
    weight = loaded.model.norm.weight
    assert torch.equal(weight, kept["outer/norm.weight"])
    assert not torch.equal(weight, kept["model/norm.weight"])
    run = read_run(starters["whole"][0].root / "runs" / "run")
    assert {"diloco/round", "diloco/sent_bytes", "diloco/outer_grad_norm"} <= set(run.series)


SLOW_STEPS = "import time; from tests.train import ranks; from zero2all.train import trainer; "
SLOW_STEPS += (
    "step = trainer.train_step; trainer.train_step = lambda *given: (time.sleep(0.4), step(*given))[1]; ranks.main()"
)


@pytest.mark.slow
def test_a_group_killed_in_a_round_comes_back_and_all_resume_to_the_same_bits(
    shared_work: Workspace, tmp_path: Path, warm: WarmProcess
):
    """Group 1 is killed (SIGKILL) with a fragment on its way, and started again when group 0 has made a round alone: a
    quick machine would bring it back before that. Then both are stopped at one step. From these two folders the run is
    ended twice: at once, and stopped once more with a fragment on its way. All tensors of both groups are compared, bit
    by bit: model, moments, outer weights, momentum, errors. They are equal because nothing else goes into a step: the
    sets are {0, 1}, added in the order of the groups, and the rows follow from the tokens."""
    places = [tmp_path / f"killed-{group}" for group in range(2)]
    for place in places:
        copy_work(shared_work.root, place / "work")
    starters = [RankStarter(warm, place / "work", place) for place in places]
    groups, stop_at = free_ports(), {0: (44, signal.SIGTERM, 0.0)}

    def begin(starters: list[RankStarter], group: int, signals, groups=groups) -> Launch:
        config = group_config(groups, group, 56, wait_seconds=2.0)
        return starters[group](config, signals=signals, code=SLOW_STEPS)

    try:
        living = begin(starters, 0, stop_at)
        killed = begin(starters, 1, {0: (10, signal.SIGKILL, 0.05)})  # the fragment of step 9 is on its way
        assert killed.wait() == [-signal.SIGKILL], killed.text()
        living.trainers[0].wait_until(lambda: len(living.steps()) > 15)  # past the fragment of step 12: alone
        back = begin(starters, 1, stop_at)
        assert [*living.wait(), *back.wait()] == [10, 10], living.text() + back.text()
        assert "continues at step" in back.text()
        assert "group 1 did not come to round" in living.text()
        assert "group 1 is back in round" in living.text()
        copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))
        ended = {}
        for name, folder in (("once", tmp_path), ("twice", copy)):
            own = [folder / f"killed-{group}" for group in range(2)]
            again = [RankStarter(warm, each / "work", each) for each in own]
            starters += again
            ports = free_ports()
            for signals in (None,) if name == "once" else ({0: (50, signal.SIGTERM, 0.0)}, None):
                launches = [begin(again, group, signals, ports) for group in range(2)]
                for launch in launches:
                    assert launch.wait() == [10 if signals else 0], launch.text()
            ended[name] = [tensors_of(starter.root) for starter in again]
    finally:
        for starter in starters:
            starter.stop()
    for one, other in zip(ended["once"], ended["twice"], strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    shared = [name for name in ended["once"][0] if name.startswith(("outer/", "outer_momentum/"))]
    assert shared
    assert all(torch.equal(ended["once"][0][name], ended["once"][1][name]) for name in shared)
    rounds = read_run(places[0] / "work" / "runs" / "run").series["diloco/round"]
    taking = read_run(places[0] / "work" / "runs" / "run").series["diloco/groups"]
    assert list(rounds.step) == sorted(set(rounds.step))  # no round is counted twice
    assert {1, 2} == set(taking.value)
    assert taking.value[-1] == 2
