"""The standard harness on our engine (where lm-eval is installed)."""

import json
from importlib.util import find_spec

import pytest
import yaml

from zero2all.common.errors import BadInputError, UsageError
from zero2all.evals.scorer import Question, continuation_log_probabilities, score_questions
from zero2all.infer.engine import Engine


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
    (scores,) = model.engine.score([model.tok_encode(text)], [1])
    assert total == pytest.approx(sum(scores.logprobs), abs=1e-4)
    (long,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text * 100,)))
    assert long < total


def test_texts_are_written_up_to_a_stop(model):
    settings = {"until": ["."], "max_gen_toks": 12}
    (text,) = model.generate_until(instances("generate_until", ("The capital of", settings)), disable_tqdm=True)
    assert "." not in text
    assert len(model.tok_encode(text, add_special_tokens=False)) <= 12


def test_the_real_harness_runs_a_task_offline(model, tmp_path, monkeypatch):
    from zero2all.evals.lm_harness import harness_lines, run_harness

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"prompt": "The capital of France is", "choices": [" Paris", " Rome", " the sea"], "gold": 0}]
    rows += [{"prompt": "2 + 2 =", "choices": [" 5", " 4", " 3"], "gold": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "quiz", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}, "num_fewshot": 0}
    task |= {"doc_to_text": "prompt", "doc_to_choice": "choices", "doc_to_target": "gold", "target_delimiter": ""}
    (tmp_path / "quiz.yaml").write_text(yaml.safe_dump(task))
    found = run_harness(model.engine, ["quiz"], tmp_path)
    scored = score_questions(model.engine, [Question(row["prompt"], tuple(row["choices"])) for row in rows])
    best = [max(range(3), key=lambda number, each=each: each[number].logprob) for each in scored]
    accuracy = sum(number == row["gold"] for number, row in zip(best, rows, strict=True)) / 2
    assert found["results"]["quiz"]["acc,none"] == pytest.approx(accuracy)
    assert "quiz" in "\n".join(harness_lines(found))


def test_a_task_that_is_not_there_is_named(model, tmp_path):
    from zero2all.evals.lm_harness import run_harness

    with pytest.raises(BadInputError, match="There is no folder"):
        run_harness(model.engine, ["x"], tmp_path / "none")
