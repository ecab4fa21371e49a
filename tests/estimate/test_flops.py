"""The three FLOPs conventions and MFU against the reference figures; FLOPs against torch's own counter."""

import dataclasses
from pathlib import Path

import pytest
import torch

from zero2all.config import load_config, preset_files
from zero2all.estimate.flops import CONVENTIONS, compute_mfu, flops_by_group, flops_per_token, peak_flops
from zero2all.model.config import ModelConfig


@pytest.fixture(scope="module")
def reference() -> ModelConfig:
    return load_config(str(Path(__file__).parents[2] / "benchmarks/z2all-1b-adamw.yaml")).model


def test_conventions_give_the_reference_figures_of_the_1b_model(reference):
    found = flops_per_token(reference, 2048)
    rounded = {name: round(flops / 1e9, 3) for name, flops in found.items()}
    assert (rounded, tuple(found)) == ({"seed": 8.640, "palm": 7.849, "causal": 7.296}, CONVENTIONS)
    # reference/kernels.md, section 3: 73,185 tokens/s on one H100.
    mfu = compute_mfu(found, 73_185, "NVIDIA H100 80GB HBM3")
    assert {name: round(100 * share, 1) for name, share in mfu.items()} == {"seed": 63.9, "palm": 58.1, "causal": 54.0}


def test_conventions_counted_by_hand_for_a_tiny_model():
    shape = {"vocab_size": 64, "hidden_size": 4, "intermediate_size": 6, "layers": 1, "heads": 2, "kv_heads": 1}
    # q and out 4x4, k and v 4x2, gate, up and down 4x6; three norms of 4 and the embedding are in no matmul.
    matrices = 2 * 16 + 2 * 8 + 3 * 24 + 256
    attention = 12 * 1 * 4 * 8
    by_hand = {"palm": 6 * matrices + attention, "causal": 6 * matrices + attention / 2}
    assert flops_per_token(ModelConfig(**shape), 8) == by_hand | {"seed": 6 * (matrices + 12 + 256) + attention}
    tied = ModelConfig(**shape, tied_embeddings=True)  # takes part in the matmul of the head
    assert flops_per_token(tied, 8) == by_hand | {"seed": 6 * (matrices + 12) + attention}


def test_unknown_device_has_no_peak_and_no_mfu(reference):
    slices = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    for device in ("cpu", "", *slices, "NVIDIA B300", "H100"):
        assert peak_flops(device) is None
        assert compute_mfu(flops_per_token(reference, 2048), 1000.0, device) == {}


def one_expert_for_all(x, gates, gate_up, down, ends, swiglu):
    """On the meta device nobody knows which experts the tokens choose; their FLOPs are the same in any of them."""
    from zero2all.ops.experts import looped_experts

    return looped_experts(x, gates, gate_up[:1], down[:1], torch.tensor([len(x)]), swiglu)


@pytest.mark.parametrize("name", sorted(preset_files()))
def test_torchs_counter_finds_the_palm_convention_to_the_last_flop_with_plain_operators(name, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, whose interpreter has to be chosen first

    from zero2all.model import moe
    from zero2all.model.z2all import Z2all
    from zero2all.ops.config import OpsConfig
    from zero2all.ops.registry import resolve

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # it does not know the meta device
    monkeypatch.setattr(moe, "run_experts", one_expert_for_all)
    config = load_config(name)
    # All layers after the first few are alike.
    rows, layers = config.model.vocab_size or config.tokenizer.vocab_size, min(3, config.model.layers)
    shape = dataclasses.replace(config.model, vocab_size=rows, layers=layers)
    plain = OpsConfig("math", rope="eager", rms_norm="torch", swiglu="torch", linear="plain", cross_entropy="torch")
    plain = dataclasses.replace(plain, linear_cross_entropy="off")
    with torch.device("meta"):
        model = Z2all(shape, resolve(plain, "cpu")).to("meta")
        rows = torch.zeros(1, config.data.seq_len + 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.loss(rows[:, :-1], rows[:, 1:])[0].backward()
    assert counter.get_total_flops() == flops_per_token(shape, config.data.seq_len)["palm"] * config.data.seq_len


def test_groups_have_the_matmuls_of_the_causal_convention_and_little_else(reference):
    groups = flops_by_group(reference, 32_768, 2048)
    multiplied = groups.pop("matrix products").flops + groups.pop("attention").flops
    assert multiplied == 32_768 * flops_per_token(reference, 2048)["causal"]
    assert sum(group.flops for group in groups.values()) < 0.001 * multiplied
    # reference/kernels.md, section 2: floors at 4.3 TB/s of 15.1, 11.0, 3.4 and 2.0 ms.
    small = ("SwiGLU", "normalisation", "RoPE", "cross entropy")
    floors = {name: round(groups[name].bytes / 4.3e9, 1) for name in small}
    assert floors == {"SwiGLU": 15.1, "normalisation": 11.2, "RoPE": 3.8, "cross entropy": 2.0}
