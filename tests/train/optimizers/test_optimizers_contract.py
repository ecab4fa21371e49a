"""What every optimizer promises: cancelled steps leave no trace, saved ones continue exactly, groups are right."""

from __future__ import annotations

import pytest
import torch
from zero2all.train.optimizers.roles import Role, model_roles

from zero2all.common.errors import UsageError
from zero2all.config.training import OptimConfig
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.layout import init_weights
from zero2all.train.optimizers.factory import build_optimizer

SHAPE = {"vocab_size": 48, "hidden_size": 24, "intermediate_size": 40, "layers": 2, "heads": 4, "kv_heads": 2}
CONFIGS = {
    "adamw": (OptimConfig(lr_max=6e-3), "fused"),
    "adamw, reference": (OptimConfig(lr_max=6e-3), "eager"),
    "muon": (OptimConfig("muon", lr_max=6e-3), "auto"),
    "lion": (OptimConfig("lion", lr_max=6e-3), "auto"),
    "adafactor": (OptimConfig("adafactor", lr_max=6e-3), "auto"),
    "adafactor, momentum": (OptimConfig("adafactor", lr_max=6e-3, adafactor_beta1=0.9), "auto"),
    "sgd": (OptimConfig("sgd", lr_max=0.1, momentum=0.9), "auto"),
    "adamw_8bit": (OptimConfig("adamw_8bit", lr_max=6e-3), "auto"),
    "adamw_bf16": (OptimConfig("adamw_bf16", lr_max=6e-3), "auto"),
    "adamw_bf16, kahan": (OptimConfig("adamw_bf16", lr_max=6e-3, bf16_rounding="kahan"), "auto"),
}
STATE_BYTES = {  # of a matrix of 64 by 512
    "adamw": 8,
    "adamw, reference": 8,
    "muon": 4,
    "lion": 4,
    "adafactor": 4 / 64 + 4 / 512,
    "adafactor, momentum": 4 + 4 / 64 + 4 / 512,
    "sgd": 4,
    "adamw_8bit": 2 + 8 / 256,
    "adamw_bf16": 4,
    "adamw_bf16, kahan": 6,
}
every_optimizer = pytest.mark.parametrize("name", CONFIGS)


def small_model(name, **options):
    config = ModelConfig(**{**SHAPE, "max_seq_len": 16, **options})
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 1)
    return model.bfloat16() if "bf16" in name else model


def optimizer_of(model, name, **options):
    config, implementation = CONFIGS[name]
    named = list(model.named_parameters())
    roles = model_roles(model.config, [key for key, _ in named])
    return build_optimizer(named, config, roles, implementation, **options)


def backward(model, seed):
    tokens = torch.randint(0, 6, (4, 9), generator=torch.Generator().manual_seed(seed))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])[0].float() / tokens[:, 1:].numel()
    loss.backward()
    return float(loss.detach())


def bits_of(model, optimizer):
    tensors = {**dict(model.named_parameters()), **optimizer.state_tensors()}
    return {
        key: tensor.detach().clone().view(torch.uint8 if tensor.dim() else tensor.dtype)
        for key, tensor in tensors.items()
    }


def assert_same_bits(one, two):
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key


@every_optimizer
def test_the_loss_of_a_small_model_goes_down(name):
    model = small_model(name)
    optimizer = optimizer_of(model, name)
    losses = []
    for step in range(24):
        losses.append(backward(model, step % 4))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 3.5
    assert sum(losses[-4:]) / 4 < 2.0


@every_optimizer
def test_a_cancelled_step_changes_no_bit_and_leaves_no_trace(name):
    runs = []
    for cancels in (False, True):
        model = small_model(name)
        optimizer = optimizer_of(model, name)
        for step in range(4):
            backward(model, step)
            if cancels and step in (0, 2):
                wanted = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
                before = bits_of(model, optimizer)
                for value in (torch.nan, torch.inf, 1.0):
                    for parameter in model.parameters():
                        parameter.grad.fill_(value)
                    optimizer.step(torch.tensor(torch.nan), found_nonfinite=torch.tensor(True))
                assert_same_bits(bits_of(model, optimizer), before)
                for key, parameter in model.named_parameters():
                    parameter.grad = wanted[key]
            optimizer.step(torch.tensor(0.5), found_nonfinite=torch.tensor(0.0))
            optimizer.zero_grad()
        runs.append(bits_of(model, optimizer))
        assert int(optimizer.state_tensors()["step/all"]) == 4
    assert_same_bits(*runs)


