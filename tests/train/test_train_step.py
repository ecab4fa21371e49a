"""One optimizer step: the same gradient whatever the micro-batch, and no trace of a step that went wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from zero2all.common.errors import AnomalyError
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.train.config import GuardsConfig
from zero2all.train.guards import check_skips
from zero2all.train.state import DTYPES, new_state
from zero2all.train.step import StepResult, _forward_backward
from zero2all.train.step import train_step as pending_step

CPU = torch.device("cpu")
CHANNELS = 3
VOCAB_SIZE = 64
NO_DROPOUT = {"vocab_size": VOCAB_SIZE, "residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}


def make_state(config, dtype=None, ops=None):
    model = Z2all(config.model, resolve(ops or OpsConfig(), "cpu"))
    model.init_weights(1)
    return new_state(model.train(), config.optim, dtype or DTYPES[config.train.precision])


def train_step(*arguments) -> StepResult:
    return pending_step(*arguments).result()


def make_batch(seed=0, samples=8, seq_len=32):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB_SIZE, (samples, seq_len + 1))
    channels = np.arange(samples) % 2  # the third channel has no sample
    return Batch(tokens, channels, channels, 0)


def tensors(state):
    found = {**state.model_tensors(), **state.optimizer_tensors()}
    return {name: value.clone() for name, value in found.items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_gradient_is_the_same_for_every_micro_batch(config):
    gradients = {}
    for micro in (8, 4, 2, 1):
        settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": micro})
        state = make_state(settings, torch.float64)
        sums = _forward_backward(state, make_batch(), CHANNELS, settings, CPU)
        gradients[micro] = {name: parameter.grad for name, parameter in state.model.named_parameters()}
        gradients[micro]["sums"] = sums
    for micro in (4, 2, 1):
        for name, wanted in gradients[8].items():
            torch.testing.assert_close(gradients[micro][name], wanted, rtol=1e-12, atol=1e-15, msg=name)


def test_gradient_is_that_of_the_mean_loss_over_all_tokens(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 2})
    state, reference, batch = make_state(settings), make_state(settings), make_batch()
    _forward_backward(state, batch, CHANNELS, settings, CPU)
    tokens = torch.from_numpy(batch.tokens)
    (reference.model.loss(tokens[:, :-1], tokens[:, 1:])[0] / (tokens.shape[0] * 32)).backward()
    for one, other in zip(state.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_channel_losses_weighted_by_their_tokens_are_the_loss(config):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state, batch = make_state(settings), make_batch()
    batch = dataclasses.replace(batch, channels=np.array([0, 0, 0, 0, 0, 1, 1, 1]))
    result = train_step(state, batch, CHANNELS, settings, CPU)
    first, second, third = result.channel_losses
    assert third is None
    assert result.loss == pytest.approx((5 * first + 3 * second) / 8, rel=1e-12)
    assert first != second
    assert result.updated


def test_a_step_counts_its_tokens_and_takes_the_rate_of_its_number(config):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state = make_state(settings)
    found = [train_step(state, make_batch(), CHANNELS, settings, CPU).lr for _ in range(3)]
    assert found == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert (state.step, state.tokens) == (3, 3 * 256)


def test_dropout_depends_on_seed_and_step_alone(config):
    def after_one_step(seed=1234, step=0):
        settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256, "seed": seed})
        state = make_state(settings)
        state.step = step
        train_step(state, make_batch(), CHANNELS, settings, CPU)
        return state.optimizer_tensors()["exp_avg/embedding.weight"].clone()  # the gradient, up to a factor

    first = after_one_step()
    torch.rand(100)  # whatever the process does in between
    assert torch.equal(after_one_step(), first)
    assert not torch.equal(after_one_step(seed=1235), first)
    assert not torch.equal(after_one_step(step=1), first)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_computes_in_bfloat16_over_float32_weights(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "precision": "bfloat16"})
    exact_settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256})
    narrow, wide = make_state(settings), make_state(exact_settings)
    result = train_step(narrow, make_batch(), CHANNELS, settings, CPU)
    exact = train_step(wide, make_batch(), CHANNELS, exact_settings, CPU)
    assert result.loss == pytest.approx(exact.loss, rel=1e-2)
    assert result.loss != exact.loss
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in tensors(narrow).values()} == {torch.float32, torch.float64}
    for name, parameter in narrow.model.named_parameters():
        assert torch.equal(parameter, narrow.model_tensors()[name].bfloat16()), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_sums_the_gradient_of_the_micro_batches_in_float32(config):
    gradients = []
    for micro in (8, 1):
        settings = config(
            model=NO_DROPOUT,
            train={"tokens_per_step": 256, "precision": "bfloat16", "micro_batch_samples": micro},
        )
        state = make_state(settings)
        _forward_backward(state, make_batch(), CHANNELS, settings, CPU)
        assert all(parameter.grad is None for parameter in state.model.parameters())
        gradients.append(state.weights.gradients)
    assert gradients[0].dtype == torch.float32
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-2


def test_the_z_term_pulls_the_log_of_the_sum_towards_zero_and_is_no_part_of_the_reported_loss(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "z_loss": 0.1})
    plain_settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256})
    with_z, without = make_state(settings), make_state(plain_settings)
    first = train_step(with_z, make_batch(), CHANNELS, settings, CPU)
    second = train_step(without, make_batch(), CHANNELS, plain_settings, CPU)
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.grad_norm != pytest.approx(second.grad_norm, rel=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_bit_unchanged(config, what):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state = make_state(settings)
    train_step(state, make_batch(), CHANNELS, settings, CPU)
    weight = state.model.norm.weight
    if what == "loss":
        with torch.no_grad():
            weight[0] = torch.inf
    else:
        hook = weight.register_hook(lambda gradient: gradient * torch.inf)
    before = tensors(state)
    result = train_step(state, make_batch(1), CHANNELS, settings, CPU)
    assert not result.updated
    assert np.isfinite(result.loss) == (what == "gradient")
    assert_same_bits(tensors(state), before)
    assert (state.step, state.tokens) == (2, 512)
    assert not state.weights.gradients.any()
    if what == "loss":
        with torch.no_grad():
            weight[0] = 1.0
    else:
        hook.remove()
    assert train_step(state, make_batch(2), CHANNELS, settings, CPU).updated


def test_guards_stop_after_too_many_skips_or_at_once_where_told():
    patient = GuardsConfig(nonfinite="skip", max_skips_in_a_row=3)
    for skips in (0, 1, 2):
        check_skips(7, skips, float("nan"), 1.0, patient)
    with pytest.raises(AnomalyError, match=r"Step 7: loss nan.*3 updates in a row") as caught:
        check_skips(7, 3, float("nan"), 1.0, patient)
    assert caught.value.exit_code == 12
    strict = GuardsConfig(nonfinite="stop")
    check_skips(7, 0, 2.0, 1.0, strict)
    with pytest.raises(AnomalyError, match="so the run ends here, unharmed"):
        check_skips(7, 1, 2.0, float("inf"), strict)


# ---- tokens that do not count ----


def weighted(batch, weights):
    weights = np.asarray(weights, dtype=np.float32)
    return dataclasses.replace(batch, weights=weights, counted=float(weights.sum()))


def gradients_of(batch, settings):
    state = make_state(settings)
    sums = _forward_backward(state, batch, CHANNELS, settings, CPU)
    return {name: parameter.grad.clone() for name, parameter in state.model.named_parameters()}, sums


def test_masked_tokens_receive_no_gradient_and_count_nowhere(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 2})
    batch = make_batch()
    weights = np.random.default_rng(1).integers(0, 2, (8, 32))
    weights[3] = 0  # a row of weight 0, as a short rank gets
    state = make_state(settings, ops=OpsConfig(linear_cross_entropy="off", cross_entropy="eager"))
    hidden = []
    state.model.register_forward_hook(lambda _module, _given, found: found.retain_grad() or hidden.append(found))
    sums = _forward_backward(state, weighted(batch, weights), CHANNELS, settings, CPU)
    gradient = torch.cat([part.grad for part in hidden])  # (8, 32, C): what comes down from the head
    assert not gradient[torch.from_numpy(weights == 0)].any()
    assert gradient[torch.from_numpy(weights == 1)].any(dim=-1).all()
    assert sums[1].tolist() == [weights[0::2].sum(), weights[1::2].sum(), 0]


def test_what_stands_at_masked_targets_does_not_matter(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 4})
    batch = make_batch()
    weights = np.ones((8, 32))
    weights[:, 20:] = 0
    other = batch.tokens.copy()
    other[:, 21:] = 5  # the tail is neither predicted nor seen by what is
    one, first = gradients_of(weighted(batch, weights), settings)
    two, second = gradients_of(weighted(dataclasses.replace(batch, tokens=other), weights), settings)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, two[name], rtol=1e-5, atol=1e-8, msg=name)
    torch.testing.assert_close(first, second)


def test_weights_of_one_give_the_gradient_of_no_weights(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 4})
    plain, sums = gradients_of(make_batch(), settings)
    ones, same_sums = gradients_of(weighted(make_batch(), np.ones((8, 32))), settings)
    for name, gradient in plain.items():
        assert torch.equal(gradient, ones[name]), name
    assert torch.equal(sums, same_sums)


def test_a_batch_in_which_nothing_counts_moves_nothing_and_is_finite(config):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    result = train_step(make_state(settings), weighted(make_batch(), np.zeros((8, 32))), CHANNELS, settings, CPU)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert result.channel_losses == [None] * CHANNELS
