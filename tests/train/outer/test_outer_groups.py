"""Whole runs of two groups over the real link, each with a folder of its own."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

import torch

from tests.processes import WarmProcess
from tests.train.conftest import small_config
from tests.train.ranks import Launch, RankStarter
from zero2all.common.workspace import Workspace
from zero2all.infer.load import load_run
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.load import verified_checkpoint


def free_ports() -> list[str]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]


def group_config(groups: list[str], group: int):
    link = {"groups": groups, "group": group, "every": 6, "fragment_layers": 1, "tau": 2, "compress": "int4"}
    train = {"steps": 14, "precision": "float32"}
    return small_config(parallel={"device": "cpu", "cpu_threads": 1, "slow_link": link}, train={"name": "run", **train})


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
            shutil.copytree(shared_work.root, root)
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
    assert {"slow_link/round", "slow_link/sent_bytes", "slow_link/outer_grad_norm"} <= set(run.series)
