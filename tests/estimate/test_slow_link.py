"""Bytes over a slow link against numbers worked out by hand, and the published example of two machines."""

from __future__ import annotations

import pytest

from zero2all.estimate.slow_link import (
    SCHEMES,
    bytes_per_step,
    link_costs,
    part_bytes,
    powersgd_bytes,
    published_loss,
    recommended,
    sparse_part_bytes,
)

SHAPES = [(1000, 1000), (1000,)]
FRAGMENTS = [[(78_750, 2000)]] * 8  # 1.26 B


def test_payloads_by_hand() -> None:
    assert [part_bytes(1025, bits) for bits in (32, 16, 8, 4)] == [4100, 2050, 1025 + 8, 513 + 8]
    assert sparse_part_bytes(4096, 82) == 123 + 21 + 4
    assert sparse_part_bytes(4096 + 10, 82) == 138 + 23 + 8
    assert powersgd_bytes((1000, 1000), 4) == 4 * 4 * 2000
    assert powersgd_bytes((1000,)) == 4000
    assert powersgd_bytes((8, 8), 4) == 256  # two 8 x 4 matrices would be no smaller


def test_bytes_per_step_by_hand() -> None:
    assert bytes_per_step("data_parallel", SHAPES, 2) == 2 * 1_001_000
    assert bytes_per_step("data_parallel", SHAPES, 4, bits=32) == 1.5 * 4 * 1_001_000
    assert bytes_per_step("diloco", SHAPES, 3, every=30) == 2 * 2 * 1_001_000 / 30
    assert bytes_per_step("streaming", SHAPES, 2, every=100, bits=4) == (500_000 + 4 * 977 + 500 + 4) / 100


def test_savings_of_the_published_schemes() -> None:
    every_step = bytes_per_step("data_parallel", SHAPES, 2)
    assert every_step / bytes_per_step("diloco", SHAPES, 2, every=30) == pytest.approx(30)
    assert every_step / bytes_per_step("streaming", SHAPES, 2, every=100, bits=4) > 390


def test_two_machines_at_one_gigabit() -> None:
    """1.26 B parameters, 3.4 s of compute; streaming waits only where a fragment takes longer than a step."""
    costs = {cost.scheme.name: cost for cost in link_costs(FRAGMENTS, 2, 1e9, 3.4)}
    assert len(costs) == len(SCHEMES)
    assert costs["data parallel, bf16"].exchange_seconds == pytest.approx(20.16)
    assert costs["data parallel, bf16"].efficiency == pytest.approx(0.144, abs=1e-3)
    assert costs["DiLoCo, bf16, H=30"].efficiency == pytest.approx(0.835, abs=1e-3)
    assert costs["DiLoCo, bf16, H=100"].efficiency == pytest.approx(0.944, abs=1e-3)
    streaming = costs["streaming, int4, H=100"]
    assert streaming.is_hidden
    assert streaming.exchange_seconds == pytest.approx(0.635, abs=1e-3)
    assert recommended(list(costs.values()), 1.26e9) == streaming
    slow = next(cost for cost in link_costs(FRAGMENTS, 2, 0.1e9, 3.4) if cost.scheme == streaming.scheme)
    assert slow.waited_seconds == pytest.approx(8 * (slow.exchange_seconds - 3.4) / 100)
    fast = link_costs(FRAGMENTS, 2, 400e9, 3.4)
    assert recommended(fast, 1.26e9).scheme.scheme == "data_parallel"


def test_published_loss_is_of_the_nearest_size() -> None:
    named = {one.name: one for one in SCHEMES}
    assert published_loss(named["DiLoCo, bf16, H=30"], 1.26e9, 4) == (0.5, "arXiv 2503.09799, 1300M, 4 groups")
    assert published_loss(named["DiLoCo, bf16, H=30"], 9e9, 8)[0] == 1.1  # the largest with eight groups has 2.4 B
    assert published_loss(named["streaming, int4, H=100"], 40e6, 2)[0] == 1.4
    assert published_loss(named["DiLoCo, int4, H=500"], 1e9, 2)[0] is None