@every_optimizer
def test_a_step_that_could_be_cancelled_equals_one_that_could_not(name):
    runs = []
    for found in (None, torch.tensor(0.0), torch.tensor(False)):
        model = small_model(name)
        optimizer = optimizer_of(model, name)
        for step in range(3):
            backward(model, step)
            optimizer.step(found_nonfinite=found)
            optimizer.zero_grad()
        runs.append(bits_of(model, optimizer))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


@every_optimizer
def test_a_saved_and_loaded_state_continues_bit_for_bit(name, tmp_path):
    from safetensors.torch import load_file, save_file

    def train(model, optimizer, steps):
        for step in steps:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

    model = small_model(name)
    optimizer = optimizer_of(model, name, seed=5)
    train(model, optimizer, range(3))
    save_file({key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}, tmp_path / "state")
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, tmp_path / "model")
    train(model, optimizer, range(3, 5))

    other = small_model(name)
    other.load_state_dict(load_file(tmp_path / "model"))
    resumed = optimizer_of(other, name, seed=5)
    saved = load_file(tmp_path / "state")
    for key, tensor in resumed.state_tensors().items():
        tensor.copy_(saved.pop(key))
    assert not saved
    train(other, resumed, range(3, 5))
    assert_same_bits(bits_of(model, optimizer), bits_of(other, resumed))


@every_optimizer
def test_large_parameters_are_updated_in_pieces_with_the_same_result(name, monkeypatch):
    runs = []
    for chunk_values in (1 << 25, 100):
        monkeypatch.setattr("zero2all.train.optimizers.base.CHUNK_VALUES", chunk_values)
        model = small_model(name)
        optimizer = optimizer_of(model, name)
        for step in range(2):
            backward(model, step)
            optimizer.step(torch.tensor(0.5))
            optimizer.zero_grad()
        runs.append(bits_of(model, optimizer))
    assert_same_bits(*runs)


@every_optimizer
def test_state_is_complete_and_live_from_the_start(name):
    model = small_model(name)
    optimizer = optimizer_of(model, name)
    tensors = optimizer.state_tensors()
    addresses = {key: tensor.data_ptr() for key, tensor in tensors.items()}
    backward(model, 0)
    optimizer.step()
    assert {key: tensor.data_ptr() for key, tensor in optimizer.state_tensors().items()} == addresses
    assert float(tensors["step/all"]) == 1.0
    assert {key.split("/", 1)[1] for key in tensors} == {"all"} | {key for key, _ in model.named_parameters()}


@every_optimizer
def test_bytes_of_state_per_parameter(name):
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    config, implementation = CONFIGS[name]
    optimizer = build_optimizer(
        [("w", torch.zeros(64, 512, dtype=dtype))], config, {"w": Role("matrix")}, implementation
    )
    state = [tensor for key, tensor in optimizer.state_tensors().items() if key != "step/all"]
    assert sum(tensor.untyped_storage().nbytes() for tensor in state) / (64 * 512) == pytest.approx(STATE_BYTES[name])


