"""`z2a train --plan-only`: what the plan says, and that a step of rank 0 does what it says."""

import json

import pytest

from tests.simulated_rank import simulate_ranks
from zero2all.cli.main import main
from zero2all.common.manifest import write_manifest
from zero2all.config import load_config
from zero2all.estimate.memory import GIB, MemoryEstimate
from zero2all.train.plan import make_plan, plan_notes, plan_tables, plan_values

LARGE = ["z2all-1b", "--model.vocab_size", "64000", "--parallel.device", "cpu", "--train.precision", "float32"]
LINK = "--diloco."
TINY = [
    *("--parallel.device", "cpu", "--model.vocab_size", "2048", "--model.hidden_size", "128", "--model.heads", "4"),
    *("--model.kv_heads", "2", "--model.intermediate_size", "192", "--model.layers", "2", "--data.seq_len", "16"),
    *("--model.tied_embeddings", "false", "--train.tokens_per_step", "128", "--train.micro_batch_samples", "2"),
    *("--parallel.bucket_mb", "0.1", "--optim.kind", "adamw"),
]


def plan_of(processes, *words):
    return make_plan(load_config(LARGE[0], [*LARGE[1:], *words]), processes)


def test_the_plan_shows_who_holds_what_and_where_gradients_are_summed():
    plan = plan_of(
        16, "--parallel.zero", "1", "--parallel.shard", "2", "--parallel.tensor", "2", "--parallel.pipeline", "2"
    )
    assert [(axis.name, axis.ranks) for axis in plan.axes] == [
        ("pipeline", [0, 8]), ("replicate", [0, 4]), ("shard", [0, 2]), ("tensor", [0, 1]),
    ]  # fmt: skip
    assert [axis.between_machines for axis in plan.axes] == [True, False, False, False], "8 processes a machine"
    held = {one.name: one for one in plan.layout}
    out = held["blocks.*.attention.out.weight"]
    assert (out.count, out.shape, out.cut, out.local, out.copies) == (22, (2048, 2048), "columns/2", (2048, 1024), 4)
    assert out.summed_over == "replicate x shard"
    assert held["norm.weight"].summed_over == "replicate x shard x tensor"
    assert held["norm.weight"].copies == 8
    assert len(plan.memory) == 2
    assert plan.bubble is not None
    assert 0 < plan.bubble < 0.5


def test_the_axis_for_a_slow_link_is_one_that_sends_little_and_hides_it():
    plan = plan_of(8, "--parallel.tensor", "2", "--parallel.pipeline", "2", "--train.micro_batch_samples", "4")
    assert [axis.axis for axis in plan.traffic] == ["pipeline", "replicate", "tensor"]
    assert any(line.startswith("  1. pipeline: ") for line in plan_notes(plan))


def test_a_plan_says_what_groups_send_and_how_many_rows_each_has():
    link = {"groups": "[a:1,b:1]", "compress": "int4"}
    notes = plan_notes(plan_of(2, *(word for name, value in link.items() for word in (LINK + name, value))))
    assert "DiLoCo: 2 groups, streaming, every 30 steps, int4: a group sends 6" in "\n".join(notes)
    rows = [line.split() for line in notes if "rows" in line or "per group" in line]
    assert int(rows[0][-3]) == 2 * int(rows[1][1])


