"""The learning rate over the steps, who decays, and the length of the gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from zero2all.train.optim import decayed_names

from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.train.config import OptimConfig, ScheduleConfig
from zero2all.train.schedule import learning_rate
from zero2all.train.state import new_state


def rates(steps, **options):
    return [learning_rate(step, steps, 2.0, ScheduleConfig(**options)) for step in range(steps)]


def model_with(ops=None, **options):
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1}
    model = Z2all(ModelConfig(**{**shape, "max_seq_len": 16, **options}), resolve(ops or OpsConfig(), "cpu"))
    model.init_weights(1)
    return model


def test_warmup_rises_in_equal_steps_to_the_top():
    assert rates(20, warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_cosine_falls_to_its_lowest_share_exactly_at_the_last_step():
    found = rates(50, warmup_steps=10, lr_min_share=0.1)
    assert found[-1] == pytest.approx(0.2, rel=1e-12)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[10:]))
    middle = rates(51, warmup_steps=0, lr_min_share=0.1)[25]
    assert middle == pytest.approx((2.0 + 0.2) / 2)


def test_constant_stays_at_the_top():
    assert rates(10, kind="constant", warmup_steps=2)[2:] == [2.0] * 8


def test_short_runs_have_a_rate_too():
    assert rates(1, warmup_steps=0) == [2.0]
    assert rates(3, warmup_steps=3) == [pytest.approx(2 / 3), pytest.approx(4 / 3), 2.0]
    assert learning_rate(99, 50, 2.0, ScheduleConfig(warmup_steps=1, lr_min_share=0.5)) == 1.0  # a run cut short


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_norms_and_biases_never_decay_and_embeddings_by_option(tied, decay_embeddings):
    model = model_with(attention_bias="all", mlp_bias=True, tied_embeddings=tied)
    decayed = decayed_names(model, OptimConfig(decay_embeddings=decay_embeddings))
    for name, _ in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert name not in decayed
        elif name in ("embedding.weight", "head.weight"):
            assert (name in decayed) == decay_embeddings
        else:
            assert name in decayed


def test_decay_shrinks_matrices_and_leaves_norms_alone():
    state = new_state(model_with(), OptimConfig(weight_decay=0.5), torch.float32)
    before = {name: value.clone() for name, value in state.model_tensors().items()}
    state.optimizer.step(0.1, state.optimizer.gradient_norm())
    for name, value in state.model_tensors().items():
        torch.testing.assert_close(value, before[name] * (1.0 if "norm" in name else 0.95))


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "eager"])
def test_clipping_shortens_a_long_gradient_and_the_norm_is_its_length_before(optimizer):
    def first_moments(longest, scale):
        config = OptimConfig(clip_grad_norm=longest)
        state = new_state(model_with(ops=OpsConfig(optimizer=optimizer)), config, torch.float32)
        for place in state.weights.places:
            state.weights.gradients[place.at] = scale
        norm = state.optimizer.gradient_norm()
        assert float(norm) == pytest.approx(scale * sum(p.numel() for p in state.model.parameters()) ** 0.5)
        state.optimizer.step(0.1, norm)
        assert not state.weights.gradients.any()
        return state.optimizer.firsts, float(norm)

    whole, length = first_moments(0.0, 0.5)
    torch.testing.assert_close(first_moments(10 * length, 0.5)[0], whole)  # short enough
    torch.testing.assert_close(first_moments(length / 4, 0.5)[0], whole / 4)  # longer than allowed: shortened