@every_optimizer
def test_parameters_without_a_gradient_are_left_alone(name):
    model = small_model(name)
    optimizer = optimizer_of(model, name)
    frozen = model.blocks[0].attention.qkv.weight
    before = frozen.detach().clone()
    backward(model, 0)
    frozen.grad = None
    optimizer.step()
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_who_decays(tied, decay_embeddings):
    model = small_model("", attention_bias="all", mlp_bias=True, tied_embeddings=tied)
    named = list(model.named_parameters())
    config = OptimConfig(weight_decay=0.3, decay_embeddings=decay_embeddings)
    optimizer = build_optimizer(named, config, model_roles(model.config, [key for key, _ in named]))
    decay = {param.name: group.weight_decay for group in optimizer.param_groups for param in group.params}
    assert decay.keys() == {key for key, _ in named}
    for key, value in decay.items():
        table = key in ("embedding.weight", "head.weight")
        still = "norm" in key or key.endswith("bias") or (table and not decay_embeddings)
        assert value == (0.0 if still else 0.3), key


def test_roles_of_a_model():
    model = small_model("", attention_bias="qkv")
    roles = model_roles(model.config, [key for key, _ in model.named_parameters()])
    assert roles["blocks.1.attention.qkv.weight"] == Role("matrix", (24, 12, 12))
    assert roles["blocks.0.feed_forward.gate_up_pairs.weight"] == Role("matrix", alternating=2)
    assert roles["blocks.0.attention.out.weight"] == roles["blocks.0.feed_forward.down.weight"] == Role("matrix")
    assert roles["blocks.0.attention.qkv.bias"] == Role("bias")
    assert roles["blocks.0.attention_norm.weight"] == roles["norm.weight"] == Role("norm")
    assert (roles["embedding.weight"], roles["head.weight"]) == (Role("embedding"), Role("head"))
    for key, role in roles.items():
        assert not role.splits or sum(role.splits) == len(model.get_parameter(key))
        assert len(model.get_parameter(key)) % role.alternating == 0


@every_optimizer
def test_multipliers_share_out_the_rate(name):
    config, implementation = CONFIGS[name]
    import dataclasses

    model = small_model(name)
    named = list(model.named_parameters())
    config = dataclasses.replace(config, lr_multipliers={"embedding": 0.0, "head": 2.0})
    optimizer = build_optimizer(named, config, model_roles(model.config, [key for key, _ in named]), implementation)
    optimizer.set_learning_rate(0.01)
    assert {group.kind: group.lr for group in optimizer.param_groups} == {
        "matrix": 0.01,
        "embedding": 0.0,
        "head": 0.02,
        "norm": 0.01,
    }
    before = model.embedding.weight.detach().clone(), model.head.weight.detach().clone()
    backward(model, 0)
    optimizer.step()
    assert torch.equal(model.embedding.weight, before[0])
    assert not torch.equal(model.head.weight, before[1])


def test_multipliers_of_unknown_kinds_are_named():
    (problem,) = OptimConfig(lr_multipliers={"matrices": 1.0, "norm": 2.0}).problems("optim")
    assert problem.field == "optim.lr_multipliers.matrices"


def test_bfloat16_weights_need_the_optimizer_that_rounds_for_them():
    with pytest.raises(UsageError, match=r"adamw_bf16"):
        build_optimizer([("w", torch.zeros(2, 2, dtype=torch.bfloat16))], OptimConfig(), {"w": Role("matrix")})
    with pytest.raises(UsageError, match=r"no fused kernel"):
        build_optimizer([("w", torch.zeros(2, 2))], OptimConfig("lion"), {"w": Role("matrix")}, "fused")


def test_another_seed_rounds_otherwise():
    weights = []
    for seed in (1, 1, 2):
        parameter = torch.ones(32, 32, dtype=torch.bfloat16)
        optimizer = build_optimizer(
            [("w", parameter)], OptimConfig("adamw_bf16", lr_max=1e-3), {"w": Role("matrix")}, seed=seed
        )
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        weights.append(parameter)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_updates_too_small_for_bfloat16_add_up():
    parameter = torch.ones(64, 64, dtype=torch.bfloat16)
    optimizer = build_optimizer(
        [("w", parameter)], OptimConfig("adamw_bf16", lr_max=1e-4, weight_decay=0.0), {"w": Role("matrix")}
    )
    for _ in range(100):  # each a fortieth of the distance to the next bfloat16
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.float().mean()) == pytest.approx(0.99, abs=3e-4)