def test_a_run_that_is_meant_for_gpus_is_planned_for_one_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    alone = make_plan(load_config("z2all-1b", []), 1)
    assert alone.memory[0].total / GIB == pytest.approx(55.923, abs=0.01)  # `z2a perf memory --gpu h100`
    assert "a process takes 58.4 GiB of the GPU" in " ".join(plan_notes(alone))
    assert plan_of(1).device == "cpu", "the run itself is for a CPU"
    for gpu, said in (("h100", "58.4 GiB of the 79.1 GiB of h100"), ("rtx 4090", "and 4090 has 23.6 GiB")):
        assert main(["train", "z2all-1b", "--plan-only", "--gpu", gpu]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
    assert main(["train", "z2all-1b", "--gpu", "h100"]) == 2
    assert "--gpu h100 names a GPU to plan for" in capsys.readouterr().err


def test_more_of_an_axis_needs_less_memory():
    def parts(*words) -> MemoryEstimate:
        return plan_of(2, *words).memory[0]

    copies = parts()
    for axis in ("tensor", "pipeline"):
        cut = parts(f"--parallel.{axis}", "2")
        assert 0.45 * copies.state < cut.state < 0.6 * copies.state, axis
    of_context = parts("--parallel.context", "2")
    assert of_context.state == copies.state
    assert of_context.total - of_context.state < 0.6 * (copies.total - copies.state)


def test_tables_are_at_most_100_columns_wide_and_need_no_workspace(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = ["--parallel.processes", "16", "--parallel.zero", "1", "--parallel.shard", "2", "--parallel.tensor", "2"]
    words += ["--parallel.context", "2", "--work", str(tmp_path)]
    assert main(["train", *LARGE, "--plan-only", *words]) == 0
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 100
    for said in (
        "mesh: 16 ranks",
        "gate_up_pairs",
        "reduce-scatter",
        "axes that tolerate a slow link",
        "batch ranks",
    ):
        assert said in printed
    assert main(["train", *LARGE, "--plan-only", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["tensor"] == 2


def test_without_a_vocabulary_and_with_an_impossible_mesh_the_plan_says_what_to_do(capsys, tmp_path):
    assert main(["train", "z2all-1b", "--plan-only", "--model.vocab_size", "null", "--work", str(tmp_path)]) == 2
    assert "Give --model.vocab_size N" in capsys.readouterr().err
    assert main(["train", *LARGE, "--plan-only", "--parallel.tensor", "3"]) == 2
    assert "model.heads 32 is not a multiple of parallel.tensor 3" in capsys.readouterr().err


def test_a_plan_says_where_the_tokenizer_has_fewer_ids_and_refuses_one_that_has_more(capsys, tmp_path):
    words = ["train", "z2all-100m", "--plan-only", "--parallel.device", "cpu", "--work", str(tmp_path)]
    for ids in (3072, 40000):
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        write_manifest(tmp_path / "tokenizer", "tokenizer", "", {"fingerprint": "", "vocab_size": ids})
        assert main(words) == (0 if ids < 32768 else 2)
    printed = capsys.readouterr()
    assert "vocabulary: 32768 ids (model.vocab_size); the tokenizer of the workspace has 3072." in printed.out
    assert "model.vocab_size is 32768, but the data was packed with 40000 token ids" in printed.err
    assert main([*words, "--model.vocab_size", "null"]) == 0
    assert "vocabulary:" not in capsys.readouterr().out


def test_a_plan_of_several_machines_says_how_many_are_on_each_and_refuses_parts_of_one(capsys):
    words = ["train", *LARGE, "--plan-only", "--parallel.processes", "8", "--parallel.pipeline", "2"]
    assert main([*words, "--parallel.tensor", "8"]) == 0
    assert "16 ranks on 2 machines, up to 8 on each (parallel.processes)" in capsys.readouterr().out
    assert main([*words, "--parallel.tensor", "8", "--parallel.processes", "12", "--parallel.zero", "2"]) == 2
    printed = capsys.readouterr().err
    assert "the axes make 16, which is not a multiple of it" in printed
    assert "parallel.zero 2 does not work with parallel.pipeline 2" in printed


def test_problems_of_fields_and_of_the_layout_are_shown_together_and_blamed_on_the_command_line(capsys):
    words = ["--data.seq_len", "2047", "--parallel.processes", "8", "--parallel.context", "8"]
    words += ["--train.tokens_per_step", "524288"]
    assert main(["train", *LARGE, "--plan-only", *words]) == 2
    printed = capsys.readouterr().err
    assert "The command line has 1 problem" in printed
    assert "a multiple of data.seq_len (2047)" in printed
    assert "data.seq_len 2047 is not a multiple of 8" in printed
    assert "Set data.seq_len to 2048." in printed


def test_values_and_tables_of_one_process():
    plan = plan_of(1)
    assert plan_values(plan)["transfers"] == []
    assert [len(rows) > 1 for _, rows in plan_tables(plan)] == [True] * 4


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (64, ["--parallel.zero", "1", "--parallel.shard", "2", "--parallel.tensor", "2", "--parallel.context", "2",
              "--parallel.pipeline", "2", "--train.tokens_per_step", "256"]),
        (8, ["--parallel.tensor", "4", "--parallel.copy_kv_heads", "true", "--parallel.context", "2",
             "--parallel.context_method", "gather", "--train.micro_batch_samples", "8"]),
        (8, ["--parallel.zero", "2", "--parallel.expert", "2", "--model.moe.experts", "4", "--model.moe.expert_size",
             "16", "--train.micro_batch_samples", "1"]),
        (4, ["--parallel.zero", "3"]),
        (4, ["--parallel.compress", "bf16", "--parallel.zero", "1", "--parallel.shard", "2"]),
        (6, ["--optim.kind", "muon", "--parallel.zero", "1", "--parallel.shard", "3", "--model.layers", "3"]),
        (8, ["--optim.kind", "muon", "--parallel.zero", "2", "--parallel.expert", "2", "--model.moe.experts", "4",
             "--model.moe.expert_size", "16", "--train.micro_batch_samples", "1"]),
        (4, ["--optim.kind", "adamw_8bit", "--parallel.zero", "1"]),
        (4, ["--optim.kind", "adamw", "--parallel.zero", "2", "--parallel.tensor", "2", "--finetune.lora.rank", "4"]),
        (2, ["--optim.kind", "adamw", "--parallel.zero", "3", "--finetune.lora.rank", "4"]),
    ],
    ids=["64 ranks on all axes", "copied kv heads", "experts", "zero 3", "bf16", "muon", "muon, experts",
         "8 bits", "LoRA", "LoRA, zero 3"],
)  # fmt: skip
def test_a_simulated_rank_sends_the_bytes_of_the_formulas_and_holds_their_states(processes, words):
    found = simulate_ranks(load_config("quickstart", [*TINY, *words]), processes)
    assert found.given
    for key, (counted, expected) in found.given.items():
        assert counted == pytest.approx(expected, rel=1e-12), key
    if "3" not in words:  # FSDP keeps what it gathered last
        assert found.state_bytes == pytest.approx(found.expected_state_bytes, rel=0.02)


@pytest.mark.parametrize("words", [["--parallel.tensor", "2"], ["--parallel.zero", "3"]])
def test_the_plan_has_the_momenta_that_muon_exchanges_where_matrices_are_cut(words):
    config = load_config("quickstart", [*TINY, "--optim.kind", "muon", *words])
    moved = [one for one in make_plan(config, 2).transfers if one.what == "momentum"]
    assert [(one.collective, one.ranks) for one in moved] == [("all-to-all", 2)]
