"""The profile of a machine: what was measured is used, anything else comes from physics."""

import dataclasses
from pathlib import Path

import pytest

from zero2all.common.errors import BadInputError
from zero2all.estimate import machine as module
from zero2all.estimate.machine import AttentionTime, Matmul, TimeCurve, link_seconds, named_cluster

H200 = named_cluster("h200")


def test_a_measured_product_is_used_as_it_is_and_moves_its_neighbours_and_attention_follows_the_nearest():
    slow = 2 * H200.matmul_seconds(8192, 4096, 4096)
    measured = dataclasses.replace(H200, matmuls=(Matmul(8192, 4096, 4096, "forward", "bfloat16", slow),))
    assert measured.matmul_seconds(8192, 4096, 4096) == slow
    assert measured.matmul_seconds(8192, 4096, 8192) == pytest.approx(2 * H200.matmul_seconds(8192, 4096, 8192))
    assert measured.matmul_seconds(8192, 4096, 4096, "dgrad") == H200.matmul_seconds(8192, 4096, 4096, "dgrad")
    slow = 3 * H200.attention_seconds(8192, 2048, 16, 4, 128)
    one = AttentionTime(8192, 2048, 16, 4, 128, slow, 2 * slow)
    measured = dataclasses.replace(H200, attention=(one,))
    assert measured.attention_seconds(8192, 2048, 16, 4, 128) == pytest.approx(slow)
    assert measured.attention_seconds(8192, 2048, 16, 4, 128, backward=True) == pytest.approx(2 * slow)


def test_only_a_large_product_reaches_the_published_rate_and_a_tile_more_than_a_wave_or_odd_columns_cost():
    a100 = named_cluster("a100-80g")
    rates = [2.0 * size**3 / a100.matmul_seconds(size, size, size, dtype="float16") for size in (256, 1024, 8192)]
    assert rates == sorted(rates)
    assert 0.9 * 271.2e12 < rates[-1] <= 271.2e12
    assert rates[0] < 0.1 * rates[-1]
    one, more = (module.tiled_seconds(256 * tiles, 128, 512, 1e15, 132) for tiles in (132, 133))
    assert more > 1.3 * one
    assert H200.matmul_seconds(8192, 50257, 2048) > 1.9 * H200.matmul_seconds(8192, 50304, 2048)


def test_collectives_agree_with_worked_examples():
    ring = [link_seconds("all-gather", 2.0 * size, 32, 50e9, 0.0) for size in (64e6, 1e9)]
    assert ring == [pytest.approx(2 * 31 / 32 * size / 50e9) for size in (64e6, 1e9)]
    assert link_seconds("all-reduce", 1e6, 32, 50e9, 1e-5) == pytest.approx(140.0e-6)  # a double tree
    assert link_seconds("all-reduce", 1e9, 32, 50e9, 1e-5) == pytest.approx(39.4e-3, rel=2e-3)  # a ring


def test_between_nodes_a_group_has_the_network_cards_of_its_members():
    cluster = named_cluster("b200")
    network = cluster.link("network")
    assert cluster.link_of(8).name == "nvlink"
    assert cluster.link_of(32).bytes_per_second == pytest.approx(8 * network.bytes_per_second)
    assert cluster.link_of(4, stride=8).bytes_per_second == pytest.approx(network.bytes_per_second)


def test_a_profile_is_read_back_as_it_was_written_and_no_other_file_is_taken_for_one(tmp_path: Path):
    path = tmp_path / "profile.json"
    for name in module.CLUSTERS:
        matmul = Matmul(1, 2, 3, "wgrad", "float8", 1e-5, 0.01)
        curves = {"rms_norm": TimeCurve(((1e6, 1e-5), (1e8, 1e-4)))}
        one = dataclasses.replace(named_cluster(name), matmuls=(matmul,), operators=curves)
        module.write_machine(path, one)
        assert module.read_machine(path) == one
    for text in ("{}", '{"name": "x", "links": [{"speed": 3}]}'):
        path.write_text(text)
        with pytest.raises(BadInputError, match="not the profile of a machine"):
            module.read_machine(path)


def test_a_curve_meets_its_points_keeps_the_last_rate_and_ends_at_the_shortest_kernel():
    curve = TimeCurve(((1e6, 1e-5), (1e8, 1e-3)))
    found = [curve.seconds(size) for size in (10.0, 1e6, 1e7, 1e9)]
    assert found == pytest.approx([1e-5, 1e-5, 1e-4, 1e-2])
    curves = {"rms_norm": TimeCurve(((1e8, 3e-5), (4e8, 12e-5)))}
    machine = dataclasses.replace(named_cluster("h200"), operators=curves, launch_seconds=2e-6)
    assert machine.operator_seconds("rms_norm", 5e7) == pytest.approx(1.5e-5)
    assert machine.operator_seconds("rms_norm", 1e5) == pytest.approx(2e-6)
    sizes = [1e4, 1e6, 5e7, 1e8, 1.01e8, 4e8, 1e9]
    times = [machine.operator_seconds("rms_norm", size) for size in sizes]
    assert times == sorted(times)


def test_a_noisy_or_incomplete_profile_is_doubted_more():
    one = Matmul(64, 64, 64, "forward", "bfloat16", 1e-5, 0.01)
    measured = dataclasses.replace(H200, source="measured", matmuls=(one,))
    noisy = dataclasses.replace(measured, matmuls=(dataclasses.replace(one, spread=0.19),))
    assert measured.doubt < noisy.doubt
    assert dataclasses.replace(measured, left=3).doubt == H200.doubt
