"""Loading a run: the right checkpoint, the right words when there is none, and the report of an evaluation."""

import json
import shutil

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace
from zero2all.evals.options import EvalOptions
from zero2all.evals.report import evaluate_run, report_lines
from zero2all.infer.load import load_model, load_run, untrained
from zero2all.track.reader import RunReader


@pytest.fixture
def copied(trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


def test_newest_checkpoint_is_taken_and_an_older_one_on_request(trained, trained_workspace):
    assert (trained.name, trained.step) == ("tiny", 30)
    older = load_run(trained_workspace, "tiny", 15)
    assert older.step == 15
    assert not torch.equal(older.model.embedding.weight, trained.model.embedding.weight)


def test_loaded_model_is_ready_to_be_asked(trained):
    assert not trained.model.training
    assert trained.stored_dtype == "float32"
    assert trained.device.type == "cpu"
    assert trained.config.model.vocab_rows == 448  # 420 ids, padded to a multiple of 64


def test_untrained_model_is_the_one_training_starts_from(trained_workspace, tiny_config):
    first, second = (untrained(trained_workspace, tiny_config) for _ in range(2))
    assert torch.equal(first.model.embedding.weight, second.model.embedding.weight)
    assert (first.step, first.config.model.vocab_rows) == (0, 448)


def test_unknown_run_is_answered_with_those_there_are(trained_workspace):
    with pytest.raises(BadInputError, match=r"no run.*tiny"):
        load_run(trained_workspace, "tony")


def test_another_tokenizer_than_the_run_was_trained_with_is_refused(copied, tmp_path):
    from zero2all.tokenizer import train_tokenizer

    texts = [f"{number} thousand words {number * 7919}" for number in range(3000)]
    train_tokenizer([*texts, *(chr(0x4E00 + n) * 2 for n in range(900))], 600, copied.tokenizer, "larger")
    for load in (lambda: load_run(copied, "tiny"), lambda: load_model("tiny", copied)):
        with pytest.raises(BadInputError, match=r"trained with another tokenizer"):
            load()


def test_evaluation_is_written_beside_the_run_and_shown(copied, tmp_path):
    probes = tmp_path / "probes.jsonl"
    pairs = tmp_path / "pairs.yaml"
    pairs.write_text("- {kind: capital, language: zh, pairs: ['中国的首都是{北京|巴黎}。']}")
    row = {
        "id": "1",
        "channel": "zh",
        "family": "capital",
        "prompt": "中国的首都是",
        "answer": "北京",
        "foils": ["巴黎"],
    }
    probes.write_text(json.dumps(row) + "\n" + json.dumps({**row, "id": "2", "family": "arithmetic"}) + "\n")
    report = evaluate_run(load_run(copied, "tiny"), copied, EvalOptions(max_bytes=1000, probes=probes, pairs=pairs))
    written = json.loads((copied.run("tiny") / "eval/step-00000030.json").read_text())
    assert written == report
    assert set(written["held_out"]) == {"zh", "en"}
    assert [item["probe"]["answer"] for item in written["probe_results"]] == ["北京", "北京"]
    shown = "\n".join(report_lines(report))
    assert report["pairs"]["channels"]["zh"]["kinds"]["capital"]["pairs"] == 1
    for words in ("tiny at step 30", "pairs (chance", "bits/byte", "zh", "capital", "arithmetic"):
        assert words in shown


def test_evaluations_of_several_checkpoints_are_curves_over_their_steps(copied, tmp_path):
    probes = tmp_path / "probes.jsonl"
    row = {"id": "1", "channel": "zh", "family": "capital", "prompt": "中国的首都是", "answer": "北京"}
    probes.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    reports = {
        step: evaluate_run(load_run(copied, "tiny", step), copied, EvalOptions(max_bytes=200, probes=probes))
        for step in (30, 15)
    }
    run = RunReader(copied.run("tiny"))
    for metric, figure in {
        "eval/documents/bpb/en": lambda report: report["documents"]["en"]["bits_per_byte"],
        "eval/probes/probability/zh": lambda report: report["probes"]["channels"]["zh"]["probability"],
        "eval/probes/zh/accuracy/capital": lambda report: report["probes"]["channels"]["zh"]["groups"]["capital"][
            "accuracy"
        ],
    }.items():
        points = run.series(metric)
        assert points.step.tolist() == [15, 30], metric
        assert points.value.tolist() == [figure(reports[15]), figure(reports[30])]
        assert points.tokens.tolist() == [reports[15]["tokens"], reports[30]["tokens"]]
        assert points.tokens[1] == 2 * points.tokens[0] > 0
    assert run.series("loss").step[-1] == 30, "the training curve is as it was"
    assert run.status.attempt == 1


def test_evaluation_without_probes_has_none(copied):
    report = evaluate_run(load_run(copied, "tiny"), copied, EvalOptions(max_bytes=100))
    assert "probes" not in report
    assert not any("probes" in line for line in report_lines(report))
