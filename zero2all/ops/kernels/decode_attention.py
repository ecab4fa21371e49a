"""Attention of one new token per sequence over a cache of blocks, in one kernel.

It reads a row of the qkv projection, normalises (qk_norm) and turns query and key by their position, writes key and
value to the cache, and mixes the values of all positions up to the new one. The positions of a sequence are shared out
evenly to `splits` programs per key head, each with all query heads of that head. How many of them have work depends on
the length, which the kernel reads on the device; the rest end at once. So one recorded launch fits every length.

A program asks for its first keys and values before the kernel ahead of it, the qkv projection, is over
(`wait_for_earlier_kernels`). So positions, tables and earlier keys must not come from that kernel or, of several that
overlap, from any of them: on the GPU, an ordinary kernel must lie between.

The tokens of a prompt are rows of the same sequence. Their keys and values are written by a kernel of its own first;
each row then sees the positions before its own.

The last program of a sequence and head to arrive, by a counter, joins the results of all in their order, so that equal
inputs give equal bits; and sets the counter back to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import overlapped, processors, wait_for_earlier_kernels
from zero2all.ops.rope import QkNorm

LEAST_DOT = 16
"""The smallest side of a tile that the tensor cores take."""
LOG2_E = 1.4426950408889634
MOST_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 4
LONG = 4096
"""Positions of a sequence in a large batch from which on it is split."""


@triton.jit
def _turned(heads, cos, sin, gain, half, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """The head vectors at `heads` (n, 1), turned: dimension d with d + half. (n, BLOCK). With NORM, normalised first,
    with the weights `gain`."""
    d = tl.arange(0, BLOCK)
    inside = d < 2 * half
    is_first = d < half
    angle = tl.where(is_first, d, d - half)
    partner = tl.where(is_first, d + half, d - half)
    c = tl.load(cos + angle, mask=inside, other=1.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    own = tl.load(heads + d[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    other = tl.load(heads + partner[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, axis=1) / (2 * half) + eps)[:, None]
        own = own * scale * tl.load(gain + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        other = other * scale * tl.load(gain + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
    return own * c[None, :] + other * tl.where(is_first, -s, s)[None, :]


@triton.jit
def _load_tokens(
    keys, values, table, first, end, head, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and values of the positions from `first` on that are before `end`: (TOKENS, BLOCK) each."""
    token = first + tl.arange(0, TOKENS)
    d = tl.arange(0, BLOCK)
    block = tl.load(table + token // PLACES, mask=token < end, other=0).to(tl.int64)
    slot = ((block * PLACES + token % PLACES) * KEY_HEADS + head)[:, None] * WIDTH + d[None, :]
    inside = (token < end)[:, None] & (d < WIDTH)[None, :]
    return tl.load(keys + slot, mask=inside, other=0.0), tl.load(values + slot, mask=inside, other=0.0)


@triton.jit
def _write_new(
    of_row, cos, sin, key_gain, keys, values, table, position, limit, eps, head, is_written, NORM: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and value of the new token of a row (1, BLOCK), the key turned; written to the cache if `is_written`."""
    d = tl.arange(0, BLOCK)
    one = tl.arange(0, 1)[:, None]
    place = tl.minimum(position, limit - 1)
    angle = place.to(tl.int64) * (WIDTH // 2)
    row_of_key = of_row + (QUERY_HEADS + head + one) * WIDTH
    key = _turned(row_of_key, cos + angle, sin + angle, key_gain, WIDTH // 2, eps, NORM, BLOCK)
    key = key.to(of_row.dtype.element_ty)  # rounded as the projection is
    value = tl.load(
        of_row + (QUERY_HEADS + KEY_HEADS + head + one) * WIDTH + d[None, :], mask=(d < WIDTH)[None, :], other=0.0
    )
    block = tl.load(table + place // PLACES).to(tl.int64)
    slot = ((block * PLACES + position % PLACES) * KEY_HEADS + head + one) * WIDTH + d[None, :]
    inside = (d < tl.where(is_written & (position < limit), WIDTH, 0))[None, :]
    tl.store(keys + slot, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + slot, value.to(values.dtype.element_ty), mask=inside)
    return key, value


@triton.jit
def _write(
    qkv, cos, sin, key_gain, keys, values, tables, positions, table_stride, limit, eps, NORM: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    of_row = qkv + row * (QUERY_HEADS + 2 * KEY_HEADS) * WIDTH
    _write_new(
        of_row, cos, sin, key_gain, keys, values, tables + row * table_stride, position, limit, eps,
        tl.program_id(1), True, NORM, QUERY_HEADS, KEY_HEADS, WIDTH, PLACES, BLOCK,
    )  # fmt: skip


@triton.jit
def _attend(
    qkv, cos, sin, query_gain, key_gain, keys, values, tables, positions, out, parts, weights, arrived,
    table_stride, limit, eps, scale, NORM: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    earlier = tl.minimum(position, limit)
    share = tl.maximum(tl.cdiv(tl.cdiv(earlier, SPLITS), TOKENS) * TOKENS, LEAST)  # positions of a split
    busy = tl.maximum(tl.cdiv(earlier, share), 1)
    if split >= busy:
        return
    d = tl.arange(0, BLOCK)
    is_d = d < WIDTH
    table = tables + row * table_stride
    begin = split * share
    end = tl.minimum(begin + share, earlier)
    key, value = _load_tokens(keys, values, table, begin, end, head, KEY_HEADS, WIDTH, PLACES, TOKENS, BLOCK)
    wait_for_earlier_kernels(OVERLAP)

    PER_KEY: tl.constexpr = QUERY_HEADS // KEY_HEADS
    kind = qkv.dtype.element_ty
    group = tl.arange(0, GROUP)
    is_query = (group < PER_KEY)[:, None] & is_d[None, :]
    angle = tl.minimum(position, limit - 1).to(tl.int64) * (WIDTH // 2)
    of_row = qkv + row * (QUERY_HEADS + 2 * KEY_HEADS) * WIDTH
    own = tl.minimum(group, PER_KEY - 1)  # rows beyond the last query head compute it again, and are not written
    queries = of_row + (head * PER_KEY + own)[:, None] * WIDTH
    query = _turned(queries, cos + angle, sin + angle, query_gain, WIDTH // 2, eps, NORM, BLOCK)
    query = query.to(kind)  # rounded as the projection is

    # The new token, from the row itself: the last split takes it, and writes it to the cache.
    takes_new = split == busy - 1
    new_key, new_value = _write_new(
        of_row, cos, sin, key_gain, keys, values, table, position, limit, eps, head, takes_new, NORM,
        QUERY_HEADS, KEY_HEADS, WIDTH, PLACES, BLOCK,
    )  # fmt: skip
    new_score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    most = tl.where(takes_new, new_score, float("-inf"))
    total = tl.where(takes_new, 1.0, 0.0) + tl.zeros((GROUP,), dtype=tl.float32)
    mixed = tl.where(takes_new, new_value.to(tl.float32), 0.0) + tl.zeros((GROUP, BLOCK), dtype=tl.float32)

    for first in range(begin, end, TOKENS):
        next_key, next_value = _load_tokens(
            keys, values, table, first + TOKENS, end, head, KEY_HEADS, WIDTH, PLACES, TOKENS, BLOCK
        )
        score = tl.dot(query, tl.trans(key).to(kind), input_precision="ieee") * scale
        score = tl.where((first + tl.arange(0, TOKENS) < end)[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, axis=1))
        shrink = tl.exp2(most - higher)
        probability = tl.exp2(score - higher[:, None])
        mixed = tl.dot(probability.to(kind), value.to(kind), mixed * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(probability, axis=1)
        most = higher
        key, value = next_key, next_value

    mixed = mixed / total[:, None]
    of_group = row * QUERY_HEADS + head * PER_KEY
    if busy == 1:
        tl.store(out + (of_group + group)[:, None] * WIDTH + d[None, :], mixed.to(out.dtype.element_ty), mask=is_query)
        return
    own_part = (of_group + group) * SPLITS + split
    tl.store(parts + own_part[:, None] * WIDTH + d[None, :], mixed, mask=is_query)
    tl.store(weights + own_part, most + tl.log2(total), mask=group < PER_KEY)
    tl.debug_barrier()  # all threads have written before one of them counts
    before = tl.atomic_add(arrived + row * KEY_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if before < busy - 1:
        return
    tl.store(arrived + row * KEY_HEADS + head, 0)
    each = tl.arange(0, SPLITS)
    is_part = each < busy
    for number in tl.static_range(PER_KEY):
        part = (of_group + number) * SPLITS + each
        weight = tl.load(weights + part, mask=is_part, other=float("-inf"))
        weight = tl.exp2(weight - tl.max(weight, axis=0))
        result = tl.load(parts + part[:, None] * WIDTH + d[None, :], mask=is_part[:, None] & is_d[None, :], other=0.0)
        joined = tl.sum(result * weight[:, None], axis=0) / tl.sum(weight, axis=0)
        tl.store(out + (of_group + number) * WIDTH + d, joined.to(out.dtype.element_ty), mask=is_d)


@dataclass(frozen=True)
class AttentionTiles:
    """How the positions of a sequence are shared out."""

    splits: int
    """Programs per sequence and key head; a power of two."""
    least: int
    """Positions below which a split is not worth its own program; a multiple of tokens."""
    tokens: int
    """Positions that a program takes at a time."""
    warps: int = 4


def attention_tiles(batch: int, kv_heads: int, head_size: int, max_len: int, device: torch.device) -> AttentionTiles:
    """Enough programs for all processors; and of a large batch, splits only for long sequences, which the rest would
    have to wait for. Measured on an H200 (benchmarks/decode_kernels.py) with heads of 64."""
    tokens = 64 if head_size <= 64 else 32
    fill = PROGRAMS_PER_PROCESSOR * processors(device) // (batch * kv_heads)
    if fill > 1:
        return AttentionTiles(min(MOST_SPLITS, 1 << (fill.bit_length() - 1)), least=tokens, tokens=tokens)
    splits = min(MOST_SPLITS, triton.next_power_of_2(triton.cdiv(max_len, LONG)))
    return AttentionTiles(splits, least=LONG // 2, tokens=tokens)


class AttentionScratch:
    """Results of splits, until the last one joins them; for one launch at a time."""

    def __init__(
        self, batch: int, heads: int, kv_heads: int, head_size: int, splits: int, device: torch.device
    ) -> None:
        self.parts = torch.empty(batch, heads, splits, head_size, dtype=torch.float32, device=device)
        self.weights = torch.empty(batch, heads, splits, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(batch, kv_heads, dtype=torch.int32, device=device)


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    tiles: AttentionTiles,
    writes_first: bool = False,
    norm: QkNorm | None = None,
) -> None:
    """Rows of the qkv projection (B, (Hq + 2 Hk) D) at `positions` (B,), the cache of a layer (blocks, places, Hk, D)
    and the blocks of each sequence (B, n) -> out (B, Hq D). cos and sin are (length, D / 2) in float32. A position
    beyond the table or the length is not written, and its output means nothing. `writes_first`: some rows belong to the
    same sequence, so all keys and values are written before one is read. `norm`: of query and key heads."""
    batch = len(qkv)
    _, places, kv_heads, width = keys.shape
    heads = out.shape[1] // width
    limit = min(len(cos), tables.shape[1] * places)
    sizes = {"QUERY_HEADS": heads, "KEY_HEADS": kv_heads, "WIDTH": width, "PLACES": places}
    sizes |= {"BLOCK": max(LEAST_DOT, triton.next_power_of_2(width)), "NORM": norm is not None}
    query_gain, key_gain, eps = norm or (qkv, qkv, 0.0)
    overlap = overlapped(qkv.device)
    if writes_first:
        overlap = {"OVERLAP": False}  # the earlier keys are what the kernel ahead writes
        _write[(batch, kv_heads)](
            qkv, cos, sin, key_gain, keys, values, tables, positions, tables.stride(0), limit, eps, **sizes, num_warps=1
        )
    _attend[(batch, kv_heads, tiles.splits)](
        qkv, cos, sin, query_gain, key_gain, keys, values, tables, positions, out, scratch.parts, scratch.weights,
        scratch.arrived, tables.stride(0), limit, eps, LOG2_E * width**-0.5,
        **sizes, SPLITS=tiles.splits, LEAST=tiles.least, TOKENS=tiles.tokens,
        GROUP=max(LEAST_DOT, triton.next_power_of_2(heads // kv_heads)),
        num_warps=tiles.warps, num_stages=1, **overlap,
    )  # fmt: skip
