"""Every implementation of every operator against the formula in float64: values and gradients, over odd shapes.

Legend as in `zero2all.ops.attention`: B batch, Hq and Hk heads, T queries, S keys, D head width.
"""

import math

import pytest
import torch
from torch import Tensor

from zero2all.ops.registry import OPERATORS

TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def implementations(operator):
    found = OPERATORS[operator]
    return pytest.mark.parametrize("function", [one.function for one in found], ids=[one.name for one in found])


def random(*shape: int, seed: int = 0) -> Tensor:
    """Float64 values that bfloat16 holds exactly, so that all dtypes see the same input."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.bfloat16().double()


def assert_agrees(function, reference, inputs: list[Tensor], dtype: torch.dtype, *others) -> None:
    """Same output, and same gradient of a random projection of it with respect to every input."""
    exact = [value.clone().requires_grad_() for value in inputs]
    given = [value.to(dtype).requires_grad_() for value in inputs]
    expected, found = reference(*exact, *others), function(*given, *others)
    assert found.shape == expected.shape
    direction = random(*expected.shape, seed=99)
    wanted = torch.autograd.grad((expected * direction).sum(), exact)
    gradients = torch.autograd.grad((found.double() * direction).sum(), given)
    for ours, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        tolerance = TOLERANCE[dtype] * max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)


def attention_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One output vector at a time, by the definition."""
    B, Hq, T, D = query.shape
    Hk, S = key.shape[1:3]
    rows = []
    for b in range(B):
        for head in range(Hq):
            shared = head // (Hq // Hk)
            for t in range(T):
                seen = S - T + t + 1  # queries are the last T of the S positions
                scores = key[b, shared, :seen] @ query[b, head, t] / math.sqrt(D)
                rows.append(scores.softmax(dim=0) @ value[b, shared, :seen])
    return torch.stack(rows).view(B, Hq, T, D)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so and goes on
@implementations("attention")
@DTYPES
@pytest.mark.parametrize(
    ("query_shape", "key_heads", "keys"),
    [
        ((1, 1, 1, 2), 1, 1),  # the smallest there is
        ((2, 1, 5, 4), 1, 5),  # one head
        ((2, 4, 7, 6), 4, 7),  # as many key heads as query heads
        ((1, 6, 5, 2), 2, 5),  # groups of three
        ((2, 8, 3, 10), 1, 3),  # one key head for all
        ((1, 4, 1, 4), 2, 9),  # one new position after a cache
        ((2, 6, 4, 8), 3, 11),  # several new positions after a cache
        ((1, 2, 16, 64), 1, 17),  # one cached position
    ],
)
def test_attention_is_the_softmax_average_over_the_past(function, dtype, query_shape, key_heads, keys):
    key_shape = (query_shape[0], key_heads, keys, query_shape[3])
    inputs = [random(*query_shape), random(*key_shape, seed=1), random(*key_shape, seed=2)]
    assert_agrees(lambda *heads: function(*heads, 0.0), attention_reference, inputs, dtype)


@implementations("attention")
def test_attention_dropout_keeps_the_mean_and_repeats_with_its_seed(function):
    query, key = torch.zeros(1, 1, 200, 4), torch.zeros(1, 1, 200, 4)
    value = torch.ones(1, 1, 200, 4)
    torch.manual_seed(0)
    first = function(query, key, value, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, function(query, key, value, 0.5))
    assert not torch.equal(first, function(query, key, value, 0.0))
    assert float(first.mean()) == pytest.approx(1.0, abs=0.1)


