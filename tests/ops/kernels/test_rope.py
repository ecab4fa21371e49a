"""Rotary positions, in place."""

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from tests.ops.agreement import assert_agrees, assert_same_bits, assert_sinks_gather, dtypes, random
from zero2all.ops.kernels.rope import triton_rope
from zero2all.ops.rope import QkNorm

SHAPES = [(1, 1, 1, 1, 2), (2, 5, 6, 2, 12), (1, 40, 3, 3, 10), (2, 3, 5, 1, 64)]  # 40: programs have several rows


def normed_rope(qkv, query_weight, key_weight, cos, sin, heads, kv_heads):
    return triton_rope(qkv, cos, sin, heads, kv_heads, QkNorm(query_weight, key_weight, 0.01))


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    angles = random(*shape, seed=3)
    return angles.cos().float(), angles.sin().float()


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("of_each_row", [False, True], ids=["one table", "a table per row"])
@pytest.mark.parametrize("norm", [False, True], ids=["turned", "normalised and turned"])
def test_query_and_key_are_turned_and_value_is_not(device, dtype, shape, of_each_row, norm):
    rows, length, heads, kv_heads, width = shape
    cos, sin = tables(*([rows] if of_each_row else []), length, width // 2)
    inputs = [random(rows, length, heads + 2 * kv_heads, width), random(width, seed=1), random(width, seed=2)]
    function, formula = (normed_rope, formulas.normed_rope) if norm else (triton_rope, formulas.rope)
    inputs = inputs if norm else inputs[:1]
    assert_agrees(function, formula, inputs, dtype, cos, sin, heads, kv_heads, device=device)


def places_of(*parts: Tensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in parts}


def test_nothing_is_copied_but_where_a_gradient_needs_the_projection_before_a_norm(device):
    cos, sin = (table.to(device) for table in tables(5, 3))
    before = random(2, 5, 4, 6).float().to(device)
    qkv = before.clone()
    assert places_of(*triton_rope(qkv, cos, sin, 2, 1)) == places_of(qkv)
    assert torch.equal(qkv[:, :, 3:], before[:, :, 3:])
    assert not torch.equal(qkv[:, :, :3], before[:, :, :3])
    qkv = before.clone()
    norm = QkNorm(*(random(6, seed=seed).float().to(device).requires_grad_() for seed in (1, 2)), 0.01)
    kept = triton_rope(qkv, cos, sin, 2, 1, norm)
    assert torch.equal(qkv, before)
    with torch.no_grad():
        in_place = triton_rope(qkv, cos, sin, 2, 1, norm)
    assert places_of(*in_place) == places_of(qkv)
    assert_same_bits(in_place, kept)


def test_gradients_of_the_norms_go_to_their_sinks(device):
    weights = [random(6, seed=1), random(6, seed=2)]
    inputs, others = [random(2, 5, 4, 6)], (*tables(5, 3), 2, 1)
    assert_sinks_gather(normed_rope, formulas.normed_rope, inputs, weights, *others, device=device)


def test_gradients_of_query_key_and_value_may_each_lie_in_another_way(device):
    cos, sin = tables(5, 3)

    def shuffled(function):
        """Gradients come back head by head, position by position, and with the last dimension strided."""

        def parts(qkv, *others):
            query, key, value = function(qkv, *others)
            return query.contiguous(), key.transpose(1, 2).contiguous(), value.mT.contiguous()

        return parts

    qkv = random(2, 5, 7, 6)
    assert_agrees(shuffled(triton_rope), shuffled(formulas.rope), [qkv], torch.float32, cos, sin, 3, 2, device=device)


def test_gradient_of_value_keeps_every_bit(device):
    qkv = random(1, 3, 3, 4).float().to(device).requires_grad_()
    cos, sin = (table.to(device) for table in tables(3, 2))
    _, _, value = triton_rope(qkv * 1, cos, sin, 1, 1)
    gradient = torch.tensor([-0.0, torch.inf, 1e-40, -3.5], device=device).repeat(3, 1)
    value.backward(gradient.expand(1, 1, 3, 4))
    assert torch.equal(qkv.grad[0, :, 2].view(torch.int32), gradient.view(torch.int32))
