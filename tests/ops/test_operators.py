"""Every implementation that needs no GPU against the formula in float64: values and gradients, over odd shapes.

Legend as in `zero2all.ops.attention`: B batch, Hq and Hk heads, T queries, S keys, D head width.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import (
    TOLERANCE,
    assert_agrees,
    assert_close,
    assert_same_bits,
    dtypes,
    random,
    random_ids,
    values_and_gradients,
)
from zero2all.ops import linear_cross_entropy
from zero2all.ops.attention import math_attention, sdpa_attention
from zero2all.ops.config import OpsConfig
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.implementation import OpContext
from zero2all.ops.optimizer import AdamWConstants, Flat
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.ops.rope import QkNorm

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so and goes on


CPU = OpContext("cpu")


def implementations(operator, context=CPU):
    """The test runs once per implementation that can run in that context."""
    names = [one.name for one in OPERATORS[operator] if one.check(context) is None]
    assert names
    functions = [getattr(resolve(OpsConfig(**{operator: name}), context), operator) for name in names]
    return pytest.mark.parametrize("function", functions, ids=names)


# ---- attention -----------------------------------------------------------------------------------------------------


def attention_reference(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """One output vector at a time, by the definition."""
    B, Hq, T, D = query.shape
    Hk, S = key.shape[1:3]
    rows = []
    for b in range(B):
        for head in range(Hq):
            shared = head // (Hq // Hk)
            for t in range(T):
                at = S - T + t  # queries are the last T of the S positions
                seen = [s for s in range(at + 1) if document_ids is None or document_ids[b, s] == document_ids[b, at]]
                scores = key[b, shared, seen] @ query[b, head, t] / math.sqrt(D)
                rows.append(scores.softmax(dim=0) @ value[b, shared, seen])
    return torch.stack(rows).view(B, Hq, T, D)


@implementations("attention")
@dtypes()
@pytest.mark.parametrize(
    ("query_shape", "key_heads", "keys"),
    [
        ((1, 1, 1, 2), 1, 1),  # the smallest there is
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
    assert_agrees(
        lambda *heads: function(*heads, 0.0), attention_reference, inputs, dtype, tolerance=2 * TOLERANCE[dtype]
    )


@pytest.mark.gpu
def test_the_last_queries_of_long_sequences_on_a_gpu_see_all_keys_before_them():
    shapes = [(2, 4, 128, 64), (2, 2, 320, 64), (2, 2, 320, 64)]  # queries; keys and values
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    results = []
    for function in (sdpa_attention, math_attention):
        mixed = function(*inputs, 0.0)
        results.append((mixed, *torch.autograd.grad(mixed.float().square().sum(), inputs)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "name", [one.name for one in OPERATORS["attention"] if one.check(OpContext("cpu", documents=True)) is None]
)
@dtypes()
@pytest.mark.parametrize(
    "document_ids",
    [
        [[0, 0, 0, 1, 1, 1, 1]],  # two documents
        [[3, 7, 7, 8, 2, 2, 2]],  # documents of one token; numbers in no order
        [[0] * 7, [0, 1, 1, 1, 1, 1, 2]],  # one row is one document, the next is not
    ],
    ids=str,
)
def test_attention_sees_nothing_of_other_documents(name, dtype, document_ids):
    ops, numbers = resolve(OpsConfig(attention=name), CPU), torch.tensor(document_ids)
    B, T = numbers.shape
    inputs = [random(B, 4, T, 6), random(B, 2, T, 6, seed=1), random(B, 2, T, 6, seed=2)]
    assert_agrees(
        lambda *heads: ops.attention(*heads, 0.0, ops.prepare_documents(numbers)),
        lambda *heads: attention_reference(*heads, numbers),
        inputs,
        dtype,
        tolerance=2 * TOLERANCE[dtype],
    )


@implementations("attention", OpContext("cpu", dropout=True))
def test_attention_dropout_keeps_the_mean_and_repeats_with_its_seed(function):
    query, key = torch.zeros(1, 1, 200, 4), torch.zeros(1, 1, 200, 4)
    value = torch.ones(1, 1, 200, 4)
    torch.manual_seed(0)
    first = function(query, key, value, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, function(query, key, value, 0.5))
    assert not torch.equal(first, function(query, key, value, 0.0))
    assert float(first.mean()) == pytest.approx(1.0, abs=0.1)


# ---- rope ----------------------------------------------------------------------------------------------------------


def rope_reference(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each pair as one complex number, turned by multiplication."""
    half = qkv.shape[-1] // 2
    angles = torch.complex(cos.double(), sin.double()).unsqueeze(-2)  # (..., T, 1, D/2)
    turned = torch.complex(qkv[..., :half], qkv[..., half:]) * angles
    turned = torch.cat((turned.real, turned.imag), dim=-1)
    query, key, value = turned[:, :, :heads], turned[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


@implementations("rope")
@dtypes()
@pytest.mark.parametrize(
    ("rows", "length", "heads", "kv_heads", "width"),
    [(1, 1, 1, 1, 2), (2, 5, 3, 1, 4), (1, 9, 4, 2, 6), (2, 3, 2, 2, 64)],
)
@pytest.mark.parametrize("of_each_row", [False, True], ids=["one table", "a table per row"])
def test_rope_turns_each_pair_by_its_angle(function, dtype, rows, length, heads, kv_heads, width, of_each_row):
    angles = random(*([rows] if of_each_row else []), length, width // 2, seed=3)
    tables = angles.cos().float(), angles.sin().float()
    qkv = random(rows, length, heads + 2 * kv_heads, width)
    assert_agrees(function, rope_reference, [qkv], dtype, *tables, heads, kv_heads)


@implementations("rope")
@dtypes()
def test_rope_normalises_query_and_key_heads_first_where_it_is_told_to(function, dtype):
    heads, kv_heads, eps = 3, 2, 0.01
    angles = random(5, 4, seed=3)

    def reference(qkv, query_weight, key_weight, *others):
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
        query = query / (query.square().mean(-1, keepdim=True) + eps).sqrt() * query_weight
        key = key / (key.square().mean(-1, keepdim=True) + eps).sqrt() * key_weight
        return rope_reference(torch.cat((query, key, value), dim=2), *others)

    def normed(qkv, query_weight, key_weight, *others):
        return function(qkv, *others, QkNorm(query_weight, key_weight, eps))

    inputs = [random(2, 5, heads + 2 * kv_heads, 8), random(8, seed=1), random(8, seed=2)]
    assert_agrees(normed, reference, inputs, dtype, angles.cos().float(), angles.sin().float(), heads, kv_heads)


# ---- norm ----------------------------------------------------------------------------------------------------------


def rms_norm_reference(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return total / (total.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight, total


@implementations("rms_norm")
@dtypes()
@pytest.mark.parametrize(("shape", "eps"), [((1, 2), 1e-5), ((3, 5, 7), 0.5), ((2, 1, 64), 1e-5), ((4, 33), 1e-5)])
def test_rms_norm_scales_each_row_of_the_sum_to_unit_mean_square(function, dtype, shape, eps):
    x, branch, weight = random(*shape), random(*shape, seed=1), random(shape[-1], seed=2)
    assert_agrees(lambda *given: function(*given, eps), lambda *given: rms_norm_reference(*given, eps),
                  [x, branch, weight], dtype)  # fmt: skip
    assert_agrees(lambda x, weight: function(x, None, weight, eps),
                  lambda x, weight: rms_norm_reference(x, None, weight, eps), [x, weight], dtype)  # fmt: skip


@implementations("rms_norm")
def test_float32_residual_under_bfloat16_weights_stays_float32(function):
    # What a branch of 1 adds to 1000 is lost in bfloat16.
    x = torch.full((2, 8), 1000.0)
    normed, total = function(x, torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16), 1e-5)
    assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, torch.full((2, 8), 1001.0))
    assert_agrees(
        lambda *given: function(*given, 1e-5),
        lambda *given: rms_norm_reference(*given, 1e-5),
        [random(3, 20), random(3, 20, seed=1), random(20, seed=2)],
        [torch.float32, torch.bfloat16, torch.bfloat16],
    )


@implementations("rms_norm")
def test_mean_square_of_a_bfloat16_row_is_summed_in_float32(function):
    x = torch.full((1, 1000), 3.0, dtype=torch.bfloat16)
    x[0, 0] = 300.0
    normed, _ = function(x, None, torch.ones(1000, dtype=torch.bfloat16), 1e-5)
    expected = 3 / math.sqrt((999 * 9 + 300.0**2) / 1000)
    assert float(normed[0, 1]) == pytest.approx(expected, rel=2**-8)


# ---- embedding -----------------------------------------------------------------------------------------------------


@implementations("embedding")
@dtypes()
def test_embedding_looks_rows_up_and_sums_their_gradients_by_id(function, dtype):
    tokens = random_ids(6, 14).view(2, 7)
    assert_agrees(
        lambda table: function(tokens, table),
        lambda table: torch.nn.functional.one_hot(tokens, 6).double() @ table,
        [random(6, 5)],
        dtype,
    )


# ---- feed-forward --------------------------------------------------------------------------------------------------


def swiglu_reference(pairs: Tensor) -> Tensor:
    gate, up = pairs[..., 0::2], pairs[..., 1::2]
    return gate / (1 + (-gate).exp()) * up


@implementations("swiglu")
@dtypes()
@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 10), (5, 14)])
def test_swiglu_is_gate_times_its_sigmoid_times_up(function, dtype, shape):
    assert_agrees(function, swiglu_reference, [random(*shape)], dtype, tolerance=2 * TOLERANCE[dtype])


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


