"""The weights of a run or of a Hugging Face folder, in the dtype asked for, or words that say why not."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.infer.tiny import random_model
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.common.workspace import Workspace
from zero2all.evals.options import EvalOptions
from zero2all.evals.report import evaluate_run, report_lines
from zero2all.exchange import export_run, import_folder
from zero2all.infer import load
from zero2all.infer.load import LoadedModel, load_model, load_run, untrained
from zero2all.model.config import MoeConfig
from zero2all.tokenizer import train_tokenizer
from zero2all.track.reader import RunReader


@pytest.fixture(scope="module")
def exported(trained, trained_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "tiny-hf"
    export_run(trained, trained_workspace.tokenizer, folder)
    return folder


@pytest.fixture
def copied(trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


@pytest.fixture
def hf_copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "theirs")


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def same_weights(one, other):
    ours, theirs = one.weights(), other.weights()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("source", ["name", "folder", "hugging face"])
def test_every_source_gives_the_weights_that_were_trained(trained, trained_workspace, exported, source):
    run = trained_workspace.run("tiny")
    given = {"name": ("tiny", trained_workspace), "folder": (str(run),), "hugging face": (str(exported),)}[source]
    loaded = load_model(*given)
    assert same_weights(loaded, trained)
    assert torch.equal(loaded.model.cos, trained.model.cos)
    assert loaded.tokenizer.fingerprint == trained.tokenizer.fingerprint
    # The window is what it was trained with, or made for.
    of_run, of_folder = ("tiny", 30, run.resolve(), trained.config, 64), ("tiny-hf", 0, exported, None, 128)
    found = (loaded.name, loaded.step, loaded.folder, loaded.config, loaded.window)
    assert found == (of_folder if source == "hugging face" else of_run)
    rounded, wide = load_model(*given, dtype="bfloat16"), trained.weights()
    assert all(torch.equal(tensor, wide[name].bfloat16()) for name, tensor in rounded.weights().items())
    assert rounded.model.cos.dtype == torch.float32, "positions are not rounded"
    assert not any(parameter.requires_grad for parameter in rounded.model.parameters())
    assert not loaded.model.training


def test_experts_and_their_balancing_biases_come_back_from_a_hugging_face_folder(trained, trained_workspace, tmp_path):
    moe = MoeConfig(experts=4, experts_per_token=2, expert_size=16, shared_experts=1, dense_layers=1)
    model = random_model(dataclasses.replace(trained.model.config, hidden_size=32, moe=moe))
    model.blocks[1].feed_forward.router.bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.01]))
    made = LoadedModel("experts", 0, model, trained.tokenizer)
    export_run(made, trained_workspace.tokenizer, tmp_path / "hf", "bfloat16")
    found = load_model(str(tmp_path / "hf"), dtype="bfloat16")
    for name, tensor in made.weights().items():
        expected = tensor if name.endswith("router.bias") else tensor.bfloat16()
        assert torch.equal(found.weights()[name], expected), name  # biases stay float32


def test_loading_imports_neither_the_trainer_nor_torchs_compiler(trained_workspace):
    """Each takes seconds, and a person waits for the first token."""
    code = """
        import sys, torch
        before = set(sys.modules)
        from pathlib import Path
        from zero2all.common.workspace import Workspace
        from zero2all.infer.engine import Engine
        from zero2all.infer.load import load_model
        Engine(load_model("tiny", Workspace(Path(sys.argv[1]))))
        heavy = {"torch._dynamo", "torch.distributed.fsdp", "sympy", "triton", "zero2all.train.setup"}
        print(sorted(heavy & (set(sys.modules) - before)))
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(trained_workspace.root)]
    assert subprocess.check_output(words, stderr=subprocess.STDOUT, text=True) == "[]\n"


def test_damaged_weights_are_left_out_for_those_before_them_unless_that_step_was_asked_for(copied, trained, capsys):
    checkpoints = copied.run("tiny") / "checkpoints"
    damage(checkpoints / "step-00000030/optimizer-00000-00000.safetensors")
    assert same_weights(load_model("tiny", copied), trained), "the optimizer is not read"
    older = load_run(copied, "tiny", 15)
    assert older.step == 15
    assert not same_weights(older, trained)
    damage(checkpoints / "step-00000030/model-00000-00000.safetensors")
    assert load_model("tiny", copied).step == 15
    assert "Skipped a damaged checkpoint" in capsys.readouterr().out
    with pytest.raises(BadInputError, match=r"model-00000-00000.safetensors has changed since it was written"):
        load_model("tiny", copied, step=30)
    with pytest.raises(BadInputError, match=r"no checkpoint at step 7; it has \[15, 30\]"):
        load_model("tiny", copied, step=7)
    shutil.rmtree(checkpoints)
    with pytest.raises(BadInputError, match=r"No checkpoint of .* is intact"):
        load_model("tiny", copied)


def test_a_checkpoint_of_another_model_is_not_taken_for_a_damaged_one(copied):
    config = copied.run("tiny") / "config.yaml"
    config.write_text(config.read_text().replace("layers: 2", "layers: 3"))
    with pytest.raises(BadInputError, match=r"step-00000030 is of another model: model/blocks.2"):
        load_model("tiny", copied)


