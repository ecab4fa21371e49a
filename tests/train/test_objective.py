"""A loss of token log-probabilities is trained by the steps there are: its gradient is that of autograd."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.parallel.layouts import Squares
from tests.train.test_train_step import CHANNELS, NO_DROPOUT, VOCAB_SIZE, make_batch, make_state
from zero2all.config import ConfigError, config_from_values
from zero2all.parallel.world import World
from zero2all.train.state import TrainState
from zero2all.train.step_timer import StepTimer
from zero2all.train.train_step import StepPlan, forward_backward, train_step


class Mean:
    """What is learned without an objective."""

    metrics = ()

    def weights(self, scored):
        counted = scored.sum_rows(scored.sum_parts(scored.counts.sum(dtype=torch.float64)))
        return scored.counts / counted, torch.zeros(0, dtype=torch.float64)


def gradients(state: TrainState):
    return {name: parameter.grad for name, parameter in state.model.named_parameters()}


def masked_batch():
    weights = np.random.default_rng(5).integers(0, 2, (8, 32)).astype(np.float32)
    return dataclasses.replace(make_batch(), weights=weights, counted=float(weights.sum()))


@pytest.mark.parametrize("micro", [8, 3])
def test_the_gradient_is_that_of_autograd(config, micro):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": micro})
    state, batch, world = make_state(settings, torch.float64), masked_batch(), World()
    _, _, numbers = forward_backward(state, batch, settings, world, StepTimer(world.device), Squares())
    reference = make_state(settings, torch.float64)
    tokens = torch.from_numpy(batch.tokens)
    logits = reference.model.logits(reference.model(tokens[:, :-1])).log_softmax(-1)
    losses = -logits.gather(-1, tokens[:, 1:, None])[..., 0] * torch.from_numpy(batch.weights)
    squares = losses.sum(dim=1).square()
    squares.mean().backward()
    assert numbers.tolist() == pytest.approx([8, float(squares.detach().sum())], rel=1e-12)
    for name, wanted in gradients(reference).items():
        torch.testing.assert_close(gradients(state)[name], wanted, rtol=1e-9, atol=1e-9, msg=name)


def test_an_objective_that_is_the_mean_loss_gives_the_same_bits_as_none(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 2})
    results = []
    for objective in (None, Mean()):
        state = make_state(settings)
        plan = StepPlan(0.01, objective=objective)
        result = train_step(state, masked_batch(), CHANNELS, settings, World(), plan).result()
        results.append((result.loss, result.grad_norm, {n: p.clone() for n, p in state.model.named_parameters()}))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(value, results[1][2][name]) for name, value in results[0][2].items())


def test_what_would_make_two_passes_differ_is_refused():
    values = {
        "model": {"vocab_size": VOCAB_SIZE, "residual_dropout": 0.1},
        "train": {"z_loss": 1e-4},
        "finetune": {"method": "dpo"},
    }
    with pytest.raises(ConfigError) as error:
        config_from_values(values, "of the test")
    assert [problem.field for problem in error.value.problems] == ["train.z_loss", "model.residual_dropout"]