@implementations("linear")
@dtypes()
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 10), (5, 7)])
def test_linear_is_a_sum_over_inputs_plus_bias(function, dtype, shape):
    x, weight, bias = random(*shape), random(9, shape[-1], seed=1), random(9, seed=2)
    assert_agrees(function, linear_reference, [x, weight, bias], dtype)
    assert_agrees(function, linear_reference, [x, weight], dtype)


@implementations("swiglu")
@dtypes()
@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
def test_feed_forward_is_linear_swiglu_linear(function, dtype, biases):
    (name,) = [one.name for one in OPERATORS["swiglu"] if one.function is function]
    ops = resolve(OpsConfig(swiglu=name), "cpu")
    x, gate_up, down = random(2, 3, 10), random(14, 10, seed=1) / 4, random(10, 7, seed=2) / 4

    def whole(linear, swiglu):
        return lambda x, up, down, *b: linear(swiglu(linear(x, up, *b[:1])), down, *b[1:])

    def ours(x, up, down, up_bias=None, down_bias=None):
        return ops.feed_forward(x, (up, up_bias), (down, down_bias))

    inputs = [x, gate_up, down] + ([random(14, seed=3), random(10, seed=4)] if biases else [])
    assert_agrees(ours, whole(linear_reference, swiglu_reference), inputs, dtype)


