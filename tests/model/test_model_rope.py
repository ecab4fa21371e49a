"""Rotary tables against those transformers computes from the exported config."""

import pytest
import torch

from zero2all.model.config import ModelConfig, RopeScaling
from zero2all.model.hf import from_hf_config, to_hf_config
from zero2all.model.rope import rope_tables

SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 64),
    "llama3, other factors": RopeScaling("llama3", 32.0, 100, low_freq_factor=2.0, high_freq_factor=7.0),
    "yarn": RopeScaling("yarn", 4.0, 64),
    "yarn, other betas": RopeScaling("yarn", 2.5, 500, beta_fast=20.0, beta_slow=2.0),
    "yarn, nothing to stretch": RopeScaling("yarn", 0.5, 64),
    "yarn, tiny original": RopeScaling("yarn", 4.0, 4),
}
NO_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 16), (100.0, 2)])
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_tables_equal_those_of_transformers(scaling, theta, head_dim, layout):
    from transformers import LlamaConfig, Qwen2Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = ModelConfig(
        vocab_size=8,
        hidden_size=4 * head_dim,
        heads=4,
        kv_heads=4,
        head_dim=head_dim,
        layers=1,
        rope_theta=theta,
        rope_scaling=scaling,
        max_seq_len=512,
        attention_bias="qkv" if layout == "qwen2" else "none",
    )
    values = to_hf_config(config, "float32", NO_IDS)
    hf_config = (Qwen2Config if layout == "qwen2" else LlamaConfig).from_dict(values)
    rotary = (Qwen2RotaryEmbedding if layout == "qwen2" else LlamaRotaryEmbedding)(hf_config)
    cos, sin = rotary(torch.zeros(1), torch.arange(512).unsqueeze(0))
    for ours, theirs in zip(rope_tables(config, 512), (cos, sin), strict=True):
        # Theirs repeat each angle for both halves of a head.
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1), theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaling_survives_the_way_to_their_config_and_back(scaling, tmp_path):
    config = ModelConfig(vocab_size=8, rope_scaling=scaling, rope_theta=12345.0)
    back = from_hf_config(to_hf_config(config, "float32", NO_IDS), tmp_path)
    assert (back.rope_scaling, back.rope_theta) == (scaling, 12345.0)
