"""Every implementation that needs no GPU against the formula in float64: values and gradients, over odd shapes.

Legend as in `zero2all.ops.attention`: B batch, Hq and Hk heads, T queries, S keys, D head width.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops import agreement, flat_adamw, formulas
from tests.ops.agreement import TOLERANCE, assert_agrees, assert_same_bits, dtypes, random, random_ids
from zero2all.ops import linear_cross_entropy
from zero2all.ops.attention import math_attention, sdpa_attention
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.ops.rope import QkNorm

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so and goes on


CPU, WITH_DOCUMENTS = OpContext("cpu"), OpContext("cpu", documents=True)


def implementations(operator, context=CPU):
    """The test runs once per implementation that can run in that context."""
    names = [one.name for one in OPERATORS[operator] if one.check(context) is None]
    assert names
    functions = [getattr(resolve(OpsConfig(**{operator: name}), context), operator) for name in names]
    return pytest.mark.parametrize("function", functions, ids=names)


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
    allowed = 2 * TOLERANCE[dtype]
    assert_agrees(lambda *heads: function(*heads, 0.0), attention_reference, inputs, dtype, tolerance=allowed)


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


DOCUMENT_IDS = [
    [[0, 0, 0, 1, 1, 1, 1]],  # two documents
    [[3, 7, 7, 8, 2, 2, 2]],  # documents of one token; numbers in no order
    [[0] * 7, [0, 1, 1, 1, 1, 1, 2]],  # one row is one document, the next is not
]


@pytest.mark.parametrize("name", [one.name for one in OPERATORS["attention"] if one.check(WITH_DOCUMENTS) is None])
@dtypes()
@pytest.mark.parametrize("document_ids", DOCUMENT_IDS, ids=str)
def test_attention_sees_nothing_of_other_documents(name, dtype, document_ids):
    ops, numbers = resolve(OpsConfig(attention=name), CPU), torch.tensor(document_ids)
    B, T = numbers.shape
    inputs = [random(B, 4, T, 6), random(B, 2, T, 6, seed=1), random(B, 2, T, 6, seed=2)]

    def found(*heads):
        return ops.attention(*heads, 0.0, ops.prepare_documents(numbers))

    wanted = partial(attention_reference, document_ids=numbers)
    assert_agrees(found, wanted, inputs, dtype, tolerance=2 * TOLERANCE[dtype])


@implementations("attention", OpContext("cpu", dropout=True))
def test_attention_dropout_keeps_the_mean_and_repeats_with_its_seed(function):
    given = (*torch.zeros(2, 1, 1, 200, 4), torch.ones(1, 1, 200, 4))
    torch.manual_seed(0)
    first = function(*given, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, function(*given, 0.5))
    assert not torch.equal(first, function(*given, 0.0))
    assert float(first.mean()) == pytest.approx(1.0, abs=0.1)


@implementations("rope")
@dtypes()
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 5, 3, 1, 4), (1, 9, 4, 2, 6), (2, 3, 2, 2, 64)], ids=str)
@pytest.mark.parametrize("of_each_row", [False, True], ids=["one table", "a table per row"])
def test_rope_turns_each_pair_by_its_angle(function, dtype, shape, of_each_row):
    rows, length, heads, kv_heads, width = shape
    angles = random(*([rows] if of_each_row else []), length, width // 2, seed=3)
    tables = angles.cos().float(), angles.sin().float()
    qkv = random(rows, length, heads + 2 * kv_heads, width)
    assert_agrees(function, formulas.rope, [qkv], dtype, *tables, heads, kv_heads)


@implementations("rope")
@dtypes()
def test_rope_normalises_query_and_key_heads_first_where_it_is_told_to(function, dtype):
    angles = random(5, 4, seed=3)

    def normed(qkv, query_weight, key_weight, *others):
        return function(qkv, *others, QkNorm(query_weight, key_weight, 0.01))

    inputs = [random(2, 5, 3 + 2 * 2, 8), random(8, seed=1), random(8, seed=2)]
    assert_agrees(normed, formulas.normed_rope, inputs, dtype, angles.cos().float(), angles.sin().float(), 3, 2)


@implementations("rms_norm")
@dtypes()
@pytest.mark.parametrize(("shape", "eps"), [((1, 2), 1e-5), ((3, 5, 7), 0.5), ((2, 1, 64), 1e-5), ((4, 33), 1e-5)])
def test_rms_norm_scales_each_row_of_the_sum_to_unit_mean_square(function, dtype, shape, eps):
    x, branch, weight = random(*shape), random(*shape, seed=1), random(shape[-1], seed=2)
    assert_agrees(lambda *given: function(*given, eps), lambda *given: formulas.rms_norm(*given, eps),
                  [x, branch, weight], dtype)  # fmt: skip
    assert_agrees(lambda x, weight: function(x, None, weight, eps),
                  lambda x, weight: formulas.rms_norm(x, None, weight, eps), [x, weight], dtype)  # fmt: skip


@implementations("rms_norm")
def test_float32_residual_under_bfloat16_weights_stays_float32(function):
    agreement.assert_float32_residual_stays(function, random(20, seed=2))


@implementations("rms_norm")
def test_mean_square_of_a_bfloat16_row_is_summed_in_float32(function):
    x = torch.full((1, 1000), 3.0, dtype=torch.bfloat16)
    x[0, 0] = 300.0
    normed, _ = function(x, None, torch.ones(1000, dtype=torch.bfloat16), 1e-5)
    expected = 3 / math.sqrt((999 * 9 + 300.0**2) / 1000)
    assert float(normed[0, 1]) == pytest.approx(expected, rel=2**-8)


@implementations("embedding")
@dtypes()
def test_embedding_looks_rows_up_and_sums_their_gradients_by_id(function, dtype):
    tokens = random_ids(6, 14).view(2, 7)

    def by_definition(table):
        return torch.nn.functional.one_hot(tokens, 6).double() @ table

    assert_agrees(lambda table: function(tokens, table), by_definition, [random(6, 5)], dtype)


@implementations("swiglu")
@dtypes()
@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 10), (5, 14)])
def test_swiglu_is_gate_times_its_sigmoid_times_up(function, dtype, shape):
    assert_agrees(function, formulas.swiglu, [random(*shape)], dtype, tolerance=2 * TOLERANCE[dtype])


@implementations("linear")
@dtypes()
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 10), (5, 7)])
def test_linear_is_a_sum_over_inputs_plus_bias(function, dtype, shape):
    inputs = [random(*shape), random(9, shape[-1], seed=1), random(9, seed=2)]
    for given in (inputs, inputs[:2]):
        assert_agrees(function, formulas.linear, given, dtype)


@implementations("swiglu")
@dtypes()
@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
def test_feed_forward_is_linear_swiglu_linear(function, dtype, biases):
    (name,) = [one.name for one in OPERATORS["swiglu"] if one.function is function]
    ops = resolve(OpsConfig(swiglu=name), "cpu")
    x, gate_up, down = random(2, 3, 10), random(14, 10, seed=1) / 4, random(10, 7, seed=2) / 4

    def ours(x, up, down, up_bias=None, down_bias=None):
        return ops.feed_forward(x, (up, up_bias), (down, down_bias))

    inputs = [x, gate_up, down] + ([random(14, seed=3), random(10, seed=4)] if biases else [])
    assert_agrees(ours, formulas.feed_forward, inputs, dtype)


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


ROWS, WIDTH, PADDED, VOCAB = 11, 6, 40, 37


def head_and_loss_inputs(leading=(ROWS,)) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states and head, targets of which two are ignored, weights of which one is 0."""
    count = math.prod(leading)
    targets, weights = random_ids(VOCAB, count), random(count, seed=3).abs()
    targets[[1, count - 2]] = torch.tensor([-1, -100])
    weights[0] = 0.0
    inputs = [random(*leading, WIDTH), random(PADDED, WIDTH, seed=1)]
    return inputs, targets.view(leading), weights.view(leading)


