"""`z2a train --plan-only`: what the plan says, and that a step of rank 0 does what it says."""

import json

import pytest

from tests.simulated_rank import simulate_ranks
from zero2all.common.manifest import write_manifest
from zero2all.config import load_config
from zero2all.estimate.memory import GIB
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.config import ParallelConfig
from zero2all.train.plan import make_plan, parallel_notes, plan_notes, plan_values, processes_of

LARGE = ["z2all-1b", "--model.vocab_size", "64000", "--parallel.device", "cpu", "--train.precision", "float32"]
TINY = [
    *("--parallel.device", "cpu", "--model.vocab_size", "2048", "--model.hidden_size", "128", "--model.heads", "4"),
    *("--model.kv_heads", "2", "--model.intermediate_size", "192", "--model.layers", "2", "--data.seq_len", "16"),
    *("--model.tied_embeddings", "false", "--train.tokens_per_step", "128", "--train.micro_batch_samples", "2"),
    *("--parallel.bucket_mb", "0.1", "--optim.kind", "adamw"),
]
SHARDED, EXPERTS = "--parallel.zero 1 --parallel.shard", "--model.moe.experts 4 --model.moe.expert_size 16"
EXPERTS += " --parallel.zero 2 --parallel.expert 2 --train.micro_batch_samples 1"
CONTEXT, LORA = "--parallel.context 2 --parallel.tensor", "--optim.kind adamw --finetune.lora.rank 4 --parallel.zero"


def plan_of(processes, *words):
    return make_plan(load_config(LARGE[0], [*LARGE[1:], *words]), processes)


def test_the_plan_shows_who_holds_what_and_where_gradients_are_summed():
    axes = ("--parallel.shard", "2", "--parallel.tensor", "2", "--parallel.pipeline", "2")
    plan = plan_of(16, "--parallel.zero", "1", *axes)
    assert [(axis.name, axis.ranks) for axis in plan.axes] == [
        ("pipeline", [0, 8]), ("replicate", [0, 4]), ("shard", [0, 2]), ("tensor", [0, 1]),
    ]  # fmt: skip
    assert [axis.between_machines for axis in plan.axes] == [True, False, False, False], "8 processes a machine"
    held = {one.name: one for one in plan.layout}
    out = held["blocks.*.attention.out.weight"]
    assert (out.count, out.shape, out.cut, out.local, out.copies) == (22, (2048, 2048), "columns/2", (2048, 1024), 4)
    assert out.summed_over == "replicate x shard"
    assert (held["norm.weight"].summed_over, held["norm.weight"].copies) == ("replicate x shard x tensor", 8)
    assert len(plan.memory) == 2
    assert 0 < plan.bubble < 0.5


def test_a_plan_says_what_groups_send_and_how_many_rows_each_has():
    notes = plan_notes(plan_of(2, "--diloco.groups", "[a:1,b:1]", "--diloco.compress", "int4"))
    assert "DiLoCo: 2 groups, streaming, every 30 steps, int4: a group sends 6" in "\n".join(notes)
    rows = [line.split() for line in notes if "rows" in line or "per group" in line]
    assert int(rows[0][-3]) == 2 * int(rows[1][1])


def test_a_run_that_is_meant_for_gpus_is_planned_for_one_where_there_is_none(monkeypatch, z2a):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    alone = make_plan(load_config("z2all-1b", []), 1)
    assert alone.memory[0].total / GIB == pytest.approx(55.923, abs=0.01)  # `z2a perf memory --gpu h100`
    assert "a process takes 58.4 GiB of the GPU" in " ".join(plan_notes(alone))
    assert plan_of(1).device == "cpu", "the run itself is for a CPU"
    for gpu, said in (("h100", "58.4 GiB of the 79.1 GiB of h100"), ("rtx 4090", "and 4090 has 23.6 GiB")):
        assert said in " ".join(z2a.done("train", "z2all-1b", "--plan-only", "--gpu", gpu).split())
    assert "--gpu h100 names a GPU to plan for" in z2a.refused(2, "train", "z2all-1b", "--gpu", "h100")


