"""The learning rate over the steps, who decays, and the length of the gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.train.config import OptimConfig, ScheduleConfig
from zero2all.train.optim import build_optimizer, clip_gradient, parameter_groups
from zero2all.train.schedule import learning_rate


def rates(steps, **options):
    return [learning_rate(step, steps, 2.0, ScheduleConfig(**options)) for step in range(steps)]


def model_with(**options):
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1}
    model = Z2all(ModelConfig(**{**shape, "max_seq_len": 16, **options}), resolve(OpsConfig(), "cpu"))
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
    config = OptimConfig(weight_decay=0.3, decay_embeddings=decay_embeddings)
    decay = {id(p): group["weight_decay"] for group in parameter_groups(model, config) for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(decay) == len(named)
    for name, parameter in named.items():
        if "norm" in name or name.endswith("bias"):
            wanted = 0.0
        elif name in ("embedding.weight", "head.weight"):
            wanted = 0.3 if decay_embeddings else 0.0
        else:
            wanted = 0.3
        assert decay[id(parameter)] == wanted, name


def test_decay_shrinks_matrices_and_leaves_norms_alone():
    model = model_with()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(model, OptimConfig(lr_max=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] * (1.0 if "norm" in name else 0.95))


def test_clipping_shortens_a_long_gradient_and_returns_its_length_before():
    model = model_with()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    length = 0.5 * sum(parameter.numel() for parameter in model.parameters()) ** 0.5
    assert float(clip_gradient(model, 0.0)) == pytest.approx(length)
    assert float(clip_gradient(model, 0.0)) == pytest.approx(length)  # 0 leaves it alone
    assert float(clip_gradient(model, 10 * length)) == pytest.approx(length)
    assert float(clip_gradient(model, 1.0)) == pytest.approx(length)  # longer than allowed: shortened
    assert float(clip_gradient(model, 1.0)) == pytest.approx(1.0, rel=1e-4)
