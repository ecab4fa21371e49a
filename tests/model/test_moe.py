"""Mixture of experts: what a token gets from its experts, how they are kept busy, and who pays for them."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.parallel import layouts
from zero2all.model.config import ModelConfig, MoeConfig, parameter_counts
from zero2all.model.moe import routers
from zero2all.model.recompute import apply_recompute
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights, layout_table
from zero2all.parallel.world import World
from zero2all.train.guards.detector import StepLimits
from zero2all.train.hooks.reports import balance_values
from zero2all.train.train_step import StepPlan, train_step

MOE = MoeConfig(6, 2, expert_size=8, shared_experts=2, dense_layers=1)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "layers": 3, "heads": 4, "kv_heads": 2, "max_seq_len": 16}
CONFIG = ModelConfig(60, **SIZES, moe=MOE)
OPS = resolve(OpsConfig(), "cpu")


def make_model(seed=1, dtype=torch.float64, **changes):
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, **changes))
    model = Z2all(config, OPS)
    init_weights(model, seed)
    return model.to(dtype)


def tokens_of(rows=3, length=16):
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(5))


def expert_by_expert(block, x, router, per_token):
    """The formula, token by token."""
    logits = x @ block.router.weight.t()
    scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(-1)
    rows = []
    for token, score in zip(x, scores, strict=True):
        chosen = (score + block.router.bias).topk(per_token).indices
        y = torch.zeros_like(token)
        for number in chosen:
            pairs, share = block.experts.gate_up_pairs[number] @ token, score[number] / score[chosen].sum()
            y = y + share * (block.experts.down[number] @ (F.silu(pairs[0::2]) * pairs[1::2]))
        rows.append(y)
    return torch.stack(rows) + block.shared(x)


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_output_and_gradients_are_those_of_the_formula(router):
    block = make_model(router=router).blocks[1].feed_forward
    with torch.no_grad():
        block.router.weight.mul_(20)
        block.router.bias.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    wanted = expert_by_expert(block, x.view(-1, 16), router, 2).view(x.shape)
    found = block(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    inputs = [x, *block.parameters()]
    gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (found, wanted)]
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-14)


def test_the_bias_decides_who_is_chosen_but_not_the_gates():
    router = make_model().blocks[1].feed_forward.router
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    router.bias[torch.tensor([2, 4])] = 9.0
    gates, chosen = router(x)
    assert all(sorted(row) == [2, 4] for row in chosen.tolist())
    scores = (x @ router.weight.t()).sigmoid().gather(1, chosen)
    torch.testing.assert_close(gates, scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_load_counts_every_token_with_a_gradient_once(recompute):
    model = make_model().train()
    apply_recompute(model, recompute)
    tokens, weights = tokens_of(), torch.ones(3, 16, dtype=torch.float64)
    weights[2] = 0.0  # a row of padding
    model.loss(tokens, tokens, weights)[0].backward()
    with torch.no_grad():  # validation counts nothing
        model(tokens)
    assert [int(router.load.sum()) for _, router in routers(model)] == [2 * 16 * 2] * 2


def test_balancing_spreads_the_tokens_over_the_experts_and_a_refused_step_moves_nothing():
    config = layouts.run_config(dtype="float32", moe=dataclasses.asdict(dataclasses.replace(MOE, balance_rate=0.02)))
    state = layouts.make_state(World(), config)

    def step(number, **plan):
        batch = layouts.batch_of(number, 0, 1)
        return train_step(state, batch, layouts.CHANNELS, config, World(), StepPlan(1e-6, **plan)).result()

    for _, router in routers(state.model):
        router.bias[0], router.bias[1] = 0.2, -0.2  # all tokens go to expert 0, none to expert 1
    results = [step(number) for number in range(16)]
    first, last = (balance_values(results[at].expert_loads, 1) for at in (0, -1))
    assert results[0].expert_loads.sum(axis=1).tolist() == [2 * layouts.SAMPLES * layouts.SEQ_LEN] * 2
    assert set(last) == {"experts/largest_load", "experts/largest_load/1", "experts/largest_load/2", "experts/idle"}
    assert first["experts/largest_load"] == 3.0, "every token, and two of six experts each"
    assert last["experts/largest_load"] < 2.0
    assert first["experts/idle"] >= 1 / 6 > last["experts/idle"] == 0.0
    before = [router.bias.clone() for _, router in routers(state.model)]
    assert not step(16, limits=StepLimits(loss_low=100.0)).updated
    for bias, (_, router) in zip(before, routers(state.model), strict=True):
        assert torch.equal(bias, router.bias)


def test_bfloat16_routes_in_float32():
    model = make_model(dtype=torch.bfloat16)
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    gates, _ = model.blocks[1].feed_forward.router(torch.randn(4, 16).bfloat16())
    assert gates.dtype == torch.float32
    model.loss(tokens_of(), tokens_of())[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_counts_are_those_of_the_parameters_and_of_what_a_token_uses():
    counts, table = parameter_counts(CONFIG), layout_table(CONFIG)
    assert counts["total"] == sum(one.numel for one in table)
    unused = sum(one.numel for one in table if one.kind == "expert") * (6 - 2) // 6
    assert counts["active"] == counts["total"] - unused
    active_matrices = sum(one.numel for one in table if one.kind in ("matrix", "expert", "router", "head")) - unused
    assert counts["matmul"] == active_matrices
    dense = dataclasses.replace(CONFIG, moe=MoeConfig())
    assert parameter_counts(dense)["active"] == parameter_counts(dense)["total"]