# ---- loss on logits ------------------------------------------------------------------------------------------------


@implementations("cross_entropy")
@dtypes()
@pytest.mark.parametrize(("tokens", "rows"), [(1, 2), (7, 5), (3, 1000)])
def test_cross_entropy_is_minus_the_log_probability_of_the_target(function, dtype, tokens, rows):
    def reference(logits: Tensor, targets: Tensor) -> Tensor:
        return -torch.stack([row.softmax(dim=0)[target].log() for row, target in zip(logits, targets, strict=True)])

    assert_agrees(function, reference, [random(tokens, rows) * 2], dtype, random_ids(rows, tokens))


@implementations("cross_entropy")
def test_cross_entropy_of_huge_logits_stays_finite(function):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, -1e30]])
    torch.testing.assert_close(function(logits, torch.tensor([1, 1])), torch.tensor([2e4, 0.0]))


# ---- head and loss -------------------------------------------------------------------------------------------------

ROWS, WIDTH, PADDED, VOCAB = 11, 6, 40, 37


def head_and_loss_reference(hidden, head, targets, weights, vocab_size, z):
    """The sum and the losses by their definitions, over all logits at once."""
    logits = hidden @ head[:vocab_size].t()
    logsum = logits.exp().sum(dim=-1).log()
    counted = (targets >= 0).double()
    losses = (logsum - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)) * counted
    return (weights * (losses + z * logsum.square() * counted)).sum(), losses.detach()


