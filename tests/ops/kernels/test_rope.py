"""Rotary positions, in place."""

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import assert_agrees, assert_same_bits, dtypes, random
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.rope import QkNorm

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels.rope import triton_rope


def reference(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each pair as one complex number, turned by multiplication."""
    half = qkv.shape[-1] // 2
    angles = torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    turned = torch.complex(qkv[..., :half], qkv[..., half:]) * angles
    turned = torch.cat((turned.real, turned.imag), dim=-1)
    query, key, value = turned[:, :, :heads], turned[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def normed_reference(qkv, query_weight, key_weight, cos, sin, heads, kv_heads, eps=0.01):
    """Every query and key head has unit mean square, then its weights, then the rotation."""
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
    query, key = (
        part * (part.square().mean(-1, keepdim=True) + eps) ** -0.5 * weight
        for part, weight in ((query, query_weight), (key, key_weight))
    )
    return reference(torch.cat((query, key, value), dim=2), cos, sin, heads, kv_heads)


def normed_rope(qkv, query_weight, key_weight, cos, sin, heads, kv_heads):
    return triton_rope(qkv, cos, sin, heads, kv_heads, QkNorm(query_weight, key_weight, 0.01))


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    angles = random(*shape, seed=3)
    return angles.cos().float(), angles.sin().float()


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize(
    ("rows", "length", "heads", "kv_heads", "width"),
    [(1, 1, 1, 1, 2), (2, 5, 6, 2, 12), (1, 7, 3, 3, 10), (2, 3, 5, 1, 64)],
)
@pytest.mark.parametrize("of_each_row", [False, True], ids=["one table", "a table per row"])
def test_query_and_key_are_turned_and_value_is_not(device, dtype, rows, length, heads, kv_heads, width, of_each_row):
    cos, sin = tables(*([rows] if of_each_row else []), length, width // 2)
    qkv = random(rows, length, heads + 2 * kv_heads, width)
    assert_agrees(triton_rope, reference, [qkv], dtype, cos, sin, heads, kv_heads, device=device)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize(
    ("rows", "length", "heads", "kv_heads", "width"),
    [(1, 1, 1, 1, 2), (2, 5, 6, 2, 12), (1, 40, 3, 3, 10), (2, 3, 5, 1, 64)],  # 40: programs have several rows
)
@pytest.mark.parametrize("of_each_row", [False, True], ids=["one table", "a table per row"])
def test_with_a_norm_heads_are_normalised_and_weighted_first(
    device, dtype, rows, length, heads, kv_heads, width, of_each_row
):
    cos, sin = tables(*([rows] if of_each_row else []), length, width // 2)
    inputs = [random(rows, length, heads + 2 * kv_heads, width), random(width, seed=1), random(width, seed=2)]
    assert_agrees(normed_rope, normed_reference, inputs, dtype, cos, sin, heads, kv_heads, device=device)


def test_a_norm_leaves_the_projection_as_it_was_where_a_gradient_needs_it(device):
    cos, sin = (table.to(device) for table in tables(5, 3))
    qkv = random(2, 5, 4, 6).float().to(device)
    norm = QkNorm(*(random(6, seed=seed).float().to(device).requires_grad_() for seed in (1, 2)), 0.01)
    before = qkv.clone()
    kept = triton_rope(qkv, cos, sin, 2, 1, norm)
    assert torch.equal(qkv, before)
    with torch.no_grad():
        in_place = triton_rope(qkv, cos, sin, 2, 1, norm)
    assert {part.untyped_storage().data_ptr() for part in in_place} == {qkv.untyped_storage().data_ptr()}
    assert_same_bits(in_place, kept)


def test_gradients_of_the_norms_go_to_their_sinks(device):
    cos, sin = (table.to(device) for table in tables(5, 3))
    qkv = random(2, 5, 4, 6).float().to(device).requires_grad_()
    weights = [torch.nn.Parameter(random(6, seed=seed).float().to(device)) for seed in (1, 2)]
    sum(part.sum() for part in triton_rope(qkv * 1, cos, sin, 2, 1, QkNorm(*weights, 0.01))).backward()
    wanted = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad, weight.gradient_sink = None, GradientSink(torch.ones_like(weight))
    sum(part.sum() for part in triton_rope(qkv * 1, cos, sin, 2, 1, QkNorm(*weights, 0.01))).backward()
    assert all(weight.grad is None for weight in weights)
    for weight, exact in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.gradient_sink.buffer, 1 + exact)


def test_nothing_is_copied(device):
    cos, sin = (table.to(device) for table in tables(5, 3))
    qkv = random(2, 5, 4, 6).float().to(device)
    before = qkv.clone()
    query, key, value = triton_rope(qkv, cos, sin, 2, 1)
    assert {part.untyped_storage().data_ptr() for part in (query, key, value)} == {qkv.untyped_storage().data_ptr()}
    assert torch.equal(qkv[:, :, 3:], before[:, :, 3:])
    assert not torch.equal(qkv[:, :, :3], before[:, :, :3])


def test_gradients_of_query_key_and_value_may_each_lie_in_another_way(device):
    cos, sin = tables(5, 3)

    def shuffled(function):
        """Gradients come back head by head, position by position, and with the last dimension strided."""

        def parts(qkv, *others):
            query, key, value = function(qkv, *others)
            return query.contiguous(), key.transpose(1, 2).contiguous(), value.mT.contiguous()

        return parts

    qkv = random(2, 5, 7, 6)
    assert_agrees(shuffled(triton_rope), shuffled(reference), [qkv], torch.float32, cos, sin, 3, 2, device=device)


def test_gradient_of_value_keeps_every_bit(device):
    qkv = random(1, 3, 3, 4).float().to(device).requires_grad_()
    cos, sin = (table.to(device) for table in tables(3, 2))
    _, _, value = triton_rope(qkv * 1, cos, sin, 1, 1)
    gradient = torch.tensor([-0.0, torch.inf, 1e-40, -3.5], device=device).repeat(3, 1)
    value.backward(gradient.expand(1, 1, 3, 4))
    assert torch.equal(qkv.grad[0, :, 2].view(torch.int32), gradient.view(torch.int32))
