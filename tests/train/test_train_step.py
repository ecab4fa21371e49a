"""One optimizer step: the same gradient whatever the micro-batch, and no trace of a step that went wrong."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.train.states import copies
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
NO_DROPOUT = {"vocab_size": VOCAB_SIZE, "residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}


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
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB_SIZE, (samples, seq_len + 1))
    channels = np.arange(samples) % 2  # the third channel has no sample
    return Batch(tokens, channels, channels, 0)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_gradient_is_the_same_for_every_micro_batch(config):
    gradients = {}
    for micro in (8, 7, 4, 3, 1):  # 7 + 1 and 3 + 3 + 2: the last pass is shorter
        settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": micro})
        state = make_state(settings, torch.float64)
        sums = forward_backward(state, make_batch(), settings)
        gradients[micro] = {name: parameter.grad for name, parameter in state.model.named_parameters()}
        gradients[micro]["sums"] = sums
    for micro in (7, 4, 3, 1):
        for name, wanted in gradients[8].items():
            torch.testing.assert_close(gradients[micro][name], wanted, rtol=1e-12, atol=1e-15, msg=name)


def test_gradient_is_that_of_the_mean_loss_over_all_tokens(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 2})
    state, reference, batch = make_state(settings), make_state(settings), make_batch()
    forward_backward(state, batch, settings)
    tokens = torch.from_numpy(batch.tokens)
    (reference.model.loss(tokens[:, :-1], tokens[:, 1:])[0] / (tokens.shape[0] * 32)).backward()
    for one, other in zip(state.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_channel_losses_weighted_by_their_tokens_are_the_loss(config):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state, batch = make_state(settings), make_batch()
    batch = dataclasses.replace(batch, channels=np.array([0, 0, 0, 0, 0, 1, 1, 1]))
    result = train_step(state, batch, settings)
    first, second, third = result.channel_losses
    assert third is None
    assert result.loss == pytest.approx((5 * first + 3 * second) / 8, rel=1e-12)
    assert first != second
    assert result.updated


def test_a_step_counts_its_tokens_and_reports_what_it_was_made_with(config):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state = make_state(settings)
    for step in (1, 2, 3):
        result = train_step(
            state, make_batch(), settings, StepPlan(step / 100, stop_requested=step == 2, folder_changed=step == 3)
        )
        assert (result.step, result.tokens) == (step, (256 * (step - 1), 256 * step))
        assert (result.lr, result.stop_requested, result.folder_changed) == (step / 100, step == 2, step == 3)
        assert set(result.seconds) == set(PARTS)
        assert min(result.seconds.values()) >= 0
    assert (state.step, state.tokens) == (3, 3 * 256)


def test_the_loss_of_every_row_comes_with_the_step(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 3})
    result = train_step(make_state(settings), make_batch(), settings)
    assert result.row_counts.tolist() == [32.0] * 8
    assert result.row_nats.sum() / 256 == pytest.approx(result.loss, rel=1e-12)
    for row in range(8):
        batch = make_batch()
        one = Batch(batch.tokens[[row]], batch.channels[[row]], batch.sources[[row]], 0)
        assert train_step(make_state(settings), one, settings).loss == pytest.approx(
            result.row_nats[row] / 32, rel=1e-5
        )


def test_dropout_depends_on_seed_and_step_alone(config):
    def after_one_step(seed=1234, step=0):
        settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256, "seed": seed})
        state = make_state(settings)
        state.step = step
        train_step(state, make_batch(), settings)
        return state.optimizer_tensors()[
            "optimizer/exp_avg/embedding.weight"
        ].values.clone()  # the gradient, up to a factor

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
    result = train_step(narrow, make_batch(), settings)
    exact = train_step(wide, make_batch(), exact_settings)
    assert result.loss == pytest.approx(exact.loss, rel=1e-2)
    assert result.loss != exact.loss
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.bfloat16}
    masters = copies(narrow)
    assert {value.dtype for value in masters.values()} == {torch.float32}
    for name, part in narrow.weights.parts(narrow.weights.weights).items():
        assert torch.equal(part.values, masters[f"model/{name}"].bfloat16()), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_sums_the_gradient_of_the_micro_batches_in_float32(config):
    gradients = []
    for micro in (8, 1):
        settings = config(
            model=NO_DROPOUT,
            train={"tokens_per_step": 256, "precision": "bfloat16", "micro_batch_samples": micro},
        )
        state = make_state(settings)
        forward_backward(state, make_batch(), settings)
        assert all(parameter.grad is None for parameter in state.model.parameters())
        gradients.append(state.weights.gradients)
    assert gradients[0].dtype == torch.float32
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-2


def test_the_z_term_pulls_the_log_of_the_sum_towards_zero_and_is_no_part_of_the_reported_loss(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "z_loss": 0.1})
    plain_settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256})
    with_z, without = make_state(settings), make_state(plain_settings)
    first = train_step(with_z, make_batch(), settings)
    second = train_step(without, make_batch(), plain_settings)
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.grad_norm != pytest.approx(second.grad_norm, rel=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_bit_unchanged(config, what):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state = make_state(settings)
    train_step(state, make_batch(), settings)
    weight = state.model.norm.weight
    if what == "loss":
        with torch.no_grad():
            weight[0] = torch.inf
    else:
        hook = weight.register_hook(lambda gradient: gradient * torch.inf)
    before = copies(state)
    result = train_step(state, make_batch(1), settings)
    assert not result.updated
    assert np.isfinite(result.loss) == (what == "gradient")
    assert_same_bits(copies(state), before)
    assert (state.step, state.tokens) == (2, 512)
    assert not state.weights.gradients.any()
    if what == "loss":
        with torch.no_grad():
            weight[0] = 1.0
    else:
        hook.remove()
    assert train_step(state, make_batch(2), settings).updated


@pytest.mark.parametrize(
    "limits",
    [StepLimits(loss=1.0), StepLimits(grad_norm=1e-3), StepLimits(loss_low=100.0)],
    ids=["loss", "gradient", "drop"],
)
def test_a_step_beyond_its_limits_is_refused_and_leaves_no_trace(config, limits):
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    state, other = make_state(settings), make_state(settings)
    before = copies(state)
    refused = train_step(state, make_batch(), settings, StepPlan(0.01, limits))
    assert not refused.updated
    assert_same_bits(copies(state), before)
    assert not state.weights.gradients.any()
    other.step, other.tokens = 1, 256
    assert train_step(state, make_batch(1), settings, StepPlan(0.01, StepLimits())).updated
    train_step(other, make_batch(1), settings)
    assert_same_bits(copies(state), copies(other))


def test_a_loss_and_a_norm_that_only_few_rows_raise_are_not_refused(config):
    """The device refuses a high loss only where it is also high without the highest quarter of the rows."""
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256})
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
        settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256}, optim={"clip_grad_norm": longest})
        state = make_state(settings)
        norm = train_step(state, make_batch(), settings).grad_norm
        return state.optimizer.firsts, norm

    whole, length = first_step(0.0)
    assert float(whole.norm()) == pytest.approx(0.1 * length, rel=1e-5)  # 1 - beta1 of the gradient
    for longest, share in ((10 * length, 1.0), (length / 4, 0.25)):
        shortened, norm = first_step(longest)
        assert norm == length
        torch.testing.assert_close(shortened, whole * share)


# ---- tokens that do not count ----


def weighted(batch, weights):
    return dataclasses.replace(batch, weights=np.asarray(weights, dtype=np.float32))


def test_masked_tokens_receive_no_gradient_and_count_nowhere(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 2})
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
    settings = config(model={"vocab_size": VOCAB_SIZE}, train={"tokens_per_step": 256})
    result = train_step(make_state(settings), weighted(make_batch(), np.zeros((8, 32))), settings)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert result.channel_losses == [None] * CHANNELS
