"""What an evaluation misses is said before the model is loaded; all checkpoints of a run, each once."""

import shutil

import pytest

from tests.corpus.corpus_helpers import HERE
from zero2all.cli import main
from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.evals.options import EvalOptions, check_inputs, kept_report
from zero2all.track.reader import RunReader


@pytest.fixture
def copied(trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


def test_all_that_is_missing_is_listed_at_once_before_the_model_is_looked_at(copied, capsys):
    for weights in copied.runs.rglob("*.safetensors"):
        weights.write_bytes(b"loading this would be another error")
    shutil.rmtree(copied.corpus)
    shutil.rmtree(copied.tokenizer)
    words = ["eval", "tiny", "--step", "7", "--work", str(copied.root), "--probes", str(copied.root / "none.jsonl")]
    assert main(words) == 3
    said = capsys.readouterr().err
    assert "Problems found: 4." in said
    for part in ("no checkpoint at step 7; it has [15, 30]", "finished tokenizer", "finished corpus", "none.jsonl"):
        assert part in said


def test_a_corpus_without_held_out_text_is_answered_unless_there_are_probes(copied, tmp_path):
    (tmp_path / "a.txt").write_text("One text alone is too little for a part to be held out of it.")
    build_corpus(copied.corpus, [Source("a", tmp_path / "a.txt", "en")], BuildOptions(), HERE)
    with pytest.raises(BadInputError, match=r"has no held-out text"):
        check_inputs(copied, "tiny", None, EvalOptions())
    probes = tmp_path / "probes.jsonl"
    probes.write_text('{"id": "1", "channel": "en", "family": "f", "prompt": "p", "answer": "a"}\n')
    check_inputs(copied, "tiny", None, EvalOptions(probes=probes))


def steps_of(printed):
    """The first column of the table, which comes first and ends with an empty line."""
    title, *rows = printed.split("\n\n")[0].splitlines()
    assert title.split()[0] == "step"
    return [row.split()[0] for row in rows]


def test_all_steps_are_evaluated_once_and_again_only_with_other_settings(copied, tmp_path, capfd):
    pairs, text = tmp_path / "pairs.yaml", tmp_path / "mine.txt"
    pairs.write_text("- {kind: capital, language: zh, pairs: ['中国的首都是{北京|巴黎}。']}", encoding="utf-8")
    text.write_text("The capital of France is Paris.")
    asked = ["--max-bytes", "200", "--probes", "none", "--pairs", str(pairs), "--text", str(text), "--stride", "32"]
    asked += ["--weights", "int4"]
    words = ["eval", "tiny", "--all-steps", "--work", str(copied.root), *asked]
    assert main(words) == 0
    assert steps_of(capfd.readouterr().out) == ["15", "30"]
    options = EvalOptions(max_bytes=200, stride=32, pairs=pairs, texts=(text,), weights=("int4",))
    report = kept_report(copied.run("tiny"), 15, options)
    assert report["texts"]["mine.txt"]["bytes"] == 31
    documents = report["documents"]["en"]
    assert 0 < abs(documents["int4_bits_per_byte"] - documents["bits_per_byte"]) < 0.1
    assert 4 < report["bits_per_weight"]["int4"] < 9
    for metric in ("eval/pairs/accuracy/zh", "eval/texts/bpb/mine.txt", "eval/by_position/en/loss/0001"):
        assert RunReader(copied.run("tiny")).series(metric).step.tolist() == [15, 30], metric

    shutil.rmtree(copied.run("tiny") / "checkpoints" / "step-00000015")
    assert main(words) == 0
    said = capfd.readouterr()
    assert "evaluated in" not in said.out + said.err
    assert steps_of(said.out) == ["30"]
    text.write_text("Another text.")
    assert kept_report(copied.run("tiny"), 30, options) is None


def test_a_damaged_checkpoint_is_said_and_the_others_are_evaluated(copied, capfd):
    for weights in (copied.run("tiny") / "checkpoints" / "step-00000015").glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    words = ["--max-bytes", "200", "--probes", "none", "--pairs", "none", "--work", str(copied.root)]
    assert main(["eval", "tiny", "--all-steps", *words]) == 0
    said = capfd.readouterr()
    assert "step 15 is left out" in said.out + said.err
    assert steps_of(said.out) == ["30"]