every_loss = implementations("linear_cross_entropy")


@every_loss
@dtypes()
@pytest.mark.parametrize("leading", [(ROWS,), (3, 5)], ids=str)
@pytest.mark.parametrize("vocab_size", [VOCAB, PADDED], ids=["padded", "not padded"])
def test_head_and_loss_are_a_weighted_cross_entropy(function, dtype, leading, vocab_size):
    inputs, targets, weights = head_and_loss_inputs(leading)
    others = (targets, weights.to(torch.promote_types(dtype, torch.float32)), vocab_size, 0.0)
    assert_agrees(function, formulas.head_and_loss, inputs, dtype, *others)


@implementations("linear_cross_entropy", OpContext("cpu", z_loss=True))
@dtypes()
def test_z_term_is_added_to_what_is_minimised_and_not_to_the_losses(function, dtype):
    inputs, targets, weights = head_and_loss_inputs()
    others = (targets, weights.to(torch.promote_types(dtype, torch.float32)), VOCAB, 0.03)
    assert_agrees(function, formulas.head_and_loss, inputs, dtype, *others)


@every_loss
@dtypes()
def test_padding_of_the_head_has_no_probability_and_exactly_no_gradient(function, dtype):
    (hidden, head), targets, weights = head_and_loss_inputs()
    others = (targets, weights.to(torch.promote_types(dtype, torch.float32)), VOCAB, 0.0)
    results = []
    for padding in (0.0, 1000.0):
        head[VOCAB:] = padding
        values, gradients = agreement.values_and_gradients(function, [hidden.to(dtype), head.to(dtype)], *others)
        assert not gradients[1][VOCAB:].any()
        results.append([*values, *gradients])
    assert_same_bits(*results)


