"""Keys and values of earlier positions, in blocks of 16 tokens.

    sequence A  | block 3 | block 7 | block 2 |     its table: [3, 7, 2]
    sequence B  | block 3 | block 7 | block 9 |     the same first 32 tokens: the same blocks

The memory is taken once. A sequence holds a table of block numbers; token number p stands in block table[p // 16], at
place p % 16. A full block never changes, and it is known by its content: the key of a block is a hash of its tokens and
of the key of the block before it. So a prompt that begins like an earlier one finds those blocks and computes only the
rest. Blocks that nobody holds stay findable until their memory is needed; the one unused for longest goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from zero2all.model.config import ModelConfig

BLOCK = 16
"""Tokens in a block."""
SCRATCH = 0
"""The block that padding rows of a batch write to. No sequence has it."""


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return 2 * config.layers * BLOCK * config.kv_heads * config.head_size * dtype.itemsize


class KeyValueBlocks:
    """The memory: keys and values, each (layers, blocks, BLOCK, Hk, D)."""

    def __init__(self, config: ModelConfig, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.layers, blocks, BLOCK, config.kv_heads, config.head_size)
        self.keys, self.values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self.slots_of_layer = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.keys, self.values, strict=True)]
        """Views of keys and values of each layer, token by token: (blocks * BLOCK, Hk, D)."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put (N, Hk, D) keys and values where `slots` (N,) say: block * BLOCK + place."""
        stored_keys, stored_values = self.slots_of_layer[layer]
        stored_keys.index_copy_(0, slots, keys)
        stored_values.index_copy_(0, slots, values)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tables (..., blocks): (..., blocks * BLOCK, Hk, D)."""
        numbers, shape = tables.flatten(), (*tables.shape[:-1], tables.shape[-1] * BLOCK, *self.keys.shape[3:])
        # index_select copies a block at a time; indexing with a tensor would copy number by number.
        keys, values = self.keys[layer].flatten(1), self.values[layer].flatten(1)
        return keys.index_select(0, numbers).view(shape), values.index_select(0, numbers).view(shape)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because a place that was never written has the weight 0, and 0 times what happens to stand there must be
    0. On the CPU the pages are taken only when they are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def block_keys(ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of the full blocks of `ids`, from the first on; `known` are the first of them, already computed."""
    keys = list(known)
    for first in range(len(keys) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
        before = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(before + array("q", ids[first : first + BLOCK]).tobytes(), digest_size=16).digest())
    return keys


class BlockPool:
    """Which blocks are held, by how many sequences, and what stands in them."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks - 1
        self._holders = [0] * blocks
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))  # the next to be used first

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks with these contents, as far as all of them are known; the caller holds them from now on."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            self._hold(block)
            found.append(block)
        return found

    def take(self, count: int) -> list[int] | None:
        """`count` blocks to write to; None if there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]
            self._holders[block] = 1
        return taken

    def note(self, block: int, key: bytes) -> None:
        """`block` is full, with the content that `key` says. If another block has it already, that one stays known."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """The caller holds these no more. The last ones go first: a beginning is more likely to be asked for again."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._holders[block] += 1
