"""The state of a run: flat buffers under the model's parameters, the optimizer that fits, tensors that can be kept."""

import dataclasses

import pytest
import torch

from tests.train.states import assert_same_bits, copies, loaded_from
from zero2all.config.training import OptimConfig
from zero2all.estimate.memory import checkpoint_bytes
from zero2all.estimate.model_calculators import CHECKPOINT_BYTES
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.optimizer import eager_adamw
from zero2all.ops.registry import Choice, resolve
from zero2all.ops.split_master import join, split
from zero2all.parallel.buckets import ALIGNMENT
from zero2all.parallel.parameter_table import init_weights, layout_table
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.flat_adamw import FlatAdamW
from zero2all.train.state import DTYPES, new_state
from zero2all.train.weights import squared_norm

KINDS = ["adamw", "muon", "adamw_8bit", "adamw_bf16"]
GO, SKIP = torch.tensor(False), torch.tensor(True)
KINDS_AND_DTYPES = [(kind, torch.bfloat16) for kind in KINDS] + [("adamw", torch.float32), ("muon", torch.float16)]


def model_with(ops=None, seed=1, **options):
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1}
    model = Z2all(ModelConfig(**{**shape, "max_seq_len": 16, **options}), resolve(ops or OpsConfig(), "cpu"))
    init_weights(model, seed)
    return model


def make_state(kind="adamw", dtype=torch.float32, seed=1, ops=None, **options):
    return new_state(model_with(ops, seed), OptimConfig(kind, **options), dtype)