@pytest.mark.parametrize("chunk", [1, 4, ROWS - 1, ROWS, ROWS + 1])
def test_chunks_change_neither_the_losses_nor_the_gradients(monkeypatch, chunk):
    inputs, targets, weights = head_and_loss_inputs()
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", chunk)
    chunked = linear_cross_entropy.chunked_linear_cross_entropy
    assert_agrees(chunked, formulas.head_and_loss, inputs, torch.float64, targets, weights, VOCAB, 0.03)


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
    (hidden, head), targets, weights = head_and_loss_inputs()
    chunked = linear_cross_entropy.chunked_linear_cross_entropy
    others = (targets, weights.float(), VOCAB, 0.0)
    agreement.assert_sinks_gather(chunked, formulas.head_and_loss, [hidden], [head], *others)


@every_loss
def test_losses_alone_need_no_gradient(function):
    (hidden, head), targets, weights = head_and_loss_inputs()
    expected, _ = formulas.head_and_loss(hidden, head, targets, weights, VOCAB, 0.0)
    with torch.no_grad():
        total, _ = function(hidden.float(), head.float(), targets, weights.float(), VOCAB, 0.0)
    assert not total.requires_grad
    agreement.assert_close(total, expected, TOLERANCE[torch.float32])


@implementations("optimizer")
@pytest.mark.parametrize("max_norm", [flat_adamw.MAX_NORM, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("masters", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_optimizer_is_adamw_with_decoupled_decay_on_a_scaled_gradient(function, masters, max_norm):
    groups, updates = flat_adamw.updated(function, "cpu", masters, masters, max_norm)
    assert float(updates) == flat_adamw.STEPS
    for group, expected in zip(groups, flat_adamw.by_formula(max_norm), strict=True):
        for at in group.slices:
            torch.testing.assert_close(group.masters[at].double(), expected[at], rtol=1e-6, atol=1e-6)


@implementations("optimizer")
def test_optimizer_writes_bfloat16_weights_from_float32_masters(function):
    flat_adamw.assert_weights_are_rounded_masters(function)


@implementations("optimizer")
def test_a_skipped_step_leaves_every_bit_as_it_was(function):
    groups, updates = flat_adamw.updated(function, weights_in=torch.bfloat16)
    buffers = flat_adamw.buffers_of(groups, updates)
    before = [buffer.clone() for buffer in buffers]
    groups[0].gradients[3] = math.nan
    function(groups, updates, torch.tensor(1.0), ~flat_adamw.NO, flat_adamw.CONSTANTS)
    assert_same_bits(buffers, before)
    groups[0].gradients[3] = 1.0
    function(groups, updates, torch.tensor(1.0), flat_adamw.NO, flat_adamw.CONSTANTS)
    assert float(updates) == flat_adamw.STEPS + 1