def head_and_loss_inputs(leading=(ROWS,)) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states and head, targets of which two are ignored, weights of which one is 0."""
    count = math.prod(leading)
    targets, weights = random_ids(VOCAB, count), random(count, seed=3).abs()
    targets[[1, count - 2]] = -1
    weights[0] = 0.0
    inputs = [random(*leading, WIDTH), random(PADDED, WIDTH, seed=1)]
    return inputs, targets.view(leading), weights.view(leading)


every_loss = implementations("linear_cross_entropy")
every_loss_with_z = implementations("linear_cross_entropy", OpContext("cpu", z_loss=True))


@every_loss
@dtypes()
@pytest.mark.parametrize("leading", [(ROWS,), (3, 5)], ids=str)
@pytest.mark.parametrize("vocab_size", [VOCAB, PADDED], ids=["padded", "not padded"])
def test_head_and_loss_are_a_weighted_cross_entropy(function, dtype, leading, vocab_size):
    inputs, targets, weights = head_and_loss_inputs(leading)
    others = (targets, weights.to(torch.promote_types(dtype, torch.float32)), vocab_size, 0.0)
    assert_agrees(function, head_and_loss_reference, inputs, dtype, *others)


@every_loss_with_z
@dtypes()
def test_z_term_is_added_to_what_is_minimised_and_not_to_the_losses(function, dtype):
    inputs, targets, weights = head_and_loss_inputs()
    others = (targets, weights.to(torch.promote_types(dtype, torch.float32)), VOCAB)
    assert_agrees(function, head_and_loss_reference, inputs, dtype, *others, 0.03)
    hidden, head = (value.to(dtype) for value in inputs)
    total, losses = function(hidden, head, *others, 0.03)
    plain_total, plain_losses = function(hidden, head, *others, 0.0)
    assert torch.equal(losses, plain_losses)
    assert total > plain_total


@every_loss
@pytest.mark.parametrize("ignored", [-1, -100])
def test_target_below_zero_has_no_loss_and_no_gradient(function, ignored):
    (hidden, head), targets, weights = head_and_loss_inputs()
    targets[targets < 0] = ignored
    hidden.requires_grad_()
    total, losses = function(hidden, head, targets, weights, VOCAB, 0.0)
    total.backward()
    off = targets < 0
    assert not losses[off].any()
    assert not hidden.grad[off].any()
    assert losses[~off].all()


@every_loss
@dtypes()
def test_padding_of_the_head_has_no_probability_and_exactly_no_gradient(function, dtype):
    (hidden, head), targets, weights = head_and_loss_inputs()
    wide = torch.promote_types(dtype, torch.float32)
    results = []
    for padding in (0.0, 1000.0):
        head[VOCAB:] = padding
        given = [hidden.to(dtype), head.to(dtype)]
        others = (targets, weights.to(wide), VOCAB, 0.0)
        values, gradients = values_and_gradients(function, given, *others)
        assert not gradients[1][VOCAB:].any()
        results.append([*values, *gradients])
    assert_same_bits(*results)


@pytest.mark.parametrize("chunk", [1, 4, ROWS - 1, ROWS, ROWS + 1])
def test_chunks_change_neither_the_losses_nor_the_gradients(monkeypatch, chunk):
    inputs, targets, weights = head_and_loss_inputs()
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", chunk)
    chunked = linear_cross_entropy.chunked_linear_cross_entropy
    assert_agrees(chunked, head_and_loss_reference, inputs, torch.float64, targets, weights, VOCAB, 0.03)


@every_loss
def test_factor_on_the_sum_reaches_the_gradients_unrounded(function):
    # 0.3 in bfloat16 is 0.3008: a gradient times that would be 0.26 % too long in every value.
    hidden, head = random(500, 8).bfloat16(), random(PADDED, 8, seed=1).bfloat16()
    targets, weights = random_ids(VOCAB, 500), random(500, seed=2).abs().float()
    gradients = {}
    for factor in (1.0, 0.3):
        leaves = [value.clone().requires_grad_() for value in (hidden, head)]
        total, _ = function(*leaves, targets, weights, VOCAB, 0.0)
        gradients[factor] = [gradient.double() for gradient in torch.autograd.grad(total * factor, leaves)]
    for scaled, whole in zip(gradients[0.3], gradients[1.0], strict=True):
        # Rounding each value alone evens out over thousands of them.
        assert float((scaled * whole).sum() / whole.square().sum()) == pytest.approx(0.3, rel=1e-3)


def test_head_gradient_is_added_to_the_sink_in_float32_where_there_is_one():
    inputs, targets, weights = head_and_loss_inputs()
    others = (targets, weights.float(), VOCAB, 0.0)
    chunked = linear_cross_entropy.chunked_linear_cross_entropy
    hidden, head = (value.bfloat16() for value in inputs)
    plain = head.clone().requires_grad_()
    total, _ = chunked(hidden, plain, *others)
    total.backward()
    head.requires_grad_()
    head.gradient_sink = GradientSink(torch.ones(head.shape))
    for factor in (1.0, 0.25):  # two micro-batches
        total, _ = chunked(hidden, head, *others)
        (total * factor).backward()
    assert head.grad is None
    assert head.gradient_sink.buffer.dtype == torch.float32
    assert_close(head.gradient_sink.buffer, 1.0 + 1.25 * plain.grad.double(), 2e-3)
    assert torch.equal(head.gradient_sink.buffer[VOCAB:], torch.ones(PADDED - VOCAB, WIDTH))


@every_loss
def test_losses_alone_need_no_gradient(function):
    (hidden, head), targets, weights = head_and_loss_inputs()
    expected, _ = head_and_loss_reference(hidden, head, targets, weights, VOCAB, 0.0)
    with torch.no_grad():
        total, _ = function(hidden.float(), head.float(), targets, weights.float(), VOCAB, 0.0)
    assert not total.requires_grad
    assert_close(total, expected, TOLERANCE[torch.float32])


# ---- optimizer -----------------------------------------------------------------------------------------------------

LR, BETA1, BETA2, EPS, MAX_NORM = 1e-2, 0.9, 0.95, 1e-8, 4.0
CONSTANTS = AdamWConstants(BETA1, BETA2, EPS)
NO, YES = torch.tensor(False), torch.tensor(True)
LENGTHS, DECAYS = (33, 17), (0.1, 0.0)


def gradient_at(step: int, group: int) -> Tensor:
    """Longer than MAX_NORM in even steps, shorter in odd ones."""
    return random(LENGTHS[group], seed=100 * step + group) * (1.0 if step % 2 == 0 else 0.1)


def new_groups(dtype: torch.dtype, masters: torch.dtype = torch.float32) -> list[Flat]:
    """Two groups of parameters with gaps between them, as alignment leaves them."""
    groups = []
    for number, (length, decay) in enumerate(zip(LENGTHS, DECAYS, strict=True)):
        wide = random(length, seed=50 + number).to(masters)
        weights = wide if dtype == masters else wide.to(dtype)
        slices = (slice(0, 5), slice(8, length)) if number == 0 else (slice(0, length),)
        zeros = [torch.zeros_like(wide) for _ in range(3)]
        groups.append(Flat(weights, wide, *zeros, slices=slices, weight_decay=decay, lr=LR))
    return groups


def norm_of(gradients: list[Tensor]) -> Tensor:
    return torch.cat(gradients).norm()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)


def updated(function, dtype=torch.float32, masters=torch.float32, max_norm=MAX_NORM) -> tuple[list[Flat], Tensor]:
    groups, updates = new_groups(dtype, masters), torch.zeros(())
    for step in range(10):
        for number, group in enumerate(groups):
            group.gradients.copy_(gradient_at(step, number))
            for gap in gaps(group):
                group.gradients[gap] = 0.0
        norm = norm_of([group.gradients for group in groups])
        function(groups, updates, clip_factor(norm, max_norm), NO, CONSTANTS)
    return groups, updates


def gaps(group: Flat) -> list[slice]:
    return [slice(one.stop, other.start) for one, other in zip(group.slices, group.slices[1:], strict=False)]


def adamw_by_hand(max_norm: float = MAX_NORM) -> list[Tensor]:
    groups = new_groups(torch.float64, torch.float64)
    weights = [group.masters for group in groups]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(10):
        gradients = [gradient_at(step, number) for number in range(2)]
        for group, gradient in zip(groups, gradients, strict=True):
            for gap in gaps(group):
                gradient[gap] = 0.0
        norm = float(norm_of(gradients))
        assert (norm > MAX_NORM) == (step % 2 == 0)
        for number, decay in enumerate(DECAYS):
            gradient = gradients[number] * (min(1.0, max_norm / norm) if max_norm else 1.0)
            means[number] = BETA1 * means[number] + (1 - BETA1) * gradient
            squares[number] = BETA2 * squares[number] + (1 - BETA2) * gradient**2
            step_size = (means[number] / (1 - BETA1 ** (step + 1))) / (
                (squares[number] / (1 - BETA2 ** (step + 1))).sqrt() + EPS
            )
            weights[number] = weights[number] * (1 - LR * decay) - LR * step_size
    return weights


@implementations("optimizer")
@pytest.mark.parametrize("max_norm", [MAX_NORM, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("masters", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_optimizer_is_adamw_with_decoupled_decay_on_a_scaled_gradient(function, masters, max_norm):
    groups, updates = updated(function, masters, masters, max_norm)
    assert float(updates) == 10
    for group, expected in zip(groups, adamw_by_hand(max_norm), strict=True):
        for at in group.slices:
            torch.testing.assert_close(group.masters[at].double(), expected[at], rtol=1e-6, atol=1e-6)


@implementations("optimizer")
def test_optimizer_writes_bfloat16_weights_from_float32_masters(function):
    groups, _ = updated(function, torch.bfloat16)
    alone, _ = updated(function, torch.float32)
    for group, wide in zip(groups, alone, strict=True):
        assert torch.equal(group.masters, wide.masters)
        assert torch.equal(group.weights, group.masters.bfloat16())


@implementations("optimizer")
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_skipped_step_leaves_every_bit_as_it_was(function, norm):
    groups, updates = updated(function, torch.bfloat16)
    buffers = [getattr(group, name) for group in groups for name in ("weights", "masters", "firsts", "seconds")]
    before = [buffer.clone() for buffer in (*buffers, updates)]
    groups[0].gradients[3] = norm
    function(groups, updates, torch.tensor(1.0), YES, CONSTANTS)
    assert_same_bits([*buffers, updates], before)
    groups[0].gradients[3] = 1.0
    function(groups, updates, torch.tensor(1.0), NO, CONSTANTS)
    assert float(updates) == 11
