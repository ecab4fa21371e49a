"""The sizes of the mesh from the config, which meshes are refused, and that all reasons are given at once."""

import re

import pytest

from zero2all.common.errors import UsageError
from zero2all.config import ConfigError, config_from_values
from zero2all.parallel.check import check_spread, idle_settings
from zero2all.parallel.config import ParallelConfig


def config(parallel, **sections):
    """A small run: 16 rows of 64 tokens a step, 8 heads, 4 kv heads, 4 blocks."""
    values = {
        "data": {"seq_len": 64},
        "model": {
            "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "layers": 4, "heads": 8, "kv_heads": 4,
            "max_seq_len": 128,
        },
        "train": {"tokens_per_step": 1024, "micro_batch_samples": 2},
    }  # fmt: skip
    merged = {name: {**values.get(name, {}), **sections.pop(name, {})} for name in values}
    return config_from_values({**merged, **sections, "parallel": {"device": "cpu", **parallel}}, "of a test")


def test_all_problems_are_reported_at_once_with_the_arithmetic():
    parallel = {"zero": 2, "shard": 8, "replicate": 4, "tensor": 5, "pipeline": 8, "offload": "optimizer"}
    asked = config(parallel, model={"tied_embeddings": True})
    with pytest.raises(UsageError) as raised:
        check_spread(asked, 64)
    text = str(raised.value)
    numbered = re.findall(r"^  (\d+)\. (.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    assert f"({len(numbered)} problems). Nothing was started" in text
    for said in (
        "make 4 x 8 x 8 x 5 = 1280 processes, but the run has 64",
        "model.heads 8 is not a multiple of parallel.tensor 5",
        "model.intermediate_size 96 is not a multiple of parallel.tensor 5",
        "model.kv_heads 4 and parallel.tensor 5",
        "has 128 rows, which is not a multiple of parallel.tensor 5",
        "data.seq_len 64 is not a multiple of 5",
        "parallel.pipeline 8 x parallel.chunks 1 = 8 stages, but model.layers is 4",
        "model.tied_embeddings does not work with parallel.pipeline 8",
        "16 rows, fewer than the 32 batch ranks (replicate 4 x shard 8)",
        "parallel.zero 2 does not work with parallel.pipeline 8",
        "parallel.offload optimizer does not work with pipeline 8, only with replicate/shard/tensor",
    ):
        assert any(said in line for _, line in numbered), said
    assert "batch ranks = processes / (tensor x pipeline x context) = 1280 / (5 x 8 x 1) = 32" in text
    assert "rows        = train.tokens_per_step / data.seq_len = 1024 / 64 = 16 per step" in text


EXPERTS = {"experts": 10, "experts_per_token": 2, "expert_size": 8}
ODD_STAGES = [{"name": "a", "from_step": 5, "seq_len": 16}, {"name": "b", "from_step": 9, "seq_len": 18}]
BUBBLE = {"pipeline": 2, "schedule": "zero_bubble", "zero": 3}


@pytest.mark.parametrize(
    ("parallel", "sections", "processes", "said"),
    [
        ({"expert": 3, "zero": 1}, {}, 4,
         "parallel.expert 3 does not divide shard x context x tensor = 4 x 1 x 1 = 4 … Choose a divisor of 4."),
        ({"expert": 2, "zero": 1}, {}, 4, "parallel.expert is 2, but the model has no experts"),
        ({"expert": 4, "zero": 1}, {"model": {"moe": EXPERTS}}, 4,
         "model.moe.experts (10) is not a multiple of parallel.expert (4)"),
        ({"expert": 2, "zero": 3}, {"model": {"moe": EXPERTS}}, 4, "parallel.zero 3 gathers whole experts"),
        ({"expert": 3, "zero": 0}, {}, 4, "Choose a divisor of 1, or set parallel.zero to 1."),
        ({"tensor": 2}, {"stages": [{"name": "long", "from_step": 5, "seq_len": 128}]}, 32,
         "train.tokens_per_step / stages[0].seq_len = 1024 / 128 = 8 rows, fewer than the 16 batch ranks"),
        ({"context": 4, "tensor": 4}, {"data": {"seq_len": 8}}, 16,
         "data.seq_len 8 is not a multiple of 16: parallel.context 4 and parallel.tensor 4"),
        ({"context": 2, "tensor": 4, "context_method": "gather"}, {"data": {"seq_len": 60},
         "train": {"tokens_per_step": 1200}}, 8, "Set data.seq_len to 48."),
        ({"context": 16, "context_method": "ulysses"}, {}, 16,
         "model.heads / parallel.tensor = 8 / 1 = 8 is not a multiple of 16 … parallel.context_method to gather"),
        ({"context": 16}, {"data": {"seq_len": 16}}, 16, "data.seq_len 16 is not a multiple of 32: parallel.context 16 "
         "… with context_method gather each context rank has two"),
        ({"context": 4}, {"stages": ODD_STAGES, "train": {"tokens_per_step": 1152}}, 4,
         "stages[1].seq_len 18 is not a multiple of 4: parallel.context 4"),
        ({"context": 2}, {"train": {"cuda_graph": "on"}}, 2,
         "train.cuda_graph on does not work with parallel.context 2"),
        ({"tensor": 3}, {}, 3, "a divisor of 128, or model.vocab_size to 192 … "
         "Set data.seq_len to 63 and train.tokens_per_step to 1008."),
        ({"tensor": 8}, {}, 8, "model.kv_heads 4 is less than parallel.tensor 8 … copy_kv_heads"),
        ({"tensor": 2}, {"optim": {"kind": "adamw_8bit"}}, 2, "kind adamw_8bit does not work with parallel.tensor 2"),
        ({"tensor": 2}, {"ops": {"compile": "block"}}, 2, "ops.compile block does not work with parallel.tensor 2"),
        ({"zero": 2, "pipeline": 2, "tensor": 3}, {}, 8, "parallel.zero 2 does not work with parallel.pipeline 2"),
        (BUBBLE, {}, 4, "zero_bubble does not work with parallel.zero 3"),
        ({"compress": "bf16", "zero": 3}, {}, 4, "parallel.compress bf16 does not work with zero 3 (FSDP sums its own"),
    ],
    ids=range(19),
)  # fmt: skip
def test_every_rule_says_numbers(parallel, sections, processes, said):
    with pytest.raises(UsageError, match="(?s)" + ".*".join(map(re.escape, said.split(" … ")))):
        check_spread(config(parallel, **sections), processes)


def test_what_divides_is_not_refused():
    experts = {"model": {"moe": {**EXPERTS, "experts": 12}}}
    for parallel, sections in (
        *(({"tensor": 4}, {}), ({"tensor": 8, "copy_kv_heads": True}, {}), ({"context": 8}, {}), ({"pipeline": 4}, {})),
        *(({"expert": 4, "zero": 1}, experts), ({"zero": 3}, experts), ({"zero": 3}, {})),
    ):
        check_spread(config(parallel, **sections), 8)


def test_settings_without_effect_are_named():
    def found(parallel=None, **diloco):
        return idle_settings(config(parallel or {}, diloco=diloco, train={"steps": 120}), 1)

    two = {"groups": ["a:1", "b:1"], "every": 10}
    assert found(**two) == []
    empty = "without effect: diloco.scheme, diloco.every (diloco.groups is empty)"
    assert found(scheme="diloco", every=10) == [empty]
    plain = found(**two, scheme="diloco", momentum=0.8, tau=2, alpha=0.1)
    assert plain == ["without effect: diloco.tau, diloco.alpha (the scheme is diloco)"]
    assert "the groups synchronise once, after the last step" in found(**{**two, "every": 121})[0]
    assert "there is one process" in found({"compress": "bf16"})[0]


def test_auto_takes_what_is_left_and_a_mesh_that_is_not_the_number_of_processes_is_refused():
    for fields, processes, sizes in (
        ({}, 8, (8, 1)),
        ({"zero": 3, "shard": 2}, 8, (4, 2)),
        ({"zero": 2, "replicate": 2}, 8, (2, 4)),
        ({"zero": 1, "replicate": 2, "shard": 4}, 8, (2, 4)),
    ):
        found = ParallelConfig(**fields).sizes(processes)
        assert (found.replicate, found.shard) == sizes
    for fields, processes, product in (
        ({"zero": 1, "shard": 2}, 3, "1 x 2 = 2 processes, but the run has 3"),
        ({"zero": 3, "replicate": 4, "shard": 4}, 8, "= 16 processes, but the run has 8.*: 8 x 1, 4 x 2, 2 x 4, 1 x 8"),
    ):
        with pytest.raises(UsageError, match=product):
            ParallelConfig(**fields).sizes(processes)


def test_settings_that_contradict_each_other_are_reported_together():
    parallel = {"zero": 3, "offload": "optimizer", "chunks": 2}
    said = r"(?s)parallel.offload: got 'optimizer'.*0, 1 or 2 can offload.*parallel.chunks: got 2"
    with pytest.raises(ConfigError, match=said):
        config_from_values({"parallel": parallel}, "of a test")
