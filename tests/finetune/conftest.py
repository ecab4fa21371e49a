"""A workspace with a small trained run, to be changed."""

import dataclasses
import shutil
import signal

import pytest
import torch

from tests.finetune.test_finetune_data import lines, row
from tests.train.ranks import RankStarter
from zero2all.common.workspace import Workspace
from zero2all.finetune.objectives import objective_of
from zero2all.infer.load import load_run
from zero2all.parallel.world import World
from zero2all.track.reader import RunReader
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.run import train
from zero2all.train.setup import prepare
from zero2all.train.step_timer import StepTimer
from zero2all.train.train_step import forward_backward


@pytest.fixture
def work(trained_workspace, tmp_path):
    root = tmp_path / "work"
    shutil.copytree(trained_workspace.root, root)
    return Workspace(root)


@pytest.fixture
def chats(tmp_path):
    talks = [row(n)["messages"] * (1 + n % 2) for n in range(60)]
    return lines(tmp_path / "chats.jsonl", [{"messages": talk} for talk in talks])


def weights_of(work, name):
    return {each: tensor.clone() for each, tensor in load_run(work, name).weights().items()}


def has_weights(work, name, weights):
    found = load_run(work, name).weights()
    return found.keys() == weights.keys() and all(torch.equal(tensor, weights[each]) for each, tensor in found.items())


def learn(run, work, **options):
    return train(run.config, work, say=lambda _: None, make_objective=objective_of, **options)


def begun(work, run):
    """The objective of a run and its state before the first step."""
    store = CheckpointStore(run.run)
    context, state = prepare(run.config, work, World(), store)
    store.close()
    objective = objective_of(context)
    objective.begin(state)
    return objective, state


def move(model):
    """Another policy than the one that began."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))


def figures_and_gradients(run, state, batch, objective):
    """What the trainer computes of these rows."""
    timer = StepTimer(World().device)
    _, _, numbers = forward_backward(state, batch, run.config, World(), timer, objective)
    gradients = {name: parameter.grad.clone() for name, parameter in state.model.named_parameters()}
    state.weights.zero_gradients()
    return objective.report(dict(zip(objective.metrics, numbers.tolist(), strict=True))), gradients


def assert_gradients(model, gradients):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.fixture
def start(work, warm, tmp_path):
    starter = RankStarter(warm, work.root, tmp_path)
    yield starter
    starter.stop()


@pytest.fixture
def killed_run_keeps_its_bits(work, start):
    """A function that trains the run which `begin` writes, undisturbed and then killed at some steps."""

    def compare(begin, kill_at):
        run = begin()
        learn(run, work)
        assert not begin().is_new
        exact = weights_of(work, run.run.name)
        for step in kill_at:
            shutil.rmtree(run.run)
            run = begin()
            assert start(run.config, 1, signals={0: (step, signal.SIGKILL, 0.0)}).wait() == [-signal.SIGKILL]
            start.finished(run.config, 1)
            assert has_weights(work, run.run.name, exact)

    return compare


@pytest.fixture(scope="module")
def alone():
    """What one process gives, for all layouts of a file."""
    return {}


@pytest.fixture
def same_in(work, start, alone):
    """A function that trains the run which `begin` writes in a layout of two processes, and compares these metrics and
    the weights with those of one process."""

    def outcome(run, names, processes, **layout):
        config = dataclasses.replace(run.config, parallel=dataclasses.replace(run.config.parallel, **layout))
        start.finished(config, processes, words={rank: ["--accept-changes"] for rank in range(processes)})
        reader = RunReader(run.run)
        found = {each: reader.series(each).value.tolist() for each in names}, weights_of(work, run.run.name)
        shutil.rmtree(run.run)
        return found

    def compare(begin, names, layout):
        if not alone:
            alone["is"] = outcome(begin(), names, 1)
        figures, weights = outcome(begin(), names, 2, **layout)
        for name, values in alone["is"][0].items():
            assert figures[name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
        for name, tensor in alone["is"][1].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-8, msg=name)  # read in float32

    return compare