def test_what_is_neither_a_run_nor_a_folder_is_answered_with_the_runs_there_are(trained_workspace, tmp_path):
    elsewhere = Workspace(tmp_path)
    for name, workspace, said in (
        ("tony", trained_workspace, r"has no run `tony`.*tiny"),
        (str(tmp_path / "nowhere"), trained_workspace, r"There is no folder .*/nowhere"),
        (str(tmp_path), trained_workspace, "neither the folder of a run"),
        (str(trained_workspace.root), elsewhere, r"is a workspace\. Name a run in it.*--work"),
        ("tiny", elsewhere, r"There is no folder .*/tiny\..* its workspace with --work"),
    ):
        with pytest.raises(BadInputError, match=said):
            load_model(name, workspace)


def test_a_folder_that_vanishes_while_it_is_read_is_said(hf_copy, monkeypatch):
    def vanish(folder):
        shutil.rmtree(folder)
        return read_json(folder / "config.json")

    monkeypatch.setattr(load, "open_hf_folder", vanish)
    with pytest.raises(BadInputError, match=r"config.json disappeared while .* was being read"):
        load_model(str(hf_copy))


def test_a_folder_whose_model_has_fewer_rows_than_its_tokenizer_has_ids_is_refused(hf_copy):
    tensors = load_file(hf_copy / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:400].clone()
    save_file(tensors, hf_copy / "model.safetensors")
    write_json(hf_copy / "config.json", read_json(hf_copy / "config.json") | {"vocab_size": 400})
    with pytest.raises(BadInputError, match="has 420 ids, its model only 400 rows"):
        load_model(str(hf_copy))


def test_weights_of_a_run_that_are_not_finite_in_the_dtype_asked_for_are_refused(hf_copy, tmp_path):
    tensors = load_file(hf_copy / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, hf_copy / "model.safetensors")
    workspace = Workspace(tmp_path / "work")
    import_folder(hf_copy, workspace, "large")
    assert same_weights(load_model("large", workspace), load_model(str(hf_copy)))
    with pytest.raises(BadInputError, match=r"1 weights of the run large at step 0 are NaN or infinite in float16"):
        load_model("large", workspace, dtype="float16")


def test_flags_that_cannot_be_met_are_refused_in_words(exported, trained_workspace):
    with pytest.raises(UsageError, match=r"cannot be run in 'int4'. Expected: float32, bfloat16, float16"):
        load_model("tiny", trained_workspace, dtype="int4")
    with pytest.raises(UsageError, match="has no step 3"):
        load_model(str(exported), step=3)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device is cuda, but torch sees no CUDA device"):
            load_model(str(exported), device="cuda")


def test_untrained_model_is_the_one_training_starts_from(trained_workspace, tiny_config):
    first, second = (untrained(trained_workspace, tiny_config) for _ in range(2))
    assert same_weights(first, second)
    assert (first.step, first.config.model.vocab_rows) == (0, 448)  # 420 ids, padded to a multiple of 64


def test_evaluation_is_written_beside_the_run_and_in_its_metrics(copied, tmp_path):
    probes, pairs, loaded = tmp_path / "probes.jsonl", tmp_path / "pairs.yaml", load_run(copied, "tiny")
    pairs.write_text("- {kind: capital, language: zh, pairs: ['中国的首都是{北京|巴黎}。']}")
    row = {"channel": "zh", "family": "capital", "prompt": "中国的首都是", "answer": "北京", "foils": ["巴黎"]}
    probes.write_text("".join(json.dumps({**row, "id": each}) + "\n" for each in "12"))
    assert "probes" not in evaluate_run(loaded, copied, EvalOptions(max_bytes=100))
    report = evaluate_run(loaded, copied, EvalOptions(max_bytes=1000, probes=probes, pairs=pairs))
    assert read_json(copied.run("tiny") / "eval/step-00000030.json") == report
    assert set(report["held_out"]) == {"zh", "en"}
    assert [item["probe"]["answer"] for item in report["probe_results"]] == ["北京", "北京"]
    assert report["pairs"]["channels"]["zh"]["kinds"]["capital"]["pairs"] == 1
    shown = "\n".join(report_lines(report))
    assert [each for each in ("tiny at step 30", "pairs (chance", "bits/byte", "capital") if each not in shown] == []
    run = RunReader(copied.run("tiny"))
    accuracy = report["probes"]["channels"]["zh"]["groups"]["capital"]["accuracy"]
    points = run.series("eval/probes/zh/accuracy/capital")
    assert (points.value[-1], points.tokens[-1]) == (accuracy, loaded.tokens)
    assert loaded.tokens > 0
    assert run.series("loss").step[-1] == 30, "the training curve is as it was"
    assert run.status.attempt == 1


def test_another_tokenizer_than_the_run_was_trained_with_is_refused(copied):
    texts = [f"{number} words {number * 7919} {chr(0x4E00 + number) * 2}" for number in range(900)] * 2
    train_tokenizer(texts, 600, copied.tokenizer, "larger", kind="hf-bbpe")
    for loading in (lambda: load_run(copied, "tiny"), lambda: load_model("tiny", copied)):
        with pytest.raises(BadInputError, match=r"trained with another tokenizer"):
            loading()
