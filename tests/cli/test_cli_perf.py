"""`z2a perf …`: a config, a known model or plain numbers; JSON; every problem at once."""

import json
import shlex

import pytest

from tests.measure.made_run import MadeRun
from tests.pages import ROOT
from zero2all.cli.perf import RENAMED
from zero2all.cli.perf_calculators import EXAMPLES, VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_every_calculator_prints_a_table_with_its_convention(verb, z2a):
    for example in EXAMPLES[verb]:
        ended = z2a(*shlex.split(example)[1:])
        assert (ended.code, ended.err) == (0, "")
        assert "what" in ended.out
        assert len(ended.out.rstrip().splitlines()[-1]) > 40, "the convention or a note"


@pytest.mark.parametrize(("verb", "command"), RENAMED.items())
def test_a_verb_of_before_is_answered_with_the_one_of_now(verb, command, z2a):
    ended = z2a("perf", verb, "z2all-1b")
    assert (ended.code, ended.out) == (2, "")
    assert f"`z2a perf {verb}` is now `{command}`." in ended.err
    program, *words = command.split()
    if program == "z2a":
        assert z2a(*words[: 2 if words[0] in ("perf", "tokenizer") else 1], "--help").code == 0
    else:
        assert (ROOT / words[0]).is_file()


def test_json_goes_to_a_file_beside_the_table_or_to_standard_output_alone(z2a, tmp_path):
    words = ("perf", "model", "--params", "7.5e9", "--gpus", "64", "--json")
    alone = json.loads(z2a.done(*words, "-"))
    assert list(alone) == ["parameters", "flops", "states", "generating"]
    zero_1 = {"value": 31.40625e9, "unit": "bytes", "formula": "(2 + 2) P + 12 P / n"}
    assert alone["states"]["terms"]["zero 1"] == zero_1
    assert "31.41 GB" in z2a.done(*words, tmp_path / "zero.json")
    assert json.loads((tmp_path / "zero.json").read_text()) == alone
    z2a.refused(2, "perf", "model", "gpt-3", "--json", tmp_path / "no" / "x.json")
    assert list(tmp_path.iterdir()) == [tmp_path / "zero.json"]


def total(z2a, *words):
    return json.loads(z2a("perf", "model", *words, "--json", "-").out)["parameters"]["terms"]["total"]["value"]


def test_a_model_is_a_preset_a_published_one_or_one_of_these_with_other_fields(z2a):
    assert total(z2a, "llama-2-7b") == 6_738_415_616
    assert total(z2a, "llama-2-7b", "--model.tied_embeddings", "true") == 6_738_415_616 - 32000 * 4096
    assert total(z2a, "z2all-1b") - total(z2a, "z2all-1b", "--model.layers", "21") == 45_092_992
    assert total(z2a, "deepseek-v3") == 671_026_279_424
    assert "Did you mean `--model.heads`?" in z2a.refused(2, "perf", "model", "llama-2-7b", "--heads", "16")


def test_all_problems_are_named_at_once_each_with_its_rule(z2a):
    words = ["--params", "-7B", "--layers", "0", "--gpu", "h2000", "--tokens-per-second", "-3"]
    said = z2a.refused(2, "perf", "mfu", *words)
    problems = ("problems: 4", "--params: got '-7B'", "--layers: got '0'", "--gpu: got 'h2000'", "a100")
    for expected in (*problems, "--tokens-per-second: got '-3'", "--peak-tflops"):
        assert expected in said


def test_what_is_missing_or_does_not_fit_is_said(z2a):
    for words, said in (
        (["model"], "MODEL: got nothing"),
        (["model", "llama-9"], "llama-3.1-8b"),
        (["model", "gpt-3", "--layers", "3"], "no --layers beside it"),
        (["model", "gpt-3", "--model.layers", "3"], "a model that our trainer has"),
        (["model", "--hidden-size", "64"], "a model, or the number of its parameters: --params"),
        (["model", "--params", "1B", "--active", "7B"], "at most the parameters (1,000,000,000)"),
        (["model", "--params", "1e6", "--hidden-size", "4096", "--vocab-size", "128256"], "--vocab-size: got 128256"),
        (["mfu", "tinyllama", "--tokens-per-second", "24000", "--gpu", "NVIDIA H200 NVL"], "exact name of a known one"),
        (["cost", "gpt-3", "--tokens", "1B", "--mfu", "140%", "--price", "2"], "--mfu: got '140%'"),
        (["cost", "gpt-3", "--goodput", "nan"], "--goodput: got 'nan'"),
        (["memory", "z2all-1b", "--gpu", "gtx-9000"], "`z2a perf memory --memory-gib N` computes for any other"),
        (["memory", "z2all-1b", "--gpu", "h200", "--memory-gib", "80"], "Give one of them"),
        (["memory", "z2all-1b", "--gpu", "h200", "--ranks", "3", "--parallel.tensor", "2"], "parallel"),
        (["failures", "--mtbf", "3h"], "--time: got nothing"),
        (["model", "--params", "7B", "--gpus", "8", "--recipe", "adam"], "adamw-fp32"),
        (["shapes", "--matmul", "8,9"], "--matmul 8,9: expected three sizes"),
    ):
        ended = z2a("perf", *words)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err


def terms(z2a, *words):
    return json.loads(z2a("perf", *words, "--json", "-").out)["terms"]