def test_tables_are_at_most_100_columns_wide_and_need_no_workspace(z2a, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = ["--parallel.processes", "16", "--parallel.zero", "1", "--parallel.shard", "2", "--parallel.tensor", "2"]
    words = ["train", *LARGE, "--plan-only", *words, "--parallel.context", "2", "--work", tmp_path]
    printed = z2a.done(*words)
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 100
    for said in ("mesh: 16 ranks", "gate_up_pairs", "reduce-scatter", "axes that tolerate a slow link", "batch ranks"):
        assert said in printed
    assert json.loads(z2a.done(*words, "--json"))["sizes"]["tensor"] == 2
    assert plan_values(plan_of(1))["transfers"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model.vocab_size null", ["Give --model.vocab_size N"]),
        ("--parallel.tensor 3", ["model.heads 32 is not a multiple of parallel.tensor 3"]),
        (
            "--parallel.processes 12 --parallel.pipeline 2 --parallel.tensor 8 --parallel.zero 2",
            ["make 16, which is not a multiple of it", "parallel.zero 2 does not work with parallel.pipeline 2"],
        ),
        (  # problems of fields and of the layout together, blamed on the command line
            "--parallel.processes 8 --data.seq_len 2047 --parallel.context 8 --train.tokens_per_step 524288",
            [
                *("The command line has 1 problem", "a multiple of data.seq_len (2047)"),
                *("data.seq_len 2047 is not a multiple of 8", "Set data.seq_len to 2048."),
            ],
        ),
    ],
    ids=["no vocabulary", "an impossible mesh", "parts of a machine", "fields and layout"],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(z2a, tmp_path, words, said):
    refusal = z2a.refused(2, "train", *LARGE, "--plan-only", "--work", tmp_path, *words.split())
    for text in said:
        assert text in refusal


def test_a_plan_says_where_the_tokenizer_has_fewer_ids_and_refuses_one_that_has_more(z2a, tmp_path):
    words = ["train", "z2all-100m", "--plan-only", "--parallel.device", "cpu", "--work", tmp_path]
    (tmp_path / "tokenizer").mkdir()
    write_manifest(tmp_path / "tokenizer", "tokenizer", "", {"fingerprint": "", "vocab_size": 3072})
    said = "vocabulary: 32768 ids (model.vocab_size); the tokenizer of the workspace has 3072."
    assert said in z2a.done(*words)
    write_manifest(tmp_path / "tokenizer", "tokenizer", "", {"fingerprint": "", "vocab_size": 40000})
    said = "model.vocab_size is 32768, but the data was packed with 40000 token ids"
    assert said in z2a.refused(2, *words)
    assert "vocabulary:" not in z2a.done(*words, "--model.vocab_size", "null")


def test_a_plan_of_several_machines_says_how_many_are_on_each(z2a):
    words = ["--parallel.processes", "8", "--parallel.pipeline", "2", "--parallel.tensor", "8"]
    said = "16 ranks on 2 machines, up to 8 on each (parallel.processes)"
    assert said in z2a.done("train", *LARGE, "--plan-only", *words)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (64, f"{SHARDED} 2 {CONTEXT} 2 --parallel.pipeline 2 --train.tokens_per_step 256"),
        (8, f"{CONTEXT} 4 --parallel.copy_kv_heads true --parallel.context_method gather "
            "--train.micro_batch_samples 8"),
        (8, EXPERTS),
        (4, "--parallel.zero 3"),
        (4, f"{SHARDED} 2 --optim.kind adamw_8bit --parallel.compress bf16"),
        (6, f"{SHARDED} 3 --optim.kind muon --model.layers 3"),
        (8, f"{EXPERTS} --optim.kind muon"),
        (4, f"{LORA} 2 --parallel.tensor 2"),
        (2, f"{LORA} 3"),
    ],
    ids=["64 ranks on all axes", "copied kv heads", "experts", "zero 3", "8 bits, bf16", "muon", "muon, experts",
         "LoRA", "LoRA, zero 3"],
)  # fmt: skip
def test_a_simulated_rank_sends_the_bytes_of_the_formulas_and_holds_their_states(processes, words):
    found = simulate_ranks(load_config("quickstart", [*TINY, *words.split()]), processes)
    assert found.given
    for key, (counted, expected) in found.given.items():
        assert counted == pytest.approx(expected, rel=1e-12), key
    if "--parallel.zero 3" not in words:  # FSDP keeps what it gathered last
        assert found.state_bytes == pytest.approx(found.expected_state_bytes, rel=0.02)


@pytest.mark.parametrize("words", [["--parallel.tensor", "2"], ["--parallel.zero", "3"]])
def test_the_plan_has_the_momenta_that_muon_exchanges_where_matrices_are_cut(words):
    config = load_config("quickstart", [*TINY, "--optim.kind", "muon", *words])
    moved = [one for one in make_plan(config, 2).transfers if one.what == "momentum"]
    assert [(one.collective, one.ranks) for one in moved] == [("all-to-all", 2)]


@pytest.mark.parametrize(
    ("config", "replicate", "shard"),
    [
        (ParallelConfig(device="cpu", processes=4), 4, 1),
        (ParallelConfig(device="cpu", processes=4, zero=1), 1, 4),
        (ParallelConfig(device="cpu", processes=8, zero=2, replicate=2, shard=8), 2, 8),
        (ParallelConfig(device="cpu", tensor=2, context=2), 1, 1),
    ],
    ids=["copies", "zero 1", "two machines", "axes of the model"],
)
def test_mesh_is_that_of_the_run(config, replicate, shard):
    sizes = config.sizes(processes_of(config))
    assert (sizes.replicate, sizes.shard) == (replicate, shard)


def test_memory_and_communication_are_those_of_one_process_of_the_run():
    words = ["--model.vocab_size", "4096", "--parallel.device", "cpu", "--parallel.processes", "4"]
    config, ops = load_config("z2all-100m", [*words, "--parallel.zero", "2"]), resolve(OpsConfig(), "cpu")
    lines = parallel_notes(config, config.parallel.sizes(4), ops, 4, None)
    assert lines[0].startswith("the run has 4 processes (shard 4, zero 2)")
    assert any(line.split()[0] == "optimizer" and line.endswith("1/4 of the parameters") for line in lines)
    assert [line.split()[0] for line in lines if " over 4 ranks" in line] == ["reduce-scatter", "all-gather"]
    assert any(line.startswith("  1. shard: ") and line.endswith("computation can hide all of it") for line in lines)
    alone = load_config("z2all-100m", words[:4])
    assert parallel_notes(alone, alone.parallel.sizes(1), ops, 4, None) == []
