"""Rotary tables against the formulas, and against those transformers computes from the exported config."""

import math

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
    config = ModelConfig(vocab_size=8, rope_scaling=scaling, rope_theta=12345.0, max_seq_len=64)
    back = from_hf_config(to_hf_config(config, "float32", NO_IDS), tmp_path)
    if scaling.kind == "ntk":  # travels as the base that it is
        assert (back.rope_scaling, back.rope_theta) == (RopeScaling(), rope_base(config))
        for ours, theirs in zip(rope_tables(config, 64), rope_tables(back, 64), strict=True):
            assert torch.equal(ours, theirs)
    else:
        assert (back.rope_scaling, back.rope_theta) == (scaling, 12345.0)


def config_with(scaling, theta=10000.0, head_dim=64):
    return ModelConfig(vocab_size=8, hidden_size=head_dim, heads=1, kv_heads=1, rope_theta=theta, rope_scaling=scaling)


def frequency(d, width, theta, scaling):
    """Turn per position of pair d, one scalar at a time."""
    D = width
    plain = theta ** (-2 * d / D)
    s, original = scaling.factor, scaling.original_seq_len
    if scaling.kind == "linear":
        return plain / s
    if scaling.kind == "ntk":
        return (theta * s ** (D / (D - 2))) ** (-2 * d / D)
    if scaling.kind == "llama3":
        rotations = original * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if rotations <= low:
            return plain / s
        if rotations >= high:
            return plain
        share = (rotations - low) / (high - low)
        return share * plain + (1 - share) * plain / s
    if scaling.kind == "yarn":

        def pair_that_turns(times):
            return D * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

        first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(scaling.beta_slow)), D - 1)
        if d <= first:
            return plain
        if d >= last:
            return plain / s
        share = (d - first) / (last - first)
        return (1 - share) * plain + share * plain / s
    return plain


@pytest.mark.parametrize("name", [name for name in SCALINGS if "tiny" not in name])
def test_tables_follow_the_formulas(name):
    scaling, D, theta = SCALINGS[name], 64, 10000.0
    strength = 1.0
    if scaling.kind == "yarn":
        strength = scaling.attention_factor or 1 + 0.1 * math.log(max(1.0, scaling.factor))
    cos, sin = rope_tables(config_with(scaling), 40)
    for d in range(D // 2):
        for position in (0, 1, 7, 39):
            angle = position * frequency(d, D, theta, scaling)
            assert float(cos[position, d]) == pytest.approx(strength * math.cos(angle), abs=2e-5)
            assert float(sin[position, d]) == pytest.approx(strength * math.sin(angle), abs=2e-5)


@pytest.mark.parametrize("kind", ["ntk", "llama3", "yarn"])
def test_the_fastest_pair_is_left_alone_and_the_slowest_slowed_by_the_factor(kind):
    scaling = RopeScaling(kind, 8.0, 2048)
    cos, sin = rope_tables(config_with(scaling), 2)
    plain_cos, plain_sin = rope_tables(config_with(RopeScaling()), 2)
    turn, plain = torch.atan2(sin[1], cos[1]), torch.atan2(plain_sin[1], plain_cos[1])
    assert float(turn[0]) == pytest.approx(float(plain[0]), rel=1e-5)
    assert float(turn[-1]) == pytest.approx(float(plain[-1]) / 8.0, rel=1e-4)


def test_position_interpolation_puts_stretched_positions_where_the_old_ones_were():
    stretched, _ = rope_tables(config_with(RopeScaling("linear", 4.0)), 41)
    plain, _ = rope_tables(config_with(RopeScaling()), 11)
    torch.testing.assert_close(stretched[::4], plain, rtol=0, atol=1e-5)


def test_a_larger_base_slows_every_pair_but_the_first():
    base, larger = (rope_tables(config_with(RopeScaling(), theta), 2)[1][1] for theta in (1e4, 1e6))
    assert base[0] == larger[0]
    assert bool((larger[1:] < base[1:]).all())


def test_ntk_of_heads_with_a_single_pair_changes_nothing():
    config = config_with(RopeScaling("ntk", 4.0), head_dim=2)
    assert rope_base(config) == config.rope_theta