def rope_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair as one complex number, turned by multiplication."""
    half = heads.shape[-1] // 2
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.complex(cos.double(), sin.double())
    return torch.cat((turned.real, turned.imag), dim=-1)


@implementations("rope")
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 5, 4), (1, 2, 9, 6), (2, 1, 3, 64)])
def test_rope_turns_each_pair_by_its_angle(function, dtype, shape):
    angles = random(shape[2], shape[3] // 2, seed=3)
    cos, sin = angles.cos().float(), angles.sin().float()
    assert_agrees(function, rope_reference, [random(*shape)], dtype, cos, sin)


@implementations("rms_norm")
@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 7), (2, 1, 64), (4, 33)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm_scales_each_row_to_unit_mean_square(function, dtype, shape, eps):
    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight

    assert_agrees(lambda x, weight: function(x, weight, eps), reference, [random(*shape), random(shape[-1])], dtype)


@implementations("rms_norm")
def test_rms_norm_of_a_bfloat16_residual_is_computed_in_float32(function):
    x = torch.full((1, 1000), 3.0, dtype=torch.bfloat16)
    x[0, 0] = 300.0
    found = function(x, torch.ones(1000), 1e-5)
    assert found.dtype == torch.float32
    mean_square = (999 * 9 + 300.0**2) / 1000
    torch.testing.assert_close(found[0, 1].item(), 3 / math.sqrt(mean_square), rtol=1e-6, atol=0)


@implementations("swiglu")
@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 10), (5, 14)])
def test_swiglu_is_gate_times_its_sigmoid_times_up(function, dtype, shape):
    def reference(gate_up: Tensor) -> Tensor:
        half = shape[-1] // 2
        gate, up = gate_up[..., :half], gate_up[..., half:]
        return gate / (1 + (-gate).exp()) * up

    assert_agrees(function, reference, [random(*shape)], dtype)


@implementations("cross_entropy")
@DTYPES
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (1, 2), (7, 5), (3, 1000)])
def test_cross_entropy_is_minus_the_log_probability_of_the_target(function, dtype, tokens, rows):
    def reference(logits: Tensor, targets: Tensor) -> Tensor:
        return -torch.stack([row.softmax(dim=0)[target].log() for row, target in zip(logits, targets, strict=True)])

    targets = torch.randint(rows, (tokens,), generator=torch.Generator().manual_seed(5))
    assert_agrees(function, reference, [random(tokens, rows) * 4], dtype, targets)


@implementations("cross_entropy")
def test_cross_entropy_of_huge_logits_stays_finite(function):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, -1e30]])
    torch.testing.assert_close(function(logits, torch.tensor([1, 1])), torch.tensor([2e4, 0.0]))


@implementations("cross_entropy")
def test_cross_entropy_of_bfloat16_logits_is_float32(function):
    losses = function(torch.zeros(2, 1000, dtype=torch.bfloat16), torch.tensor([0, 999]))
    torch.testing.assert_close(losses, torch.full((2,), math.log(1000)))


def updated(build) -> list[Tensor]:
    """Weights after ten AdamW updates on gradients that are the same for every implementation."""
    weights = [torch.nn.Parameter(random(*shape).float()) for shape in ((3, 5), (7,), (1, 1))]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = build(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(10):
        for number, weight in enumerate(weights):
            weight.grad = random(*weight.shape, seed=100 * step + number).float()
        optimizer.step()
    return [weight.detach() for weight in weights]


def adamw_by_hand() -> list[Tensor]:
    results = []
    for number, (shape, decay) in enumerate((((3, 5), 0.1), ((7,), 0.0), ((1, 1), 0.0))):
        weight = random(*shape)
        mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in range(10):
            gradient = random(*shape, seed=100 * step + number)
            weight = weight * (1 - 1e-2 * decay)
            mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
            unbiased, spread = mean / (1 - 0.9 ** (step + 1)), (square / (1 - 0.95 ** (step + 1))).sqrt()
            weight = weight - 1e-2 * unbiased / (spread + 1e-8)
        results.append(weight)
    return results


@implementations("optimizer")
def test_optimizer_is_adamw_with_decoupled_decay(function):
    for found, expected in zip(updated(function), adamw_by_hand(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@implementations("optimizer")
def test_optimizer_repeats_bit_for_bit(function):
    assert all(torch.equal(one, other) for one, other in zip(updated(function), updated(function), strict=True))
