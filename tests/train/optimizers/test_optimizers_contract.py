"""What every optimizer promises: cancelled steps leave no trace, saved ones continue exactly, groups are right."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.optimizers.parameters import TABLE, drawn, logical, whole_masters
from tests.train.states import assert_same_bits
from zero2all.common.errors import UsageError
from zero2all.config.training import OptimConfig
from zero2all.model.config import ModelConfig
from zero2all.parallel.parameter_table import layout_table
from zero2all.train.optimizers.factory import build_optimizer

MODEL = ModelConfig(vocab_size=48, hidden_size=24, intermediate_size=40, layers=1, heads=4, kv_heads=2, max_seq_len=16)
CONFIGS = {  # with the bytes of state of a parameter in a matrix of 64 by 512
    "adamw": (OptimConfig(lr_max=6e-3), "fused", 8),
    "adamw, reference": (OptimConfig(lr_max=6e-3), "eager", 8),
    "muon": (OptimConfig("muon", lr_max=2e-2), "auto", 4 + 4 / 64),
    "adamw_8bit": (OptimConfig("adamw_8bit", lr_max=6e-3), "auto", 2 + 8 / 256),
    "adamw_bf16": (OptimConfig("adamw_bf16", lr_max=6e-3), "auto", 4),
    "adamw_bf16, kahan": (OptimConfig("adamw_bf16", lr_max=6e-3, bf16_rounding="kahan"), "auto", 6),
}
every_optimizer = pytest.mark.parametrize("name", CONFIGS)


class Trained:
    def __init__(self, name, seed=0, **changes):
        config, implementation, _ = CONFIGS[name]
        self.dtype = torch.bfloat16 if "bf16" in name else torch.float32
        self.weights, self.gradients = drawn(99, self.dtype), {}
        masters = whole_masters(self.weights, self.gradients)
        self.optimizer = build_optimizer(masters, dataclasses.replace(config, **changes), TABLE, implementation, seed)

    def step(self, seed, *options, **named_options):
        self.gradients |= drawn(seed, self.dtype)
        self.optimizer.step(*options, **named_options)

    def tensors(self):
        return {**self.weights, **{key: part.values for key, part in self.optimizer.state_tensors().items()}}

    def bits(self):
        tensors = self.tensors().items()
        return {key: tensor.clone().view(torch.uint8 if tensor.dim() else tensor.dtype) for key, tensor in tensors}


@every_optimizer
def test_a_cancelled_step_changes_no_bit_and_leaves_no_trace(name):
    runs = []
    for cancels in (False, True):
        trained = Trained(name)
        for step in range(4):
            if cancels and step in (0, 2):
                before = trained.bits()
                for value in (torch.nan, torch.inf, 1.0):
                    for key, weight in trained.weights.items():
                        trained.gradients[key] = torch.full_like(weight, value)
                    trained.optimizer.step(torch.tensor(torch.nan), found_nonfinite=torch.tensor(True))
                assert_same_bits(trained.bits(), before)
            trained.step(step, torch.tensor(0.5), found_nonfinite=torch.tensor(0.0))
        runs.append(trained.bits())
        assert int(trained.tensors()["step/all"]) == 4
    assert_same_bits(*runs)


@every_optimizer
def test_a_saved_and_loaded_state_continues_bit_for_bit(name, tmp_path):
    trained, resumed = Trained(name, seed=5), Trained(name, seed=5)
    for step in range(3):
        trained.step(step)
    save_file({key: tensor.clone() for key, tensor in trained.tensors().items()}, tmp_path / "saved")
    saved = load_file(tmp_path / "saved")
    for key, tensor in resumed.tensors().items():
        tensor.copy_(saved.pop(key))
    assert not saved
    for step in range(3, 5):
        trained.step(step)
        resumed.step(step)
    assert_same_bits(trained.bits(), resumed.bits())


@every_optimizer
def test_large_parameters_are_updated_in_pieces_with_the_same_result(name, monkeypatch):
    runs = []
    for chunk_values in (1 << 25, 100):
        monkeypatch.setattr("zero2all.train.optimizers.base.CHUNK_VALUES", chunk_values)
        trained = Trained(name)
        for step in range(2):
            trained.step(step, torch.tensor(0.5))
        runs.append(trained.bits())
    assert_same_bits(*runs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_who_decays(tied, decay_embeddings):
    model = dataclasses.replace(MODEL, attention_bias="all", mlp_bias=True, tied_embeddings=tied)
    table = {one.name: one for one in layout_table(model)}
    masters = whole_masters({name: torch.zeros(one.shape) for name, one in table.items()}, {})
    optimizer = build_optimizer(masters, OptimConfig(weight_decay=0.3, decay_embeddings=decay_embeddings), table)
    decay = {param.parameter.name: group.weight_decay for group in optimizer.param_groups for param in group.params}
    assert decay.keys() == table.keys()
    for key, value in decay.items():
        is_table = key in ("embedding.weight", "head.weight")
        still = "norm" in key or key.endswith("bias") or (is_table and not decay_embeddings)
        assert value == (0.0 if still else 0.3), key


@every_optimizer
def test_a_parameter_costs_its_bytes_of_state_and_without_a_gradient_it_is_left_alone(name):
    config, implementation, state_bytes = CONFIGS[name]
    weight = torch.ones(64, 512, dtype=torch.bfloat16 if "bf16" in name else torch.float32)
    table = {"w": logical("w", (64, 512))}
    optimizer = build_optimizer(whole_masters({"w": weight}, {}), config, table, implementation)
    state = [part.values for key, part in optimizer.state_tensors().items() if key != "step/all"]
    assert sum(tensor.untyped_storage().nbytes() for tensor in state) / (64 * 512) == pytest.approx(state_bytes)
    before = [tensor.clone() for tensor in state]
    optimizer.step()
    assert (weight == 1).all()
    assert all(torch.equal(tensor, old) for tensor, old in zip(state, before, strict=True))


def test_multipliers_share_out_the_rate():
    (problem,) = OptimConfig(lr_multipliers={"matrices": 1.0, "norm": 2.0}).problems("optim")
    assert (problem.field, problem.value) == ("optim.lr_multipliers", "matrices")
    trained = Trained("muon", lr_multipliers={"embedding": 0.0, "head": 2.0})
    trained.optimizer.set_learning_rate(0.01)
    rates = {group.kind: group.lr for group in trained.optimizer.param_groups}
    assert rates == {"matrix": 0.01, "embedding": 0.0, "head": 0.02, "norm": 0.01, "bias": 0.01}
    before = {key: trained.weights[key].clone() for key in ("table", "head")}
    trained.step(0)
    assert torch.equal(trained.weights["table"], before["table"])
    assert not torch.equal(trained.weights["head"], before["head"])


def one_matrix(weight, config, implementation="auto", seed=0):
    """An optimizer of one matrix whose gradient is 1 everywhere."""
    masters = whole_masters({"w": weight}, {"w": torch.ones_like(weight)})
    return build_optimizer(masters, config, {"w": logical("w", weight.shape)}, implementation, seed)


def test_bfloat16_weights_need_the_optimizer_that_rounds_for_them():
    with pytest.raises(UsageError, match=r"w is torch.bfloat16.* adamw_bf16"):
        one_matrix(torch.zeros(2, 2, dtype=torch.bfloat16), OptimConfig())
    with pytest.raises(UsageError, match=r"no fused kernel"):
        one_matrix(torch.zeros(2, 2), OptimConfig("adamw_8bit"), "fused")
    with pytest.raises(UsageError, match=r"muon is not compiled"):
        one_matrix(torch.zeros(2, 2), OptimConfig("muon"), "compiled")


def test_another_seed_rounds_otherwise():
    weights = []
    for seed in (1, 1, 2):
        weights.append(torch.ones(32, 32, dtype=torch.bfloat16))
        one_matrix(weights[-1], OptimConfig("adamw_bf16", lr_max=1e-3), seed=seed).step()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
