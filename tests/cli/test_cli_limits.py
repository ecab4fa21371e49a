"""The calculators at the command line: a config, a known model or plain numbers; JSON; every problem at once."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.pages import ROOT
from zero2all.cli.perf import RENAMED
from zero2all.cli.perf_calculators import EXAMPLES, VERBS
from zero2all.config import load_config


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
    alone = json.loads(z2a("perf", "model", "--params", "7.5B", "--gpus", "64", "--json", "-").out)
    assert list(alone) == ["parameters", "flops", "states", "generating"]
    assert alone["states"]["terms"]["zero 1"] == {
        "value": 31.40625e9,
        "unit": "bytes",
        "formula": "(2 + 2) P + 12 P / n",
    }
    assert "31.41 GB" in z2a("perf", "model", "--params", "7.5e9", "--gpus", "64", "--json", tmp_path / "zero.json").out
    assert json.loads((tmp_path / "zero.json").read_text()) == alone
    ended = z2a("perf", "model", "gpt-3", "--json", tmp_path / "no" / "x.json")
    assert (ended.code, list(tmp_path.iterdir())) == (2, [tmp_path / "zero.json"])


def total(z2a, *words):
    return json.loads(z2a("perf", "model", *words, "--json", "-").out)["parameters"]["terms"]["total"]["value"]


def test_a_model_is_a_preset_a_published_one_or_its_dimensions(z2a):
    llama = ["--hidden-size", "4096", "--layers", "32", "--heads", "32", "--intermediate-size", "11008"]
    assert total(z2a, "llama-2-7b") == total(z2a, *llama, "--vocab-size", "32000") == 6_738_415_616
    assert total(z2a, *llama, "--vocab-size", "32000", "--tied") == 6_738_415_616 - 32000 * 4096
    assert total(z2a, "z2all-1b") - total(z2a, "z2all-1b", "--model.layers", "21") == 45_092_864
    gpt = ["--gpt", "--hidden-size", "12288", "--layers", "96", "--vocab-size", "51200", "--seq-len", "2048"]
    assert total(z2a, *gpt) == total(z2a, "gpt-3") == 174_615_822_336
    moe = ["--experts", "256", "--experts-per-token", "8", "--expert-size", "2048", "--shared-experts", "1"]
    deepseek = ["--hidden-size", "7168", "--layers", "61", "--heads", "128", "--intermediate-size", "18432", *moe]
    deepseek += ["--dense-layers", "3", "--latent", "1536,512,128,64,128", "--vocab-size", "129280"]
    assert total(z2a, *deepseek) == total(z2a, "deepseek-v3") == 671_026_279_424


def test_a_config_says_how_many_tokens_its_run_has(z2a):
    spent = json.loads(z2a("perf", "cost", "z2all-1b", "--tokens-per-second", "73185", "--json", "-").out)["terms"]
    config = load_config("z2all-1b")
    assert spent["tokens"]["value"] == config.train.steps * config.train.tokens_per_step
    assert spent["time"]["value"] == pytest.approx(spent["tokens"]["value"] / 73185)


def test_all_problems_are_named_at_once_each_with_its_rule(z2a):
    ended = z2a("perf", "mfu", "--params", "-7B", "--layers", "0", "--gpu", "h2000", "--tokens-per-second", "-3")
    assert ended.code == 2
    assert "problems: 4" in ended.err
    for words in ("--params: got '-7B'", "--layers: got '0'", "--gpu: got 'h2000'", "--tokens-per-second: got '-3'"):
        assert words in ended.err
    assert "a100" in ended.err
    assert "--peak-tflops" in ended.err


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "h1000", "NVIDIA GeForce RTX 4091", "H100 "])
def test_an_unknown_gpu_gets_no_guess(name, z2a):
    ended = z2a("perf", "mfu", "tinyllama", "--tokens-per-second", "24000", "--gpu", name)
    assert ended.code == 2
    assert "the exact name of a known one" in ended.err
    assert "MFU" not in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model"], "MODEL: got nothing"),
        (["model", "llama-9"], "llama-3.1-8b"),
        (["model", "gpt-3", "--layers", "3"], "no --layers beside it"),
        (["model", "z2all-1b", "--model.layers", "0"], "model.layers: got 0"),
        (["model", "gpt-3", "--model.layers", "3"], "a model that our trainer has"),
        (["model", "lama-3.1-8b"], "Did you mean `llama-3.1-8b`?"),
        (["model", "--hidden-size", "64"], "--layers, --heads, --vocab-size, --intermediate-size"),
        (["model", "gpt-3", "--lengths", "1e300,1e300"], "--lengths: got '1e300,1e300'"),
        (["model", "--params", "1B", "--active", "7B"], "at most the parameters (1,000,000,000)"),
        (["model", "--params", "1e6", "--hidden-size", "4096", "--vocab-size", "128256"], "--vocab-size: got 128256"),
        (["cost", "gpt-3", "--tokens", "1B", "--mfu", "140%", "--price", "2"], "--mfu: got '140%'"),
        (["cost", "gpt-3", "--goodput", "nan"], "--goodput: got 'nan'"),
        (["failures", "--time", "8d", "--mtbf", "3 hours"], "--mtbf: got '3 hours'"),
        (["failures", "--mtbf", "3h"], "--time: got nothing"),
        (["model", "--params", "7B", "--gpus", "8", "--recipe", "adam"], "adamw-fp32"),
        (["mfu", "gpt-3", "--step-seconds", "0"], "--step-seconds: got '0'"),
        (["shapes", "--matmul", "8,9"], "--matmul 8,9: expected three sizes"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(words, said, z2a):
    ended = z2a("perf", *words)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def terms(z2a, *words):
    return json.loads(z2a("perf", *words, "--json", "-").out)["terms"]


def test_a_checkpoint_has_the_bytes_that_the_trainer_writes(z2a):
    for words, each in (
        (["--params", "1B"], 12),
        (["llama-3.1-8b"], 12),
        (["z2all-1b"], 12),
        (["z2all-1b", "--train.precision", "float32"], 12),
        (["z2all-1b", "--optim.kind", "adamw_bf16"], 6),
        (["z2all-1b", "--train.precision", "float64"], 24),
    ):
        parameters = 10**9 if words[0] == "--params" else total(z2a, words[0])
        told = json.loads(z2a("perf", "model", *words, "--json", "-").out)
        found = told["states"]["terms"]["checkpoint"]
        assert found["value"] == each * parameters
        assert found["formula"].startswith(f"{each} P: ")


def test_hardware_utilisation_is_said_also_where_only_the_parameters_are_known(z2a):
    speed = ["--tokens-per-second", "3000", "--gpu", "a100", "--recompute"]
    found = terms(z2a, "mfu", "--params", "7B", *speed, "full")
    assert found["HFU full, 6N"]["value"] == pytest.approx(8 / 6 * found["MFU 6N"]["value"])
    ended = z2a("perf", "mfu", "--params", "7B", *speed, "selective")
    assert "No HFU" in ended.out
    shape = ["--layers", "32", "--hidden-size", "4096", "--vocab-size", "32000", "--seq-len", "4096"]
    known = terms(z2a, "mfu", "llama-2-7b", *speed, "full")["HFU full, causal"]["value"]
    found = terms(z2a, "mfu", "--params", "6738415616", *shape, *speed, "full")["HFU full, causal"]["value"]
    assert found == pytest.approx(known, rel=1e-4)  # norms are not told from matrices


PREDICTED = ["perf", "predict", "--cluster", "h200", "--batch", "1x2048x1"]


def test_the_precision_of_a_prediction_is_said_and_float32_on_a_gpu_is_questioned(z2a, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "model: {vocab_size: 256, hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, kv_heads: 2}\n"
    )
    ended = z2a(*PREDICTED, file)
    assert "float32" in ended.out.split("peak arithmetic")[0]
    assert "--train.precision bfloat16" in ended.out
    for words in (["--train.precision", "bfloat16"], ["--train.precision", "float32"]):  # said by the user: meant
        assert "is not set" not in z2a(*PREDICTED, file, *words).out
    assert json.loads(z2a(*PREDICTED, file, "--json", "-").out)["precision"] == "float32"
    assert "--train.precision bfloat16" in z2a("perf", "memory", file, "--gpu", "h200").out


def test_every_verb_that_takes_a_model_knows_the_same_names(z2a, tmp_path):
    run = tmp_path / "work/runs/mine"
    (run / "metrics").mkdir(parents=True)
    tiny = "model: {vocab_size: 256, hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, kv_heads: 2}\n"
    (run / "config.yaml").write_text(tiny)
    verbs = (
        ["perf", "model"],
        PREDICTED,
        ["perf", "memory", "--gpu", "h200", "--ranks", "8", "--parallel.zero", "3"],
        ["perf", "plan", "--gpus", "8", "--cluster", "h200", "--top", "1"],
        ["perf", "shapes", "--check"],
    )
    for verb in verbs:
        for model in ("llama-3.1-8b", run):
            ended = z2a(*verb, model)
            assert ended.code == 0, (verb, model, ended.err)
        ended = z2a(*verb, "llama-3.1-8")
        assert "Did you mean `llama-3.1-8b`?" in ended.err, (verb, ended.err)
        assert ended.code == 2
        if verb[1] != "model":
            assert "deepseek-v3 has" in z2a(*verb, "deepseek-v3").err
    assert "bfloat16" in z2a(*PREDICTED, "llama-3.1-8b").out


def test_a_calculator_needs_neither_torch_nor_numpy():
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from zero2all.cli import main
sys.exit(main(["perf", "model", "z2all-1b", "--gpu", "h200"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