def fill_gradients(state, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for at in state.weights.plan.places.values():
        values = torch.randn(at.stop - at.start, generator=generator)
        state.weights.gradients[at] = values.to(state.weights.gradients.dtype)


def update(state, scale=1.0, flag=GO):
    state.optimizer.step(torch.tensor(scale), flag)
    if not state.optimizer.writes_weights:
        state.weights.publish_masters()


def test_parameters_become_views_of_one_buffer_in_which_each_kind_is_one_bucket():
    model = model_with(attention_bias="all")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = new_state(model, OptimConfig(), torch.float32).weights
    plan = weights.plan
    assert [bucket.kind for bucket in plan.buckets] == ["embedding", "norm", "matrix", "bias", "head"]
    assert [bucket.span for bucket in plan.buckets] == weights.own == weights.own_at, "one process owns all"
    assert plan.length == len(weights.masters)
    assert all(place.start % ALIGNMENT == 0 for place in plan.places.values())
    assert sum(place.stop - place.start for place in plan.places.values()) == sum(p.numel() for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    weights.masters.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backward_passes_add_up_in_the_buffer_in_float32(dtype):
    state = make_state(dtype=dtype)
    for _ in range(2):
        sum((parameter * 3).sum() for parameter in state.model.parameters()).backward()
    for name, master in state.weights.masters_by_name().items():
        assert master.part.values.dtype == master.gradient().dtype == torch.float32
        assert (master.gradient() == 6).all(), name
    if dtype != torch.float32:
        assert all(parameter.grad is None for parameter in state.model.parameters())
    assert state.weights.gradients.sum() == 6 * sum(parameter.numel() for parameter in state.model.parameters())
    length = float(state.weights.squared_norm_share())
    assert length == pytest.approx(36 * sum(parameter.numel() for parameter in state.model.parameters()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_long_gradient_is_summed_as_in_float64(dtype):
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert float(squared_norm(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_weights_follow_their_masters(kind):
    state = make_state(kind, torch.bfloat16)
    holders = dict(state.model.named_parameters())
    versions = {name: parameter._version for name, parameter in holders.items()}
    before = {name: part.values.clone() for name, part in state.weights.parts(state.weights.weights).items()}
    state.optimizer.set_learning_rate(0.1)
    fill_gradients(state)
    update(state)
    weights = state.weights.parts(state.weights.weights)
    for name, master in state.weights.masters_by_name().items():
        assert torch.equal(weights[name].values, master.part.values.bfloat16()), name
        assert not torch.equal(weights[name].values, before[name]), name
        assert master.part.values.dtype == (torch.bfloat16 if kind == "adamw_bf16" else torch.float32)
    assert all(holders[name]._version > version for name, version in versions.items()), "caches must learn of it"


def adamw_split(groups, *rest):
    """What our kernel does, by torch's loop on masters put together for it."""
    whole = [dataclasses.replace(group, masters=join(group.weights, group.masters)) for group in groups]
    eager_adamw(whole, *rest)
    for group, updated in zip(groups, whole, strict=True):
        group.weights[:], group.masters[:] = split(updated.masters)


def split_state(seed=1):
    """A state as it is made where our kernel runs, without the kernel."""
    model = model_with(seed=seed)
    choices = [choice for choice in model.ops.choices if choice.operator != "optimizer"]
    ours = Choice("optimizer", "auto", "triton", "for this test")
    model.ops = dataclasses.replace(model.ops, optimizer=adamw_split, choices=(*choices, ours))
    return new_state(model, OptimConfig(), torch.bfloat16)


def one_step(state, seed=0):
    fill_gradients(state, seed)
    state.optimizer.set_learning_rate(0.01)
    update(state)
    state.weights.zero_gradients()


def whole_state():
    return make_state(dtype=torch.bfloat16, ops=OpsConfig(optimizer="eager"))


def test_a_bfloat16_weight_is_half_of_its_master_where_the_optimizer_can_put_them_together():
    state, whole = split_state(), whole_state()
    length = whole.weights.masters.numel()
    assert state.weights.weights.nbytes + state.weights.masters.nbytes == 4 * length
    assert whole.weights.weights.nbytes + whole.weights.masters.nbytes == 6 * length
    for seed in range(3):
        for each in (state, whole):
            one_step(each, seed)
        wanted = copies(whole)
        assert_same_bits(copies(state), wanted)
        assert {value.dtype for value in wanted.values()} == {torch.float32}
        assert not state.weights.gradients.any(), "looking leaves everything as it was"
    for name, part in state.weights.parts(state.weights.weights).items():
        assert torch.equal(part.values, split(wanted[f"model/{name}"])[0]), name


def test_a_split_state_goes_on_bit_for_bit_from_one_with_whole_masters():
    whole, state = whole_state(), split_state(seed=2)
    one_step(whole)
    fill_gradients(state)  # left over from a step that was not finished
    loaded_from(state, copies(whole))
    state.resume_from(whole.counters())
    for each in (state, whole):
        one_step(each, 1)
    assert_same_bits(copies(state), copies(whole))


def test_samples_of_masters_are_the_same_however_they_are_kept():
    whole, state = whole_state(), split_state()
    fill_gradients(state)  # between backward pass and update too
    kept = state.weights.gradients.clone()
    samples = state.weights.master_samples(100)
    assert torch.equal(state.weights.gradients, kept)
    assert_same_bits(samples, whole.weights.master_samples(100))
    assert all(1 <= values.numel() <= 200 for values in samples.values())


def test_adamw_on_whole_weights_takes_the_fast_path_and_float64_the_formula():
    assert isinstance(make_state().optimizer, FlatAdamW)
    assert isinstance(make_state(dtype=torch.bfloat16).optimizer, FlatAdamW)
    assert isinstance(make_state(dtype=torch.float64).optimizer, AdamW)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "eager"])
def test_every_implementation_scales_the_gradient_and_skips_without_a_trace(implementation):
    def after(scale, flag):
        state = make_state(ops=OpsConfig(optimizer=implementation))
        state.optimizer.set_learning_rate(0.1)
        fill_gradients(state)
        before = copies(state)
        update(state, scale, flag)
        return before, copies(state)

    assert_same_bits(*after(1.0, SKIP))
    whole, quarter = after(1.0, GO)[1], after(0.25, GO)[1]
    for name, value in whole.items():
        share = 0.25 if "/exp_avg/" in name else 0.0625 if "/exp_avg_sq/" in name else None
        if share is not None:
            torch.testing.assert_close(quarter[name], value * share)


def test_a_checkpoint_holds_the_logical_parameters_and_their_moments():
    state = make_state()
    names = {parameter.name: parameter.shape for parameter in layout_table(state.model.config)}
    assert "blocks.1.attention.v.weight" in names
    wanted = {f"{group}/{name}" for group in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq") for name in names}
    found = copies(state)
    assert found.keys() == wanted | {"optimizer/step/all"}
    assert {name: tuple(found[f"model/{name}"].shape) for name in names} == names


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_a_state_whose_tensors_were_filled_from_another_goes_on_bit_for_bit(kind, dtype):
    one, other = make_state(kind, dtype), make_state(kind, dtype, seed=2)
    one_step(one)
    one.step, one.tokens = 7, 70
    fill_gradients(other)  # left over from a step that was not finished
    loaded_from(other, copies(one))
    other.resume_from(one.counters())
    assert (other.step, other.tokens) == (7, 70)
    for state in (one, other):
        state.optimizer.set_learning_rate(0.02)
        state.weights.gradients.add_(0.5)
        update(state)
    assert_same_bits(copies(other), copies(one))
    assert_same_bits(dict(one.model.named_parameters()), dict(other.model.named_parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_checkpoint_is_as_large_as_the_calculators_say(kind, precision):
    options = {"adamw_bf16": {"bf16_rounding": "kahan"}}.get(kind, {})
    state = make_state(kind, DTYPES[precision], **options)
    held = sum(values.numel() * values.element_size() for values in copies(state).values())
    said = checkpoint_bytes(state.model.config, kind, precision, bool(options))
    assert held == pytest.approx(said, abs=64)  # the number of the step
    assert kind != "adamw" or said == CHECKPOINT_BYTES * parameter_counts(state.model.config)["total"]
