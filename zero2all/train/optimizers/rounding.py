"""Stochastic rounding whose random bits are a function of (seed, update, parameter, place) only.

A value between two representable ones goes up with the probability of its distance from the lower one, so that the mean
of many roundings is the value itself, and small updates add up where rounding to the nearest would lose each of them.
The random bits are a hash, computed where the values are: no state to save, no host in between, and the same bits on
every device and for every sharding of a parameter.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def rounding_key(seed: int, parameter_index: int, count: Tensor) -> Tensor:
    """A 32-bit key for one parameter in one update; `count` stays on its device."""
    digest = hashlib.blake2b(f"{seed}/{parameter_index}".encode(), digest_size=4).digest()
    return _mix(count.to(torch.int32) ^ int.from_bytes(digest, "little", signed=True))


def random_bits(index: Tensor, key: Tensor, stream: int) -> Tensor:
    """32 random bits (int32) for each place in `index`; another `stream` gives independent ones."""
    return _mix(index ^ _mix(key + stream))


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every bit depends on every other (multiply, shift, xor)."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    return bits ^ ((bits >> 16) & 0xFFFF)


def fraction(bits: Tensor) -> Tensor:
    """Random bits as numbers from 0 up to but not including 1."""
    return (bits & 0xFFFFFF).float() / 2**24


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 values rounded up or down to bfloat16 by the lower half of the random bits.

    bfloat16 is the upper half of a float32, so adding 16 random bits to the lower half carries into the upper half with
    exactly the wanted probability.
    """
    rounded = (values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16)
