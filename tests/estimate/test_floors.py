"""Floors: bytes and FLOPs counted by hand."""

import math

import pytest

from zero2all.estimate.floors import decoding_bytes, distinct_ids, linear_shapes, operator_work, optimizer_work
from zero2all.model.config import ModelConfig, MoeConfig

REFERENCE = ModelConfig(vocab_size=64320)
TOKENS = 16 * 2048


def per_token(name: str) -> tuple[float, float]:
    work = operator_work(REFERENCE, TOKENS, 2048, 2)[name]
    return work.forward_bytes / TOKENS, work.backward_bytes / TOKENS


def test_bytes_of_one_token_of_the_reference_model():
    assert per_token("rms_norm") == (4 * 2048 * 2, 4 * 2048 * 2)
    assert per_token("rope") == (2 * 40 * 64 * 2, 2 * 48 * 64 * 2)
    assert per_token("swiglu") == (3 * 5632 * 2, 5 * 5632 * 2)
    assert sum(per_token("cross_entropy")) == 2 * 64320 * 2
    assert optimizer_work(1000).total == 28_000, "28 bytes a parameter: the bfloat16 weight is half of its master"


def test_an_embedding_moves_a_row_per_token_and_one_per_different_id_as_many_as_text_has():
    work = operator_work(REFERENCE, TOKENS, 2048, 2)["embedding"]
    different = distinct_ids(64320, TOKENS)
    assert work.forward_bytes == pytest.approx((TOKENS + different) * 2048 * 2)
    assert work.backward_bytes == pytest.approx(TOKENS * 2048 * 2 + different * 2048 * 4 * 2)
    assert (distinct_ids(1, 10), distinct_ids(100, 1)) == (1, pytest.approx(1))
    assert distinct_ids(3, 2) == pytest.approx(2 - (1 / 2) ** 2 - math.log(1.5, 4) ** 2 - math.log(4 / 3, 4) ** 2)
    assert 5_000 < distinct_ids(64320, TOKENS) < TOKENS / 3


def test_flops_of_a_micro_batch_of_the_reference_model():
    work = operator_work(REFERENCE, TOKENS, 2048, 2)
    attention = work["attention"]
    assert attention.forward_flops * 22 == pytest.approx(6.05e12, rel=1e-3)
    assert attention.backward_flops * 22 == pytest.approx(15.1e12, rel=3e-3)
    assert work["linear_cross_entropy"].total == pytest.approx(25.9e12, rel=1e-3)
    matrices = sum(work[f"linear/{name}"].total for name in linear_shapes(REFERENCE)) * 22
    assert matrices + work["linear_cross_entropy"].total == pytest.approx(220.9e12, rel=1e-3)
    names = {"attention", "linear_cross_entropy", "linear/qkv", "linear/out", "linear/gate_up", "linear/down"}
    assert {name for name, each in work.items() if each.is_matmul} == names
    assert all(each.total > 0 for each in work.values())
    config = ModelConfig(vocab_size=64, hidden_size=8, intermediate_size=16, layers=1, heads=2, kv_heads=1)
    # two matmuls of 2 T^2 D per head in the forward pass, half of it masked
    assert operator_work(config, 32, 16, 4)["attention"].forward_flops == 2 * (2 * 2 * 16 * 16 * 4 * 2) / 2


def test_a_decoding_pass_reads_every_matrix_once_the_keys_of_each_sequence_and_the_experts_that_are_chosen():
    block = 2048 * (3072 + 2048 + 3 * 5632)
    assert decoding_bytes(REFERENCE, 1, 0, 2, 2) == 2 * (22 * block + 64320 * 2048)
    of_cache = decoding_bytes(REFERENCE, 64, 100, 1, 2) - decoding_bytes(REFERENCE, 64, 0, 1, 2)
    assert of_cache == 64 * 100 * 22 * 2 * 8 * 64 * 2
    moe = MoeConfig(experts=8, experts_per_token=2, expert_size=16)
    config = ModelConfig(vocab_size=64, hidden_size=32, layers=1, heads=2, kv_heads=1, moe=moe)
    one, many = (decoding_bytes(config, batch, 0, 1, 1) for batch in (1, 10_000))
    assert many - one == pytest.approx(6 * 3 * 32 * 16)
