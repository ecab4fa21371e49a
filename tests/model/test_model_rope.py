"""Rotary tables against those that transformers computes from the exported config."""

import pytest
import torch

from zero2all.model.config import ModelConfig, RopeScaling
from zero2all.model.hf_config import from_hf_config, to_hf_config
from zero2all.model.rope import rope_base, rope_tables

SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 4.0),
    "ntk": RopeScaling("ntk", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 64),
    "llama3, other factors": RopeScaling("llama3", 32.0, 100, low_freq_factor=2.0, high_freq_factor=7.0),
    "yarn": RopeScaling("yarn", 4.0, 64),
    "yarn, other betas": RopeScaling("yarn", 2.5, 500, beta_fast=20.0, beta_slow=2.0),
    "yarn, nothing to stretch": RopeScaling("yarn", 0.5, 64),
    "yarn, tiny original": RopeScaling("yarn", 4.0, 4),
    "yarn, its own temperature": RopeScaling("yarn", 4.0, 64, attention_factor=1.3),
}
NO_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


def config_with(scaling, theta=10000.0, head_dim=64):
    sizes = {"vocab_size": 8, "hidden_size": head_dim, "heads": 1, "kv_heads": 1, "max_seq_len": 512}
    return ModelConfig(**sizes, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 16), (100.0, 2)])
def test_tables_equal_those_of_transformers(scaling, theta, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_with(scaling, theta, head_dim)
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(to_hf_config(config, "float32", NO_IDS)))
    found = rotary(torch.zeros(1), torch.arange(512).unsqueeze(0))
    for ours, theirs in zip(rope_tables(config, 512), found, strict=True):
        # Theirs repeat each angle for both halves of a head.
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1), theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaling_survives_the_way_to_their_config_and_back(scaling, tmp_path):
    config = config_with(scaling, 12345.0)
    back = from_hf_config(to_hf_config(config, "float32", NO_IDS), tmp_path)
    if scaling.kind == "ntk":  # travels as the base that it is
        assert (back.rope_scaling, back.rope_theta) == (RopeScaling(), rope_base(config))
        for ours, theirs in zip(rope_tables(config, 64), rope_tables(back, 64), strict=True):
            assert torch.equal(ours, theirs)
    else:
        assert (back.rope_scaling, back.rope_theta) == (scaling, 12345.0)


@pytest.mark.parametrize("kind", ["ntk", "llama3", "yarn"])
def test_the_fastest_pair_is_left_alone_and_the_slowest_slowed_by_the_factor(kind):
    tables = (rope_tables(config_with(scaling), 2) for scaling in (RopeScaling(kind, 8.0, 2048), RopeScaling()))
    turn, plain = (torch.atan2(sin[1], cos[1]) for cos, sin in tables)
    assert float(turn[0]) == pytest.approx(float(plain[0]), rel=1e-5)
    assert float(turn[-1]) == pytest.approx(float(plain[-1]) / 8.0, rel=1e-4)


def test_ntk_of_heads_with_a_single_pair_changes_nothing():
    config = config_with(RopeScaling("ntk", 4.0), head_dim=2)
    assert rope_base(config) == config.rope_theta
