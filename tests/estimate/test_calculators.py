"""What must hold of the formulas whatever the numbers: order, sums, bounds."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.estimate import model_calculators as calculators
from zero2all.estimate.gpus import GPUS
from zero2all.estimate.model_calculators import Devices, ImpossibleError, hardware_flops, mfu, roofline, said, variants
from zero2all.estimate.parameters import KNOWN_MODELS, Unpadded, counted, counted_by_total
from zero2all.estimate.run_calculators import LAWS, RunSpeed, cost, daly_interval, goodput, young_interval
from zero2all.model.config import MoeConfig, parameter_counts


def over(*strategies):
    """`given`, with few examples: the formulas are smooth."""
    return lambda test: settings(max_examples=30)(given(*strategies)(test))


sizes = st.integers(1, 64)
models = st.sampled_from(list(KNOWN_MODELS.values()))
experts = (st.sampled_from([0, 4, 8]), st.integers(1, 4), st.sampled_from([32, 64]), st.integers(0, 2))
mixtures = st.builds(MoeConfig, *experts, dense_layers=st.integers(0, 1))
shapes = st.builds(
    Unpadded,
    vocab_size=st.integers(64, 4096),
    hidden_size=st.sampled_from([64, 128]),
    intermediate_size=st.integers(64, 512),
    layers=st.integers(2, 6),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    attention_bias=st.sampled_from(["none", "qkv", "all"]),
    tied_embeddings=st.booleans(),
    moe=mixtures,
)


@over(shapes)
def test_parts_of_a_model_add_up_to_what_the_config_counts(config):
    found, counts = counted(config, "x"), parameter_counts(config)
    assert sum(found.parts.values()) == found.total == counts["total"]
    assert (found.active, found.matmul) == (counts["active"], counts["matmul"])
    biases = config.layers * (config.heads + 2 * config.kv_heads) * config.head_size
    biases += config.layers * config.hidden_size if config.attention_bias == "all" else 0
    assert found.parts.get("biases", 0) == (0 if config.attention_bias == "none" else biases)


@over(shapes, st.integers(1, 4096))
def test_flops_grow_with_layers_width_inside_and_length_and_causal_is_at_most_full(config, seq_len):
    deeper = dataclasses.replace(config, layers=config.layers + 1)
    wider = dataclasses.replace(config, intermediate_size=config.intermediate_size + 1)
    here = variants(counted(config, "x"), seq_len)
    assert here["causal"] < here["palm"] <= here["seed"]
    assert all(variants(counted(deeper, "x"), seq_len)[name] > value for name, value in here.items())
    assert all(variants(counted(wider, "x"), seq_len)[name] >= value for name, value in here.items())
    assert all(variants(counted(config, "x"), seq_len + 1)[name] >= value for name, value in here.items())
    executed = [hardware_flops(counted(config, "x"), here, kind) for kind in ("none", "selective", "full")]
    assert executed == sorted(executed)
    assert executed[2] < here["causal"] * 4 / 3


@over(st.floats(1.0, 600.0), st.floats(3600.0, 1e6), st.floats(0.0, 3000.0))
def test_goodput_is_greatest_near_dalys_interval(save, mtbf, restart):
    best = daly_interval(save, mtbf)
    reached = goodput(best, save, restart, mtbf)
    candidates = [goodput(best * factor / 100, save, restart, mtbf) for factor in range(20, 501, 5)]
    assert max(candidates) <= reached * 1.001
    assert 0 < reached < 1
    assert goodput(young_interval(save, mtbf), save, restart, mtbf) <= reached * 1.001
    assert goodput(1e9, save, restart, mtbf) == pytest.approx(0, abs=1e-6)


@over(st.floats(1e18, 1e27), st.sampled_from(sorted(LAWS)), st.floats(0.3, 3.0))
def test_no_other_split_of_the_same_flops_has_a_lower_loss(budget, law, factor):
    chosen = LAWS[law]
    best = chosen.best_parameters(budget)
    assert chosen.loss(best, budget / 6 / best) <= chosen.loss(best * factor, budget / 6 / (best * factor)) + 1e-12
    assert chosen.flops_for(best) == pytest.approx(budget, rel=1e-9)


@over(models)
def test_every_answer_about_a_model_has_units_conventions_and_finite_terms(model):
    answers = [calculators.params(model), calculators.flops(model), calculators.zero(model, 64)]
    answers.append(calculators.inference(model, gpu=GPUS["h100"], sequences=4))
    answers.append(mfu(model, 1000.0, Devices(8, GPUS["h100"]), recompute="full"))
    for answer in answers:
        names = [term.name for term in answer.terms]
        assert len(names) == len(set(names))
        assert answer.convention
        assert all(term.value >= 0 and term.unit for term in answer.terms)
        assert (answer.rows()[0], list(answer.as_json()["terms"])) == (["what", "value", "how"], names)


def test_a_model_known_by_its_size_only_gets_the_conventions_that_need_no_more():
    assert list(variants(counted_by_total(7_000_000_000), 2048)) == ["6N"]
    assert list(variants(counted_by_total(7_000_000_000, layers=32, hidden=4096), 2048)) == ["6N", "seed"]
    found = variants(counted_by_total(1_100_048_384, layers=22, hidden=2048, vocab=32000), 2048)
    assert list(found) == ["6N", "seed", "palm", "causal"]
    assert found["palm"] == pytest.approx(variants(KNOWN_MODELS["tinyllama"], 2048)["palm"], rel=1e-4)


def test_numbers_are_said_with_their_unit():
    for value, unit, words in (
        (31.40625e9, "bytes", "31.41 GB = 29.25 GiB"),
        (33.83 * 86400, "s", "33.83 d"),
        (0.0012, "s", "1.2 ms"),
        (0.457, "share", "45.7 %"),
        (6738415616, "parameters", "6,738,415,616 parameters (6.738 B)"),
        (51.47e9, "FLOP/token", "51.47 GFLOP/token"),
        (4.8e12, "bytes/s", "4.8 TB/s"),
        (float("inf"), "s", "never"),
    ):
        assert said(value, unit) == words


def test_memory_bound_products_name_the_bandwidth_and_rates_above_the_peak_are_refused():
    small = roofline(1, 4096, 4096, GPUS["a100"])
    assert next(term.formula for term in small.terms if term.name == "least time") == "at 2.039 TB/s"
    model = counted_by_total(7_000_000_000)
    with pytest.raises(ImpossibleError, match="at most the peak of a GPU, 989"):
        cost(model, RunSpeed(tflops=4000), Devices(8, GPUS["h100"]), 10**12)
    with pytest.raises(ImpossibleError, match="at most 23,548 tokens/s"):
        mfu(model, 30_000, Devices(gpu=GPUS["h100"]))


def test_everything_that_is_wrong_is_said_at_once():
    model = counted_by_total(10**9)
    for ask, fields in (
        (lambda: mfu(model), ["--tokens-per-second", "--gpu"]),
        (lambda: cost(model, RunSpeed(mfu=0.4, tflops=100.0)), ["--tokens", "--mfu"]),
        (lambda: cost(model, RunSpeed(mfu=0.4, convention="palm"), tokens=10), ["--convention"]),
    ):
        with pytest.raises(ImpossibleError) as caught:
            ask()
        assert [problem.field for problem in caught.value.problems] == fields
