"""Adapters: the formula, their gradients and an update, and that nothing else is trained or held for training."""

import dataclasses

import pytest
import torch

from tests.model.test_model_z2all import BASE, VARIANTS, build, logits, tokens
from tests.train.states import copies
from zero2all.config.training import OptimConfig
from zero2all.model.config import LORA_TARGETS, LoraConfig, MoeConfig
from zero2all.model.lora import add_adapters, initial_adapters, merge
from zero2all.ops.registry import OPERATORS
from zero2all.parallel.parameter_table import model_parts
from zero2all.train.state import new_state

LORA = LoraConfig(rank=3, alpha=7.0)


def adapted(config=BASE, lora=LORA, dtype=torch.float64, **ops):
    """A model, its adapters with values, both by name, and the state of a run that trains them."""
    model = build(config, **ops).to(dtype)
    weights = {name: part.values.clone() for name, part in model_parts(model).items()}
    add_adapters(model, lora)
    state = new_state(model, OptimConfig(lr_max=1e-2, weight_decay=0.0), dtype)
    generator = torch.Generator().manual_seed(5)
    adapters = initial_adapters(config, lora, 0)
    adapters = {name: torch.randn(one.shape, generator=generator, dtype=dtype) / 4 for name, one in adapters.items()}
    with state.weights.masters_between_steps() as masters:
        assert masters.keys() == adapters.keys()
        for name, part in masters.items():
            part.values.copy_(adapters[name])
    state.weights.publish_masters()
    return model, weights, adapters, state


def merged(config, weights, adapters, lora=LORA, **ops):
    """A model without adapters whose matrices are W + scale B A; differentiable in the adapters."""
    model = build(config, **ops).double()
    parts = model_parts(model)
    sums = {name: values.clone() for name, values in weights.items()}
    merge(sums, adapters, config, lora)
    with torch.no_grad():
        for name, values in sums.items():
            parts[name].values.copy_(values)
    return model


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    "lora", [LORA, LoraConfig(2, 5.0, ["up_proj", "q_proj", "v_proj"], rslora=True)], ids=["all", "some"]
)
def test_adapters_act_as_the_merged_matrix_does(config, lora):
    model, weights, adapters, _ = adapted(config, lora)
    ids = tokens()
    found, base = logits(model, ids), logits(build(config).double(), ids)
    torch.testing.assert_close(found, logits(merged(config, weights, adapters, lora), ids), rtol=0, atol=1e-12)
    assert (found - base).abs().max() > 1e-2
    for name, values in adapters.items():
        assert values.abs().min() > 0, name


def test_a_merge_is_the_formula_of_each_of_the_seven():
    _, weights, adapters, _ = adapted()
    sums = {name: values.clone() for name, values in weights.items()}
    merge(sums, adapters, BASE, LORA)
    for target, place in {
        "k_proj": "attention.k",
        "up_proj": "feed_forward.gate_up_pairs",
        "down_proj": "feed_forward.down",
    }.items():
        holder = {"k_proj": "attention.qkv", "up_proj": "feed_forward.gate_up_pairs"}.get(target, place)
        name, weight = f"blocks.1.{holder}.lora.{target}", f"blocks.1.{place}.weight"
        moved = (sums[weight] - weights[weight])[1::2] if target == "up_proj" else sums[weight] - weights[weight]
        torch.testing.assert_close(moved, 7 / 3 * adapters[f"{name}.b"] @ adapters[f"{name}.a"], rtol=0, atol=1e-12)


def test_it_begins_as_the_base_and_depends_on_the_seed_alone():
    first, again, other = (initial_adapters(BASE, LORA, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    of_a = [name for name in first if name.endswith(".a")]
    assert len(of_a) == len(LORA_TARGETS) * BASE.layers
    assert not any(torch.equal(first[name], other[name]) for name in of_a)
    assert not any(first[name].any() for name in first.keys() - set(of_a))
    down = first["blocks.0.feed_forward.down.lora.down_proj.a"]
    assert 0.9 * BASE.intermediate_size**-0.5 < down.abs().max() <= BASE.intermediate_size**-0.5


@pytest.mark.parametrize("config", [VARIANTS["Qwen2-like"], VARIANTS["qk_norm"]], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "kind", [name.name for name in OPERATORS["linear_cross_entropy"] if name.name in ("off", "chunked")]
)
def test_an_update_is_that_of_autograd_and_the_rest_has_neither_gradient_nor_moments(config, kind):
    model, weights, adapters, state = adapted(config, linear_cross_entropy=kind)
    ids, before = tokens(length=21), {name: one.clone() for name, one in model.named_parameters()}
    total, _ = model.loss(ids[:, :-1], ids[:, 1:])
    total.backward()
    state.optimizer.step()
    state.weights.publish_masters()

    leaves = {name: values.clone().requires_grad_() for name, values in adapters.items()}
    with torch.enable_grad():
        deltas = {
            name[:-2]: 7 / 3 * leaves[f"{name[:-2]}.b"] @ values
            for name, values in leaves.items()
            if name.endswith(".a")
        }
    plain = merged(config, weights, adapters)
    # dL/dB and dL/dA follow from dL/dW of the merged model.
    plain.requires_grad_(True)
    plain.loss(ids[:, :-1], ids[:, 1:])[0].backward()
    slopes = dict(plain.named_parameters())
    query, shared = config.heads * config.head_size, config.kv_heads * config.head_size
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        q, k, v = slopes[f"{block}.attention.qkv.weight"].grad.split([query, shared, shared])
        pairs = slopes[f"{block}.feed_forward.gate_up_pairs.weight"].grad
        of = {
            **{"attention.qkv.lora.q_proj": q, "attention.qkv.lora.k_proj": k, "attention.qkv.lora.v_proj": v},
            "attention.out.lora.o_proj": slopes[f"{block}.attention.out.weight"].grad,
            "feed_forward.gate_up_pairs.lora.gate_proj": pairs[0::2],
            "feed_forward.gate_up_pairs.lora.up_proj": pairs[1::2],
            "feed_forward.down.lora.down_proj": slopes[f"{block}.feed_forward.down.weight"].grad,
        }
        for name, slope in of.items():
            deltas[f"{block}.{name}"].backward(slope)
    reference = torch.optim.AdamW(leaves.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    reference.step()
    now = dict(model.named_parameters())
    for name, leaf in leaves.items():
        torch.testing.assert_close(now[name], leaf.detach(), rtol=0, atol=1e-9, msg=name)
        assert not torch.equal(now[name], before[name])
    frozen = now.keys() - leaves.keys()
    assert all(torch.equal(now[name], before[name]) and now[name].grad is None for name in frozen)
    moments = {name.partition("/")[2].partition("/")[2] for name in state.optimizer_tensors()} - {"all"}
    assert moments == leaves.keys()
    assert state.weights.masters.numel() < 1.2 * sum(map(torch.numel, leaves.values())) + 128 * len(leaves)
    assert {
        name.partition("/")[2] for name in copies(state) if name.startswith("model/")
    } == weights.keys() | leaves.keys()


def test_of_a_model_with_experts_attention_alone_has_adapters():
    config = dataclasses.replace(BASE, moe=MoeConfig(experts=4, experts_per_token=2, expert_size=8))
    model, weights, adapters, _ = adapted(config)
    assert {name.split(".")[2] for name in adapters} == {"attention"}
    torch.testing.assert_close(logits(model, tokens()), logits(merged(config, weights, adapters), tokens()))
