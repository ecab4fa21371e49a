"""One optimizer step: the same gradient whatever the micro-batch, and no trace of a step that went wrong."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.parallel.layouts import Squares
from tests.train.conftest import NO_DROPOUT
from tests.train.states import assert_same_bits, copies
from zero2all.config import ConfigError, config_from_values
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.parameter_table import init_weights
from zero2all.parallel.world import World
from zero2all.train.guards.detector import StepLimits
from zero2all.train.state import DTYPES, new_state
from zero2all.train.step_stats import StepResult, StepStats
from zero2all.train.step_timer import PARTS, StepTimer
from zero2all.train.train_step import StepPlan, add_losses
from zero2all.train.train_step import forward_backward as accumulate
from zero2all.train.train_step import train_step as pending_step

PLAN = StepPlan(lr=0.01)
CHANNELS = 3
VOCAB_SIZE = 64
MODEL = {**NO_DROPOUT, "vocab_size": VOCAB_SIZE}


def settings_of(config, model=MODEL, optim=None, **train):
    return config(model=model, optim=optim or {}, train={"tokens_per_step": 256, **train})


def make_state(config, dtype=None, ops=None):
    dtype = dtype or DTYPES[config.train.precision]
    model = Z2all(config.model, resolve(ops or OpsConfig(), "cpu"))
    init_weights(model, 1)
    if dtype == torch.float64:
        model.double()
    state = new_state(model.train(), config.optim, dtype)
    state.micro_batch_samples = config.train.micro_batch_samples
    return state


def train_step(state, batch, config, plan=PLAN) -> StepResult:
    return pending_step(state, batch, CHANNELS, config, World(), plan).result()


def forward_backward(state, batch, config):
    """Leaves the gradient in place; returns summed nats and counts of the channels, (2, CHANNELS)."""
    world = World()
    stats = StepStats(CHANNELS, batch.global_rows)
    add_losses(stats, batch, *accumulate(state, batch, config, world, StepTimer(world.device)))
    return torch.stack((stats.channel_nats, stats.channel_counts))


def make_batch(seed=0, samples=8, seq_len=32):
    tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (samples, seq_len + 1))
    channels = np.arange(samples) % 2  # the third channel has no sample
    return Batch(tokens, channels, channels, 0)


@pytest.mark.parametrize("micro", [8, 7, 3])  # 7 + 1 and 3 + 3 + 2: the last pass is shorter
def test_gradient_is_that_of_the_mean_loss_over_all_tokens_for_every_micro_batch(config, micro):
    settings = settings_of(config, micro_batch_samples=micro)
    state, reference, batch = make_state(settings, torch.float64), make_state(settings, torch.float64), make_batch()
    sums = forward_backward(state, batch, settings)
    tokens = torch.from_numpy(batch.tokens)
    total = reference.model.loss(tokens[:, :-1], tokens[:, 1:])[0]
    (total / (tokens.shape[0] * 32)).backward()
    assert float(sums[0].sum()) == pytest.approx(float(total.detach()), rel=1e-12)
    for one, other in zip(state.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_channel_losses_weighted_by_their_tokens_are_the_loss(config):
    settings = settings_of(config)
    batch = dataclasses.replace(make_batch(), channels=np.array([0, 0, 0, 0, 0, 1, 1, 1]))
    result = train_step(make_state(settings), batch, settings)
    first, second, third = result.channel_losses
    assert third is None
    assert result.loss == pytest.approx((5 * first + 3 * second) / 8, rel=1e-12)
    assert first != second


def test_a_step_counts_its_tokens_and_reports_what_it_was_made_with(config):
    settings = settings_of(config)
    state = make_state(settings)
    for step in (1, 2, 3):
        plan = StepPlan(step / 100, stop_requested=step == 2, folder_changed=step == 3)
        result = train_step(state, make_batch(), settings, plan)
        assert (result.step, result.tokens) == (step, (256 * (step - 1), 256 * step))
        assert (result.lr, result.stop_requested, result.folder_changed) == (step / 100, step == 2, step == 3)
        assert set(result.seconds) == set(PARTS)
        assert min(result.seconds.values()) >= 0


def test_the_loss_of_every_row_comes_with_the_step(config):
    settings = settings_of(config, micro_batch_samples=3)
    result = train_step(make_state(settings), make_batch(), settings)
    assert result.row_counts.tolist() == [32.0] * 8
    assert result.row_nats.sum() / 256 == pytest.approx(result.loss, rel=1e-12)
    for row in (0, 7):
        batch = make_batch()
        one = Batch(batch.tokens[[row]], batch.channels[[row]], batch.sources[[row]], 0)
        loss = train_step(make_state(settings), one, settings).loss
        assert loss == pytest.approx(result.row_nats[row] / 32, rel=1e-5)


def test_dropout_depends_on_seed_and_step_alone(config):
    def after_one_step(seed=1234, step=0):
        settings = settings_of(config, {"vocab_size": VOCAB_SIZE}, seed=seed)
        state = make_state(settings)
        state.step = step
        train_step(state, make_batch(), settings)
        return copies(state)["optimizer/exp_avg/embedding.weight"]  # the gradient, up to a factor

    first = after_one_step()
    torch.rand(100)  # whatever the process does in between
    assert torch.equal(after_one_step(), first)
    assert not torch.equal(after_one_step(seed=1235), first)
    assert not torch.equal(after_one_step(step=1), first)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_computes_in_bfloat16_over_float32_weights(config):
    settings, exact_settings = settings_of(config, precision="bfloat16"), settings_of(config)
    narrow = make_state(settings)
    result = train_step(narrow, make_batch(), settings)
    exact = train_step(make_state(exact_settings), make_batch(), exact_settings)
    assert result.loss == pytest.approx(exact.loss, rel=1e-2)
    assert result.loss != exact.loss
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in copies(narrow).values()} == {torch.float32}


def test_the_z_term_pulls_the_log_of_the_sum_towards_zero_and_is_no_part_of_the_reported_loss(config):
    with_z, without = settings_of(config, z_loss=0.1), settings_of(config)
    first, second = (train_step(make_state(settings), make_batch(), settings) for settings in (with_z, without))
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.grad_norm != pytest.approx(second.grad_norm, rel=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_bit_unchanged(config, what):
    settings = settings_of(config)
    state = make_state(settings)
    train_step(state, make_batch(), settings)
    norm = state.model.norm
    if what == "loss":
        hook = norm.register_forward_pre_hook(lambda _, given: tuple(each * torch.inf for each in given))
    else:
        hook = norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = copies(state)
    result = train_step(state, make_batch(1), settings)
    assert not result.updated
    assert np.isfinite(result.loss) == (what == "gradient")
    assert_same_bits(copies(state), before)
    assert (state.step, state.tokens) == (2, 512)
    assert not state.weights.gradients.any()
    hook.remove()
    assert train_step(state, make_batch(2), settings).updated


@pytest.mark.parametrize("limit", [{"loss": 1.0}, {"grad_norm": 1e-3}, {"loss_low": 100.0}], ids=str)
def test_a_step_beyond_its_limits_is_refused_and_leaves_no_trace(config, limit):
    settings = settings_of(config)
    state, other = make_state(settings), make_state(settings)
    before = copies(state)
    assert not train_step(state, make_batch(), settings, StepPlan(0.01, StepLimits(**limit))).updated
    assert_same_bits(copies(state), before)
    assert not state.weights.gradients.any()
    other.step, other.tokens = 1, 256
    assert train_step(state, make_batch(1), settings, StepPlan(0.01, StepLimits())).updated
    train_step(other, make_batch(1), settings)
    assert_same_bits(copies(state), copies(other))


def test_a_loss_and_a_norm_that_only_few_rows_raise_are_not_refused(config):
    """The device refuses a high loss only where it is also high without the highest quarter of the rows."""
    settings = settings_of(config)
    state, batch = make_state(settings), make_batch()
    rare = batch.tokens[:2].copy()
    batch.tokens[:] = 5  # text that is easily learned
    for _ in range(12):
        train_step(state, batch, settings)
    usual = train_step(state, batch, settings)
    assert usual.core_loss == pytest.approx(usual.loss)
    limits = StepLimits(loss=2 * usual.loss, core_loss=2 * usual.loss)
    batch.tokens[:2] = rare
    few = train_step(state, batch, settings, StepPlan(0.0, limits))
    assert few.updated
    assert few.core_loss < limits.loss < few.loss
    long = limits._replace(grad_norm=few.grad_norm / 2)
    assert not train_step(state, batch, settings, StepPlan(0.0, long)).updated
    explained = long._replace(excess=(few.loss - few.core_loss) / 2)  # the rows that stand out explain the norm
    assert train_step(state, batch, settings, StepPlan(0.0, explained)).updated
    batch.tokens[2:4] = rare
    assert not train_step(state, batch, settings, StepPlan(0.0, limits)).updated


def test_clipping_shortens_a_long_gradient_and_the_norm_is_its_length_before(config):
    def first_step(longest):
        settings = settings_of(config, optim={"clip_grad_norm": longest})
        state = make_state(settings)
        norm = train_step(state, make_batch(), settings).grad_norm
        return state.optimizer.firsts, norm

    whole, length = first_step(0.0)
    assert float(whole.norm()) == pytest.approx(0.1 * length, rel=1e-5)  # 1 - beta1 of the gradient
    for longest, share in ((10 * length, 1.0), (length / 4, 0.25)):
        shortened, norm = first_step(longest)
        assert norm == length
        torch.testing.assert_close(shortened, whole * share)


def weighted(batch, weights):
    return dataclasses.replace(batch, weights=np.asarray(weights, dtype=np.float32))


def test_masked_tokens_receive_no_gradient_and_count_nowhere(config):
    settings = settings_of(config, micro_batch_samples=2)
    batch = make_batch()
    weights = np.random.default_rng(1).integers(0, 2, (8, 32))
    weights[3] = 0  # a row of weight 0, as a short rank gets
    state = make_state(settings, ops=OpsConfig(linear_cross_entropy="off", cross_entropy="eager"))
    hidden = []
    state.model.register_forward_hook(lambda _module, _given, found: found.retain_grad() or hidden.append(found))
    sums = forward_backward(state, weighted(batch, weights), settings)
    gradient = torch.cat([part.grad for part in hidden])  # (8, 32, C): what comes down from the head
    assert not gradient[torch.from_numpy(weights == 0)].any()
    assert gradient[torch.from_numpy(weights == 1)].any(dim=-1).all()
    assert sums[1].tolist() == [weights[0::2].sum(), weights[1::2].sum(), 0]


def test_a_batch_in_which_nothing_counts_moves_nothing_and_is_finite(config):
    settings = settings_of(config)
    result = train_step(make_state(settings), weighted(make_batch(), np.zeros((8, 32))), settings)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert result.channel_losses == [None] * CHANNELS


class Mean:
    metrics = ()

    def weights(self, scored):
        counted = scored.sum_rows(scored.sum_parts(scored.counts.sum(dtype=torch.float64)))
        return scored.counts / counted, torch.zeros(0, dtype=torch.float64)


def masked_batch():
    weights = np.random.default_rng(5).integers(0, 2, (8, 32))
    return dataclasses.replace(weighted(make_batch(), weights), counted=float(weights.sum()))


@pytest.mark.parametrize("micro", [8, 3])
def test_the_gradient_of_an_objective_is_that_of_autograd(config, micro):
    settings = settings_of(config, micro_batch_samples=micro)
    state, batch, world = make_state(settings, torch.float64), masked_batch(), World()
    _, _, numbers = accumulate(state, batch, settings, world, StepTimer(world.device), Squares())
    reference = make_state(settings, torch.float64)
    tokens = torch.from_numpy(batch.tokens)
    logits = reference.model.logits(reference.model(tokens[:, :-1])).log_softmax(-1)
    losses = -logits.gather(-1, tokens[:, 1:, None])[..., 0] * torch.from_numpy(batch.weights)
    squares = losses.sum(dim=1).square()
    squares.mean().backward()
    assert numbers.tolist() == pytest.approx([8, float(squares.detach().sum())], rel=1e-12)
    for one, other in zip(state.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_an_objective_that_is_the_mean_loss_gives_the_same_bits_as_none(config):
    settings = settings_of(config, micro_batch_samples=2)
    results = []
    for objective in (None, Mean()):
        state = make_state(settings)
        result = train_step(state, masked_batch(), settings, StepPlan(0.01, objective=objective))
        results.append((result.loss, result.grad_norm, copies(state)))
    assert results[0][:2] == results[1][:2]
    assert_same_bits(results[0][2], results[1][2])


def test_what_would_make_two_passes_differ_is_refused():
    values = {"model": {"vocab_size": VOCAB_SIZE, "residual_dropout": 0.1}, "train": {"z_loss": 1e-4}}
    values["finetune"] = {"method": "dpo"}
    with pytest.raises(ConfigError) as error:
        config_from_values(values, "of the test")
    assert [problem.field for problem in error.value.problems] == ["train.z_loss", "model.residual_dropout"]
