"""Tiles and waves, and the six sizing rules."""

import dataclasses

import pytest

from zero2all.estimate.machine import CLUSTERS, named_cluster
from zero2all.estimate.shapes import RULES, Shape, check_shape, filled, nearest_divisor, pass_efficiency
from zero2all.model.config import ModelConfig, MoeConfig

H100, A100 = named_cluster("h100"), named_cluster("a100-80g")
GOOD = Shape(ModelConfig(vocab_size=64512), samples=16, seq_len=2048)


def with_model(**changes) -> Shape:
    return dataclasses.replace(GOOD, model=dataclasses.replace(GOOD.model, **changes))


def broken(shape: Shape, machine=H100) -> list[tuple[int, str, str]]:
    found = check_shape(shape, machine)
    assert all(bool(one.nearest) is not one.is_kept for one in found)
    return [(one.rule, one.what, one.nearest) for one in found if not one.is_kept]


def test_the_tile_lies_the_way_that_fits_better():
    assert (filled(8192, 14336, 132), filled(128 * 132, 256, 132)) == (pytest.approx(0.970, abs=5e-4), 1.0)
    assert filled(256, 128 * 132, 132) == 1.0
    assert filled(128 * 132, 257, 132) == pytest.approx(257 / 512)  # one column more costs a whole wave


def test_there_are_six_rules_and_a_well_chosen_shape_breaks_none():
    assert [rule.number for rule in RULES] == [1, 2, 3, 4, 5, 6]
    assert ({one.rule for one in check_shape(GOOD, H100)}, broken(GOOD)) == ({1, 2, 3, 4, 5, 6}, [])


def test_a_broken_rule_names_the_size_and_the_nearest_that_keeps_it():
    for shape, machine, found in (
        (with_model(vocab_size=64320), H100, (1, "model.vocab_size", "64,384")),
        (dataclasses.replace(GOOD, samples=1, seq_len=256), H100, (2, "train.micro_batch_samples", "none up to 8")),
        (with_model(intermediate_size=5461), A100, (3, "model.intermediate_size", "5,440")),
        (with_model(heads=16, head_dim=80), H100, (3, "model.head_dim", "64")),
        (with_model(moe=MoeConfig(experts=8, expert_size=500)), H100, (3, "model.moe.expert_size", "512")),
        (dataclasses.replace(GOOD, stages=4), H100, (6, "model.layers", "24")),
    ):
        rule, what, nearest = broken(shape, machine)[0]
        assert (rule, what) == found[:2]
        assert nearest.startswith(found[2])


def test_the_vocabulary_needs_a_smaller_multiple_before_hopper():
    assert broken(with_model(vocab_size=64320), A100) == []
    assert [one[0] for one in broken(dataclasses.replace(with_model(vocab_size=64320), tensor=2), A100)] == [1]


def test_rows_at_odd_addresses_are_told_apart_from_rows_that_waste_a_part_of_a_tile():
    for width, is_odd in ((5461, True), (5464, False)):
        found = check_shape(with_model(intermediate_size=width), H100)
        assert ("16 bytes" in next(one.says for one in found if "f / t" in one.says)) is is_odd


def test_heads_that_tensor_ranks_cannot_share_and_ranks_that_exchange_longer_than_they_multiply():
    shape = dataclasses.replace(GOOD, tensor=3)
    assert {(4, "model.heads", "parallel.tensor 2"), (4, "model.kv_heads", "parallel.tensor 2")} <= set(broken(shape))
    copied = dataclasses.replace(GOOD, tensor=16, copies_kv_heads=True)
    assert not [one for one in broken(copied) if one[0] == 4]
    assert nearest_divisor(8, 3) == 2
    assert (5, "parallel.tensor", "2") in broken(dataclasses.replace(GOOD, tensor=8))
    wide = dataclasses.replace(with_model(hidden_size=8192, intermediate_size=28672, heads=64), tensor=8)
    assert not [one for one in broken(wide) if one[0] == 5]
    two_nodes = dataclasses.replace(wide, tensor=16)
    assert (5, "parallel.tensor", "8") in broken(two_nodes)


def test_the_advised_micro_batch_keeps_the_rule():
    for machine in CLUSTERS.values():
        for samples in range(1, 9):
            shape = dataclasses.replace(GOOD, samples=samples, seq_len=1024)
            found = next(one for one in check_shape(shape, machine) if one.rule == 2)
            if not found.is_kept and found.nearest.isdigit():
                assert pass_efficiency(shape, int(found.nearest), machine.multiprocessors) >= 0.9
