"""Frequencies of the rotary positions, with the ways to stretch them beyond the trained length.

A head of width D has D/2 pairs; pair d is rotated by position x f(d), f(d) = theta^(-2d/D). Fast pairs distinguish near
positions, slow pairs far ones. To reach s (`factor`) times farther than the model was trained, slow pairs are slowed
down further. L is `original_seq_len`; lambda(d) = 2 pi / f(d) is the wavelength of a pair, in positions.

base      another theta (model.rope_theta, or a stage's): pair d slows by (theta / theta')^(2d/D), pair 0 not at all
linear    f(d) / s: position interpolation, all pairs alike
ntk       theta' = theta s^(D / (D - 2)): the base change that slows the last pair by exactly s
llama3    k f(d) + (1 - k) f(d) / s;  k = (L / lambda(d) - low) / (high - low), held within 0 and 1
yarn      the same blend with k = 1 - (d - a) / (b - a), held within 0 and 1; a and b are the pairs that turn beta_fast
          and beta_slow times within L, rounded outwards: pair(r) = D ln(L / (2 pi r)) / (2 ln theta).
          cos and sin times t = 0.1 ln(s) + 1 (`attention_factor`): logits times t^2, a sharper softmax over more keys
"""

import math

import torch
from torch import Tensor

from zero2all.model.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, seq_len: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of every (position, pair): two float32 tensors of shape (seq_len, D/2). They are computed on the CPU,
    so every device has the same, whatever torch.device is in force."""
    frequencies, magnitude = rope_frequencies(config)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device="cpu"), frequencies)
    return (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)


def rope_base(config: ModelConfig) -> float:
    """The base of the frequencies: `rope_theta`, or what ntk makes of it."""
    D, scaling = config.head_size, config.rope_scaling
    if scaling.kind != "ntk" or D == 2:  # a single pair rotates by 1 whatever the base
        return config.rope_theta
    return config.rope_theta * scaling.factor ** (D / (D - 2))


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation per position of each pair, and yarn's factor on cos and sin."""
    D, scaling = config.head_size, config.rope_scaling
    exponents = torch.arange(0, D, 2, dtype=torch.int64, device="cpu").float() / D
    spans = rope_base(config) ** exponents  # positions per radian, (D/2,)
    frequencies = 1.0 / spans
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        sharpening = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
        return _yarn(spans, scaling, config.rope_theta), sharpening
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended linearly."""
    original = _original_length(scaling)
    wavelengths = 2 * math.pi / frequencies
    keep = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(spans: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """As llama3, but the blend runs linearly over the pair's index. Rounded as transformers does, bit for bit."""
    original, D = _original_length(scaling), 2 * len(spans)

    def pair_with_rotations(rotations: float) -> float:
        return D * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(scaling.beta_slow)), D - 1)
    ramp = (torch.arange(D // 2, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * spans) * (1 - keep) + 1.0 / spans * keep


def _original_length(scaling: RopeScaling) -> int:
    assert scaling.original_seq_len is not None, "ModelConfig.problems demands it for this kind of scaling"
    return scaling.original_seq_len
