"""Attention of one new token per sequence over a cache of blocks."""

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from tests.ops.agreement import TOLERANCE, assert_close, dtypes, random
from zero2all.ops.kernels.decode_attention import AttentionScratch, AttentionTiles, attention_tiles, decode_attention
from zero2all.ops.rope import QkNorm

PLACES = 4
LENGTH = 64
SPLITS = {"whole": AttentionTiles(1, 16, 16, warps=1), "splits": AttentionTiles(4, 16, 16, warps=1)}
splits = pytest.mark.parametrize("tiles", SPLITS.values(), ids=list(SPLITS))


class Case:
    """Sequences of these lengths, their earlier keys and values in blocks that lie in no order."""

    def __init__(self, positions: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str):
        self.heads, self.kv_heads, self.width, self.dtype, self.device = heads, kv_heads, width, dtype, device
        batch, blocks = len(positions), LENGTH // PLACES
        self.positions = torch.tensor(positions)
        shuffled = 1 + torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(5))
        self.tables = shuffled.view(batch, blocks).int()
        self.keys = random(1 + batch * blocks, PLACES, kv_heads, width)
        self.values = random(1 + batch * blocks, PLACES, kv_heads, width, seed=1)
        self.qkv = random(batch, (heads + 2 * kv_heads) * width, seed=2)
        angles = torch.arange(LENGTH)[:, None] / 10.0 ** torch.linspace(0, 2, width // 2)[None, :]
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norm: QkNorm | None = None

    def run(self, tiles: AttentionTiles) -> tuple[Tensor, Tensor, Tensor, AttentionScratch]:
        """The kernel: its output, and the cache after it."""
        qkv, keys, values = (each.to(self.device, self.dtype).clone() for each in (self.qkv, self.keys, self.values))
        others = (self.cos, self.sin, self.tables, self.positions)
        cos, sin, tables, positions = (each.to(self.device) for each in others)
        out = qkv.new_empty(len(qkv), self.heads * self.width)
        shape = (len(qkv), self.heads, self.kv_heads, self.width, tiles.splits)
        scratch = AttentionScratch(*shape, torch.device(self.device))
        norm = self.norm and QkNorm(*(each.to(self.device, self.dtype) for each in self.norm[:2]), self.norm.eps)
        decode_attention(qkv, cos, sin, keys, values, tables, positions, out, scratch, tiles, norm=norm)
        return out, keys, values, scratch

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in float64, sequence by sequence."""
        heads, kv_heads, width = self.heads, self.kv_heads, self.width
        keys, values, rows = self.keys.clone(), self.values.clone(), []
        for number, position in enumerate(self.positions.tolist()):
            qkv, cos, sin = self.qkv[number].view(1, 1, -1, width), self.cos[position, None], self.sin[position, None]
            if self.norm is None:
                parts = formulas.rope(qkv, cos, sin, heads, kv_heads)
            else:
                parts = formulas.normed_rope(qkv, *self.norm[:2], cos, sin, heads, kv_heads)
            query, key, value = (part[0, :, 0] for part in parts)
            block, place = int(self.tables[number, position // PLACES]), position % PLACES
            keys[block, place], values[block, place] = key, value
            table = self.tables[number].long()
            seen = [cache[table].flatten(0, 1)[: position + 1] for cache in (keys, values)]
            k, v = (one.repeat_interleave(heads // kv_heads, dim=1) for one in seen)  # (S, Hq, D)
            shares = (torch.einsum("hd,shd->hs", query, k) / width**0.5).softmax(dim=-1)
            rows.append(torch.einsum("hs,shd->hd", shares, v).flatten())
        return torch.stack(rows), keys, values


def assert_exact(case: Case, tiles: AttentionTiles) -> None:
    found, wanted = case.run(tiles), case.reference()
    for number, what in enumerate(("output", "keys", "values")):
        assert_close(found[number], wanted[number], TOLERANCE[case.dtype], what)
    assert not found[3].arrived.any()  # ready for the next launch


@splits
def test_attention_over_sequences_of_every_length_with_and_without_a_norm_of_query_and_key(device, tiles):
    # First token of all, within a block, at the end and beginning of a block, of a tile, of a split, the last place.
    assert_exact(Case([0, 1, 3, 4, 15, 16, 17, 33, 63], 4, 2, 16, torch.float32, device), tiles)
    case = Case([0, 5, 40], 4, 2, 24, torch.float32, device)
    case.norm = QkNorm(random(24, seed=6), random(24, seed=7), 0.01)
    assert_exact(case, tiles)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 3, 8), (2, 1, 24)], ids=str)
def test_heads_of_every_shape(device, dtype, heads, kv_heads, width):
    assert_exact(Case([5, 40], heads, kv_heads, width, dtype, device), SPLITS["splits"])


@splits
def test_equal_inputs_give_equal_bits_and_a_sequence_does_not_depend_on_its_neighbours(device, tiles):
    case = Case([40, 7, 63], 4, 2, 16, torch.float32, device)
    first, second = case.run(tiles)[0], case.run(tiles)[0]
    assert torch.equal(first, second)
    case.positions[0], case.positions[2] = 3, 12
    assert torch.equal(case.run(tiles)[0][1], first[1])


def test_scores_far_apart_stay_finite(device):
    case = Case([50], 2, 1, 16, torch.float32, device)
    case.qkv *= 64.0
    found, wanted = case.run(SPLITS["splits"]), case.reference()
    assert_close(found[0], wanted[0], 1e-5)


@splits
def test_position_beyond_the_table_writes_nothing(device, tiles):
    case = Case([LENGTH, 5], 2, 1, 16, torch.float32, device)
    out, keys, values, _ = case.run(tiles)
    case.positions[0] = 0
    wanted = case.reference()
    assert_close(out[1], wanted[0][1], 3e-6)
    written = int(case.tables[1, 5 // PLACES])
    for found, before in ((keys, case.keys), (values, case.values)):
        untouched = [block for block in range(len(before)) if block != written]
        assert torch.equal(found[untouched].cpu(), before[untouched].float())


def test_small_batches_are_split_and_large_ones_only_where_sequences_are_long(device):
    there = torch.device(device)
    few, many = attention_tiles(1, 2, 64, 2048, there), attention_tiles(64, 8, 64, 2048, there)
    assert few.splits > 1
    assert many.least >= 512
    for tiles in (few, many, attention_tiles(256, 8, 128, 131072, there)):
        assert tiles.splits & (tiles.splits - 1) == 0
        assert tiles.least % tiles.tokens == 0
