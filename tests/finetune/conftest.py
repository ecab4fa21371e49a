"""A workspace with a small trained run, to be changed."""

import dataclasses
import shutil

import pytest
import torch

from tests.finetune.test_finetune_data import lines, row
from tests.train.ranks import RankStarter
from zero2all.common.workspace import Workspace
from zero2all.infer.load import load_run
from zero2all.track.reader import RunReader


@pytest.fixture
def work(trained_workspace, tmp_path):
    root = tmp_path / "work"
    shutil.copytree(trained_workspace.root, root)
    return Workspace(root)


@pytest.fixture
def chats(tmp_path):
    talks = [row(n)["messages"] * (1 + n % 2) for n in range(60)]
    return lines(tmp_path / "chats.jsonl", [{"messages": talk} for talk in talks])


@pytest.fixture
def start(work, warm, tmp_path):
    starter = RankStarter(warm, work.root, tmp_path)
    yield starter
    starter.stop()


@pytest.fixture(scope="module")
def alone():
    """What one process gives, for all layouts of a file."""
    return {}


@pytest.fixture
def same_in(work, start, alone):
    """A function that trains the run which `begin` writes in a layout of two processes, and compares these metrics and
    the weights with those of one process."""

    def outcome(begin, names, processes, **layout):
        run = begin()
        config = dataclasses.replace(run.config, parallel=dataclasses.replace(run.config.parallel, **layout))
        start.finished(config, processes, words={rank: ["--accept-changes"] for rank in range(processes)})
        reader, weights = RunReader(run.run), load_run(work, run.run.name).weights()
        found = {each: reader.series(each).value.tolist() for each in names}, {n: w.clone() for n, w in weights.items()}
        shutil.rmtree(run.run)
        return found

    def compare(begin, names, layout):
        if not alone:
            alone["is"] = outcome(begin, names, 1)
        figures, weights = outcome(begin, names, 2, **layout)
        for name, values in alone["is"][0].items():
            assert figures[name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
        for name, tensor in alone["is"][1].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-8, msg=name)  # read in float32

    return compare
