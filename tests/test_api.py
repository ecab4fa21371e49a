"""The Python API does what the verbs do: same text, same figures, same files."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

import zero2all
from tests.pages import ROOT, Page
from tests.test_docs_run import stand_in
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import LANGUAGE_VARIABLE, translate
from zero2all.common.workspace import open_workspace
from zero2all.evals.perplexity import Windows, score_documents
from zero2all.exchange import export_run
from zero2all.infer.engine import Engine
from zero2all.infer.load import load_run

PROMPT = "The capital of France is"
SAME = 8
"""Tokens of which the small model is sure."""


@pytest.fixture(scope="module")
def model(trained_workspace):
    return zero2all.load("tiny", work=trained_workspace.root)


def test_to_import_the_package_loads_neither_torch_nor_numpy_nor_the_api():
    code = "import sys, zero2all; print({'torch', 'numpy', 'zero2all.api'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        zero2all.lod  # noqa: B018


def test_a_model_is_a_run_by_name_or_folder_or_a_hugging_face_folder(model, trained_workspace, tmp_path):
    export_run(load_run(trained_workspace, "tiny"), trained_workspace.tokenizer, tmp_path / "hf")
    texts = {zero2all.load(place).generate(PROMPT, SAME) for place in (trained_workspace.run("tiny"), tmp_path / "hf")}
    assert texts == {model.generate(PROMPT, SAME)}
    assert repr(model).startswith("<Model tiny: step 30, ")
    assert zero2all.load("tiny", trained_workspace.root, step=15).loaded.step == 15
    with pytest.raises(BadInputError, match="has no run `tony`"):
        zero2all.load("tony", trained_workspace.root)


def test_text_is_that_of_the_command_line_streamed_and_in_a_batch(model, trained_workspace, z2a):
    work = ("--work", trained_workspace.root)
    said = z2a.done("generate", "tiny", *work, "--prompt", PROMPT, "--max-new-tokens", SAME)
    text = model.generate(PROMPT, SAME)
    assert said == f"{PROMPT}{text}\n"
    assert "".join(model.stream(PROMPT, SAME)) == text
    assert model.generate([PROMPT, "中国的首都是"], SAME)[0] == text
    assert model.generate(PROMPT, SAME, stop=[text[2:4]]) == text[:2]
    drawn = model.generate([PROMPT] * 3, SAME, temperature=1.0, seed=5)
    assert len(set(drawn)) > 1
    assert drawn[1] == model.generate(PROMPT, SAME, temperature=1.0, seed=6)
    with pytest.raises(TypeError, match="temprature"):
        model.generate(PROMPT, temprature=1)


def test_a_stream_that_is_closed_leaves_the_engine_free(model):
    assert len(list(itertools.islice(model.stream(PROMPT, 50), 2))) == 2
    assert model.generate(PROMPT, SAME) == "".join(model.stream(PROMPT, SAME))
    assert model._engine.is_idle


def test_a_score_is_that_of_an_evaluation_over_several_windows(model):
    texts = ["The capital of France is Paris. " * 30, "中国的首都是北京。"]
    engine = Engine(model.loaded)
    for stride in (0, 16):
        theirs = score_documents(engine, texts, Windows(model.loaded.window, stride))
        for found, wanted in zip(model.score(texts, whole=True, stride=stride), theirs, strict=True):
            assert found.bits_per_byte == pytest.approx(wanted.summary()["bits_per_byte"], rel=1e-6)
            assert len(found.ids) == len(found.logprobs) == wanted.tokens
    right, wrong = (model.score(f"The capital of France is {city}.").loss for city in ("Paris", "zqxj"))
    assert right < wrong
    assert model.loaded.tokenizer.decode(model.score(texts[1]).ids) == texts[1]
    with pytest.raises(UsageError, match="is empty"):
        model.score("")


def test_chat_answers_a_question_or_messages_in_a_frame(model):
    asked = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Where is Paris?"}]
    plain = model.chat(asked[1:], 6, frame="plain", temperature=0)
    assert plain == model.generate("Where is Paris?", 6)
    assert model.chat("Where is Paris?", 6, frame="plain", temperature=0) == plain
    assert "\n" not in model.chat(asked, 20, frame="frame")
    with pytest.raises(UsageError, match=r'expected \{"role": "user"'):
        model.chat([{"role": "user"}])


def test_training_is_called_beside_the_package_of_its_name_and_its_metrics_are_columns(tiny_trained):
    work, summary = tiny_trained
    assert (summary.run, summary.step) == ("again", 6)
    import zero2all.train.run as room

    assert zero2all.train.run is room  # the package is there, and can be called
    curves = zero2all.metrics("again", work)
    assert list(curves["step"]) == list(range(1, 7))
    assert np.isfinite(curves["loss"]).all()
    assert list(np.isfinite(curves["eval/valid/loss/zh"])) == [False, False, True] * 2
    assert set(map(len, (curves["time"], curves["tokens"], curves["lr"]))) == {len(curves["step"])}
    again = zero2all.train_run("quickstart", work, **FIELDS)  # a finished run has nothing to do
    assert again.step == 6


FIELDS = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1},
    "data": {"seq_len": 32, "mixture": None},
    "train": {"name": "again", "steps": 6, "tokens_per_step": 64, "micro_batch_samples": 2},
    "validation": {"every_steps": 3, "tokens_per_source": 64},
    "checkpoint": {"every_steps": 3},
    "parallel": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def tiny_trained(trained_workspace, tmp_path_factory):
    work = open_workspace(tmp_path_factory.mktemp("api") / "work", create=True)
    for name in ("tokenizer", "packed"):
        (work.root / name).symlink_to(trained_workspace.root / name)
    return work.root, zero2all.train_run("quickstart", work.root, **FIELDS)


def test_a_call_is_refused_as_the_command_would_be(tiny_trained, monkeypatch):
    work, _ = tiny_trained
    with pytest.raises(UsageError, match=r"2 problems(.|\n)*optim.lr_max(.|\n)*`stepps`"):
        zero2all.train_run("quickstart", work, train={"stepps": 3}, optim={"lr_max": -1})
    with pytest.raises(UsageError, match="This run takes 2 processes") as error:
        zero2all.train_run("quickstart", work, parallel={"processes": 2, "device": "cpu"})
    monkeypatch.setenv(LANGUAGE_VARIABLE, "zh")
    assert "个进程" in translate(str(error.value))
    with pytest.raises(BadInputError, match="There is no run in"):
        zero2all.metrics("nowhere")


def test_metrics_are_a_data_frame_where_pandas_is(tiny_trained):
    pandas = pytest.importorskip("pandas")
    frame = zero2all.metrics("again", tiny_trained[0])
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns[:3]) == ["step", "tokens", "time"]


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_lines_of_the_readme_run_as_they_stand(name, trained_workspace, tmp_path, monkeypatch, capsys):
    (block,) = [block for block in Page(ROOT / name).blocks if block.language == "python"]
    assert len([line for line in block.lines if line]) == 4
    monkeypatch.chdir(tmp_path)
    stand_in(trained_workspace, tmp_path / "quickstart", ("generate", "quickstart"))
    exec(compile("\n".join(block.lines), name, "exec"), {})
    text, loss = capsys.readouterr().out.split("\n", 1)
    assert float(text.split()[-1]) > 0
    assert loss
