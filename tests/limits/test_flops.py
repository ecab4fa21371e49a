"""The three FLOPs conventions and MFU against the reference figures."""

import subprocess
import sys

import pytest

from zero2all.config import load_config
from zero2all.limits.flops import CONVENTIONS, flops_per_token, flops_utilisation, peak_flops
from zero2all.model.config import ModelConfig


@pytest.fixture(scope="module")
def reference() -> ModelConfig:
    return load_config("z2all-1b").model


def test_conventions_give_the_reference_figures_of_the_1b_model(reference):
    giga = {name: round(flops / 1e9, 3) for name, flops in flops_per_token(reference, 2048).items()}
    assert giga == {"seed": 8.640, "palm": 7.849, "causal": 7.296}
    assert tuple(giga) == CONVENTIONS


def test_mfu_of_the_reference_speed_under_each_convention(reference):
    # reference/kernels.md, section 3: 73,185 tokens/s on one H100.
    mfu = flops_utilisation(flops_per_token(reference, 2048), 73_185, "NVIDIA H100 80GB HBM3")
    assert {name: round(100 * share, 1) for name, share in mfu.items()} == {"seed": 63.9, "palm": 58.1, "causal": 54.0}


def test_conventions_counted_by_hand_for_a_tiny_model():
    config = ModelConfig(vocab_size=64, hidden_size=4, intermediate_size=6, layers=1, heads=2, kv_heads=1)
    # q and out 4x4, k and v 4x2, gate, up and down 4x6; three norms of 4 and the embedding are in no matmul.
    matrices = 2 * 16 + 2 * 8 + 3 * 24 + 256
    attention = 12 * 1 * 4 * 8
    assert flops_per_token(config, 8) == {
        "seed": 6 * (matrices + 12 + 256) + attention,
        "palm": 6 * matrices + attention,
        "causal": 6 * matrices + attention / 2,
    }


def test_tied_embedding_takes_part_in_the_matmul_of_the_head():
    shape = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "layers": 1, "heads": 2, "kv_heads": 1}
    tied = flops_per_token(ModelConfig(**shape, tied_embeddings=True), 8)
    untied = flops_per_token(ModelConfig(**shape), 8)
    assert tied["palm"] == untied["palm"]
    assert tied["seed"] == tied["palm"] + 6 * 12


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA B300",
        "H100",
    ],
)
def test_unknown_device_has_no_peak_and_no_mfu(reference, device):
    assert peak_flops(device) is None
    assert flops_utilisation(flops_per_token(reference, 2048), 1000.0, device) == {}


def test_planning_needs_no_torch():
    code = "import sys, zero2all.limits.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