def test_hardware_utilisation_is_said_also_where_only_the_parameters_are_known(z2a):
    speed = ["--tokens-per-second", "3000", "--gpu", "a100", "--recompute"]
    found = terms(z2a, "mfu", "--params", "7B", *speed, "full")
    assert found["HFU full, 6N"]["value"] == pytest.approx(8 / 6 * found["MFU 6N"]["value"])
    assert "No HFU" in z2a("perf", "mfu", "--params", "7B", *speed, "selective").out
    shape = ["--layers", "32", "--hidden-size", "4096", "--vocab-size", "32000", "--seq-len", "4096"]
    known = terms(z2a, "mfu", "llama-2-7b", *speed, "full")["HFU full, causal"]["value"]
    found = terms(z2a, "mfu", "--params", "6738415616", *shape, *speed, "full")["HFU full, causal"]["value"]
    assert found == pytest.approx(known, rel=1e-4)  # norms are not told from matrices


TINY = "model: {vocab_size: 256, hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, kv_heads: 2}\n"
PREDICTED = ["perf", "predict", "--cluster", "h200", "--batch", "1x2048x1"]


def test_the_precision_of_a_prediction_is_said_and_float32_on_a_gpu_is_questioned(z2a, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(TINY)
    out = z2a.done(*PREDICTED, file, "--json", tmp_path / "found.json")
    assert "float32" in out.split("peak arithmetic")[0]
    assert "--train.precision bfloat16" in out
    assert json.loads((tmp_path / "found.json").read_text())["precision"] == "float32"
    for precision in ("bfloat16", "float32"):  # said by the user: meant
        assert "is not set" not in z2a.done(*PREDICTED, file, "--train.precision", precision)
    assert "--train.precision bfloat16" in z2a.done("perf", "memory", file, "--gpu", "h200")


def test_every_verb_that_takes_a_model_knows_the_same_names(z2a, tmp_path):
    run = tmp_path / "work/runs/mine"
    (run / "metrics").mkdir(parents=True)
    (run / "config.yaml").write_text(TINY)
    of_memory = ["perf", "memory", "--gpu", "h200", "--ranks", "8", "--parallel.zero", "3"]
    of_plan = ["perf", "plan", "--gpus", "8", "--cluster", "h200", "--top", "1"]
    for verb in (["perf", "model"], PREDICTED, of_memory, of_plan, ["perf", "shapes", "--check"]):
        z2a.done(*verb, run)
        if verb[1] != "plan":  # which searches for seconds
            assert "bfloat16" in z2a.done(*verb, "llama-3.1-8b") or verb != PREDICTED
        assert "Did you mean `llama-3.1-8b`?" in z2a.refused(2, *verb, "llama-3.1-8")
        if verb[1] != "model":
            assert "deepseek-v3 has" in z2a(*verb, "deepseek-v3").err


def test_memory_says_whether_it_fits_or_which_changes_help_and_json_has_the_same_figures(z2a, tmp_path):
    words = ["perf", "memory", "z2all-1b", "--model.vocab_size", "64320", "--train.micro_batch_samples", "16"]
    said = z2a.done(*words, "--gpu", "h200")
    for expected in ("optimizer step", "checkpoint", "peak allocated", "55.92", "It fits"):
        assert expected in said
    assert "what would need less memory" not in said
    said = z2a.done(*words, "--memory-gib", "40", "--json", tmp_path / "found.json")
    for expected in ("what would need less memory", "--train.recompute full"):
        assert expected in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["fits"]
    assert found["peak_allocated"] == sum(part["bytes"] for part in found["parts"] if part["place"] == "device")
    assert found["peak_allocated"] == max(phase["total"] for phase in found["phases"])
    assert found["peak_allocated"] < found["reserved"] < found["process"]
    assert any(change["fits"] for change in found["changes"])


MOE = """
model:
  {vocab_size: 200, hidden_size: 32, intermediate_size: 64, layers: 2, heads: 4, kv_heads: 2, max_seq_len: 64,
   moe: {experts: 4, experts_per_token: 2, expert_size: 32, dense_layers: 1}}
data: {seq_len: 32}
train: {tokens_per_step: 64, micro_batch_samples: 1}
parallel: {device: cpu, cpu_threads: 1}
"""


def test_the_six_rules_of_shapes_are_taught_and_a_config_is_checked_against_them(z2a):
    out = z2a.done("perf", "shapes")
    assert [words for words in ("vocabulary", "pipeline stages") if words not in out] == []
    assert "--check" in z2a.refused(2, "perf", "shapes", "--model.layers", "3")
    words = ["perf", "shapes", "--check", "z2all-1b", "--gpu", "h100", "--parallel.tensor", "16", "--json", "-"]
    wrong = {(one["rule"], one["what"]) for one in json.loads(z2a.done(*words))["findings"] if not one["is_kept"]}
    assert {(1, "model.vocab_size"), (4, "model.kv_heads"), (5, "parallel.tensor")} <= wrong


def test_a_mixture_of_experts_is_profiled_but_no_batch_longer_than_the_model(z2a, tmp_path):
    path = tmp_path / "moe.yaml"
    path.write_text(MOE, encoding="utf-8")
    words = ["perf", "profile", path, "--steps", "1", "--out", tmp_path / "out", "--batch"]
    assert "max_seq_len" in z2a.refused(2, *words, "1x128x1")
    out = z2a.done(*words, "1x32x1")
    assert [words for words in ("GEMM", "2 passes in a step, 1 were profiled") if words not in out] == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"profile.json", "trace.json.gz"}


def test_explain_prints_findings_and_writes_json(z2a, tmp_path):
    run = MadeRun(tmp_path / "run", evaluate_every=5).write(1, 60).folder
    file = tmp_path / "run.json"
    out = z2a.done("perf", "explain", run, "--json", file)
    for expected in ("The run is limited by", "1. validation", "validate half as often", "MFU"):
        assert expected in out
    assert json.loads(file.read_text())["findings"][0]["what"] == "validation"
    assert "`z2a goodput` is now `z2a perf explain`" in z2a("goodput", run).err
