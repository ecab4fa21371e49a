"""The standard harness on our engine (where lm-eval is installed), and our sets written as its tasks."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from zero2all.common.errors import BadInputError, UsageError
from zero2all.evals.forms import choice, cloze
from zero2all.evals.items import BLANK, CODE, Item, Task
from zero2all.evals.lm_tasks import write_tasks
from zero2all.evals.scorer import Question, continuation_log_probabilities, score_questions
from zero2all.infer.engine import Engine

ITEMS = (
    Item("a", "The capital of France is", ("Paris", "Rome", "the sea"), 0, "Paris"),
    Item("b", "2 + 2 =", ("5", "4", "3"), 1, "4"),
)
SHOTS = (Item("s", "1 + 1 =", ("2", "3", "4"), 0, "2"),)
QUIZ = Task("my quiz", "en", ITEMS, SHOTS, ("cloze", "choice", "bits"))


def written(folder, name):
    config = yaml.safe_load((folder / f"{name}.yaml").read_text())
    lines = Path(config["dataset_kwargs"]["data_files"]["test"])
    return config, [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


# ---- our sets as tasks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "ask"), [("cloze", cloze), ("choice", choice)])
def test_a_written_task_asks_exactly_what_we_ask(tmp_path, form, ask):
    write_tasks(tmp_path, [QUIZ], shots=1)
    config, rows = written(tmp_path, f"z2a_my_quiz_{form}")
    assert config["num_fewshot"] == 0
    assert config["target_delimiter"] == ""
    for row, item in zip(rows, ITEMS, strict=True):
        (question,) = ask(item, SHOTS).questions
        assert Question(row["prompt"], tuple(row["choices"])) == question
        assert row["gold"] == item.gold


def test_a_blank_has_its_choices_as_contexts_and_one_continuation(tmp_path):
    item = Item("w", "The cup did not fit because _ was big.", ("the cup", "the bag"), 0, "the cup", shape=BLANK)
    write_tasks(tmp_path, [Task("blanks", "en", (item,), forms=("cloze",))])
    config, (row,) = written(tmp_path, "z2a_blanks_cloze")
    assert row["choices"] == ["The cup did not fit because the cup", "The cup did not fit because the bag"]
    assert (row[config["doc_to_text"]], row[config["doc_to_target"]]) == (0, " was big.")


def test_open_answers_are_generated_and_programs_left_out(tmp_path):
    sums = Item("n", "Three and four?", answer="7", extra={"number": 7.0})
    program = Item("c", "def f():", answer="    pass", shape=CODE)
    (found,) = write_tasks(tmp_path, [Task("open", "en", (sums, program), forms=("bits", "generate"))], shots=0)
    assert (found.name, found.items, found.left_out) == ("z2a_open_generate", 1, 1)
    config, (row,) = written(tmp_path, found.name)
    assert row["answer"] == "7"
    assert config["generation_kwargs"]["max_gen_toks"] > 0
    assert config["filter_list"]


def test_a_set_without_any_form_that_lm_eval_has_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="nothing to write"):
        write_tasks(tmp_path, [Task("bits only", "en", ITEMS, forms=("bits",))])


# ---- the adapter -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_message_says_how_to_get_it():
    from zero2all.evals.lm_harness import require_lm_eval

    with pytest.raises(UsageError, match=r"pip install 'zero2all\[lmeval\]'"):
        require_lm_eval()


@pytest.fixture(scope="module")
def model(trained):
    pytest.importorskip("lm_eval")
    from zero2all.evals.lm_harness import HarnessModel

    return HarnessModel(Engine(trained))


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_log_likelihoods_are_exact_and_spaces_belong_to_the_continuation(model):
    asked = [("The capital of France is", " Paris"), ("The capital of France is ", "Paris"), ("", "Rome"), ("x", "")]
    (spaced, moved, alone, empty) = model.loglikelihood(instances("loglikelihood", *asked), disable_tqdm=True)
    (expected,) = continuation_log_probabilities(model.engine, "The capital of France is", [" Paris"])
    assert spaced[0] == moved[0] == pytest.approx(expected, abs=1e-5)
    ((whole,),) = score_questions(model.engine, [Question("", ("Rome",))])
    assert alone == (pytest.approx(whole.logprob, abs=1e-6), whole.is_greedy)
    assert empty == (0.0, True)
    assert model.empty == 1


def test_a_text_is_scored_whole_and_in_windows_where_it_is_too_long(model):
    text = "The capital of France is Paris. " * 3
    (total,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    row = model.tok_encode(text)
    (scores,) = model.engine.score([row], [1])
    assert total == pytest.approx(sum(scores.logprobs), abs=1e-4)
    (long,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text * 100,)))
    assert long < total


def test_texts_are_written_up_to_a_stop(model):
    settings = {"until": ["."], "max_gen_toks": 12}
    (text,) = model.generate_until(instances("generate_until", ("The capital of", settings)), disable_tqdm=True)
    assert "." not in text
    assert len(model.tok_encode(text, add_special_tokens=False)) <= 12


def test_the_real_harness_runs_a_written_task_offline(model, tmp_path, monkeypatch):
    from zero2all.evals.lm_harness import harness_lines, run_harness

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_tasks(tmp_path / "tasks", [QUIZ], shots=1)
    found = run_harness(model.engine, ["z2a_my_quiz_cloze"], tmp_path / "tasks")
    asked = [cloze(item, SHOTS).questions[0] for item in ITEMS]
    best = [
        max(range(3), key=lambda number, each=each: each[number].logprob)
        for each in score_questions(model.engine, asked)
    ]
    accuracy = sum(number == item.gold for number, item in zip(best, ITEMS, strict=True)) / 2
    assert found["results"]["z2a_my_quiz_cloze"]["acc,none"] == pytest.approx(accuracy)
    assert "z2a_my_quiz_cloze" in "\n".join(harness_lines(found))


def test_a_task_that_is_not_there_is_named(model, tmp_path):
    from zero2all.evals.lm_harness import run_harness

    with pytest.raises(BadInputError, match="There is no folder"):
        run_harness(model.engine, ["x"], tmp_path / "none")
