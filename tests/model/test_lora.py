"""Adapters: the formula, their gradients and an update, and that nothing else is trained or held for training."""

import dataclasses
import itertools

import pytest
import torch

from tests.model.test_model_z2all import BASE, VARIANTS, build, logits, tokens
from tests.train.states import copies
from zero2all.config.training import OptimConfig
from zero2all.model.config import LORA_TARGETS, LoraConfig, MoeConfig
from zero2all.model.lora import add_adapters, initial_adapters, merge
from zero2all.parallel.parameter_table import model_parts
from zero2all.train.state import new_state

LORA = LoraConfig(rank=3, alpha=7.0)


def adapted(config=BASE, lora=LORA, dtype=torch.float64, **ops):
    """A model, its adapters with values, both by name, and the state of a run that trains them."""
    model = build(config, **ops).to(dtype)
    weights = {name: part.values.clone() for name, part in model_parts(model).items()}
    add_adapters(model, lora, config)
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
@pytest.mark.parametrize("lora", [LORA, LoraConfig(2, 5.0, ["up_proj", "q_proj", "v_proj"], rslora=True)], ids=str)
def test_adapters_act_as_the_merged_matrix_does(config, lora):
    model, weights, adapters, _ = adapted(config, lora)
    ids = tokens()
    found, base = logits(model, ids), logits(build(config).double(), ids)
    torch.testing.assert_close(found, logits(merged(config, weights, adapters, lora), ids), rtol=0, atol=1e-12)
    assert (found - base).abs().max() > 1e-2
    for name, values in adapters.items():
        assert values.abs().min() > 0, name


def test_it_begins_as_the_base_and_depends_on_the_seed_alone():
    first, again, other = (initial_adapters(BASE, LORA, seed) for seed in (1, 1, 2))
    of_a = {name for name in first if name.endswith("_a")}
    assert len(of_a) == len(LORA_TARGETS) * BASE.layers
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in of_a)
    assert not any(first[name].any() for name in first.keys() - of_a)
    down = first["blocks.0.feed_forward.down.lora.down_proj_a"]
    assert 0.9 * BASE.intermediate_size**-0.5 < down.abs().max() <= BASE.intermediate_size**-0.5


TARGETS = {
    **{"attention.qkv": ("q_proj", "k_proj", "v_proj"), "attention.out": ("o_proj",)},
    **{"feed_forward.gate_up_pairs": ("gate_proj", "up_proj"), "feed_forward.down": ("down_proj",)},
}


def sums_of(model, leaves):
    """The parameters of a model, with 7/3 B A in the matrices of its blocks: differentiable in A and B."""
    sums = {name: one.detach() for name, one in model.named_parameters()}
    for number, (layer, targets) in itertools.product(range(model.config.layers), TARGETS.items()):
        place = f"blocks.{number}.{layer}"
        parts = [7 / 3 * leaves[f"{place}.lora.{one}_b"] @ leaves[f"{place}.lora.{one}_a"] for one in targets]
        joined = torch.stack(parts, 1).flatten(0, 1) if "gate_proj" in targets else torch.cat(parts)
        sums[f"{place}.weight"] = sums[f"{place}.weight"] + joined
    return sums


@pytest.mark.parametrize("config", [VARIANTS["Qwen2-like"], VARIANTS["qk_norm"]], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", ["off", "chunked"])
def test_an_update_is_that_of_autograd_and_the_rest_has_neither_gradient_nor_moments(config, loss):
    model, weights, adapters, state = adapted(config, linear_cross_entropy=loss)
    ids, before = tokens(length=21), {name: one.clone() for name, one in model.named_parameters()}
    model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
    state.optimizer.step()
    plain, leaves = build(config).double(), {name: one.clone().requires_grad_() for name, one in adapters.items()}
    hidden = torch.func.functional_call(plain, sums_of(plain, leaves), (ids[:, :-1],))
    said, targets = plain.logits(hidden).flatten(0, 1), ids[:, 1:].flatten()
    torch.nn.functional.cross_entropy(said, targets, reduction="sum").backward()
    torch.optim.AdamW(leaves.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    now = dict(model.named_parameters())
    for name, leaf in leaves.items():
        torch.testing.assert_close(now[name], leaf.detach(), rtol=0, atol=1e-9, msg=name)
        assert not torch.equal(now[name], before[name])
    frozen = now.keys() - leaves.keys()
    assert all(torch.equal(now[name], before[name]) and now[name].grad is None for name in frozen)
    moments = {name.split("/")[2] for name in state.optimizer_tensors() if name.count("/") == 2} - {"all"}
    assert moments == leaves.keys()
    gradients = state.weights.parts(state.weights.gradients).values()
    assert sum(part.values.numel() for part in gradients) == sum(map(torch.numel, leaves.values()))
    assert {name[6:] for name in copies(state) if name.startswith("model/")} == weights.keys() | leaves.keys()


def test_of_a_model_with_experts_attention_alone_has_adapters():
    config = dataclasses.replace(BASE, moe=MoeConfig(experts=4, experts_per_token=2, expert_size=8))
    model, weights, adapters, _ = adapted(config)
    assert {name.split(".")[2] for name in adapters} == {"attention"}
    torch.testing.assert_close(logits(model, tokens()), logits(merged(config, weights, adapters), tokens()))
