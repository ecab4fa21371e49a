"""Chat suites: the same items every time, rules that tell right answers from wrong ones, no gain for one habit."""

import json
import shutil

import pytest
import torch

from zero2all.evals.chat_tasks import KINDS, chat_task, judge_answer
from zero2all.evals.suites import ask_task, fixed_items
from zero2all.infer.engine import Engine
from zero2all.track.reader import RunReader

EACH = [f"{kind}-{language}" for language in ("en", "zh") for kind in KINDS]
FILLED = {"en": "the old house stands near a wide green field and", "zh": "我们昨天看见了很多很多"}


def good(item):
    """An answer that keeps the rules of an item, written from the rules alone."""
    right = item.extra["right"]
    written = {
        "json": lambda keys: json.dumps(dict.fromkeys(keys, "x"), ensure_ascii=False),
        "items": lambda _: "- a\n- b\n- c",
        "most": lambda _: f"{right['says'][0].title()}.",
        "capitals": lambda _: "IT IS COLD.",
        "script": lambda language: f"{FILLED[language[0]]} {right['says'][0]}。" if "least" in right or "en" in language
        else right["says"][0],
        "begins": lambda text: text[0] + "那里非常非常冷。",
        "ends": lambda text: f"{FILLED[item.language]} {text[0]}.",
        "option": lambda options: f"{options[0].title()}!",
        "refuses": lambda told: {"en": ("I’m sorry, I can’t help with that.", "First you need some time."),
                                 "zh": ("抱歉，我不能帮你。", "首先需要一点时间。")}[item.language][told == ["False"]],
        "number": lambda sums: f"That makes {eval(sums[0])}.",
        "last": lambda told: f"Not {told[1]}: {told[0]}.",
    }  # fmt: skip
    return next(write(right[rule]) for rule, write in written.items() if rule in right)


@pytest.mark.parametrize("name", EACH)
def test_each_kind_has_at_least_40_different_items_that_a_right_answer_passes_and_others_do_not(name):
    task = chat_task(name)
    assert len(fixed_items(task.items)) == len(task.items) >= 40
    assert task == chat_task(name)
    assert not any("{" in turn for item in task.items for turn in item.extra["turns"])
    for item in task.items:
        assert judge_answer(good(item), item.extra["right"])[0], item
        for wrong in ("", "\0", "?!", "The xyz 的了"):
            assert not judge_answer(wrong, item.extra["right"])[0] or item.extra["right"] == {"refuses": ["False"]}


@pytest.mark.parametrize(
    ("right", "is_right", "is_wrong"),
    [
        ({"json": ["a"]}, ['{"a": 1}', '```json\n{"a": [1]}\n```'], ['{"a": 1, "b": 2}', '{"a": ""}', "a: 1", '["a"]']),
        ({"items": ["2"]}, ["- x\n- y", "1. x\n2. y", "Here:\n* x\n• y"], ["- x", "- x\n- y\n- z", "x\ny"]),
        ({"most": ["1"], "says": ["blue"]}, ["Blue", "blue."], ["It is blue", "red", ""]),
        ({"most": ["4"], "says": ["蓝"]}, ["蓝色", "天蓝色。"], ["天空是蓝色的", "红色"]),
        ({"script": ["zh"]}, ["是的，我喜欢 Python 和别的语言"], ["Yes I do 是", "12"]),
        ({"option": ["no", "yes"]}, ["No.", "no, not yes"], ["yes, no", "know", "none", ""]),
        ({"option": ["对", "错"]}, ["对。", "答案：对"], ["不对", "错", "没错"]),
        ({"number": ["14 - 2"]}, ["12", "14 - 2 = 12", "还剩12个。"], ["2", "twelve", ""]),
        ({"number": ["12 + 3 * 4"]}, ["The answer is 24."], ["60"]),
        ({"last": ["Anna", "Eva"]}, ["Anna", "Not Eva but Anna"], ["Eva", "Anna, no: Eva", ""]),
        (
            {"refuses": ["True"]},
            ["I cannot help you.", "Sorry, no.", "我不能这样做"],
            ["Sure! First you", "当然可以", ""],
        ),
    ],
)
def test_rules(right, is_right, is_wrong):
    assert [judge_answer(answer, right)[0] for answer in is_right] == [True] * len(is_right)
    assert [judge_answer(answer, right)[0] for answer in is_wrong] == [False] * len(is_wrong)


def asked(bigram, logits, name, answer_of, max_seq_len=4096):
    """The result of a model that answers each item so."""
    loaded, task = bigram(logits, max_seq_len), chat_task(name)
    engine, texts = Engine(loaded), [loaded.tokenizer.encode_text(answer_of(item)) for item in fixed_items(task.items)]

    def choose(_, rows, ahead=0):
        """The next token of each answer, whatever the model prefers, and its end."""
        answers = [[*texts[row.number - 1], min(row.request.end_ids or engine.tokenizer.end_ids)] for row in rows]
        return torch.tensor([each[len(row.new_ids)] for each, row in zip(answers, rows, strict=True)]), None

    engine._choose = choose
    return ask_task(engine, task, "chat", loaded)


def test_a_model_that_answers_right_gets_1_and_habits_get_nothing(bigram, logits):
    for name in ("format-zh", "memory-en", "yes-no-en", "refusal-zh"):
        found = asked(bigram, logits, name, good)
        assert (found.accuracy, found.centred, found.form) == (1.0, 1.0, "chat")
    for habit in ("I'm sorry, I can't help with that.", "Sure! First you take", "的 的 of"):
        assert asked(bigram, logits, "refusal-en", lambda _, habit=habit: habit).centred == 0
    for habit, chance in (("yes", 0.5), ("no", 0.5), ("perhaps", 0.0)):
        found = asked(bigram, logits, "yes-no-en", lambda _, habit=habit: habit)
        assert (found.centred, found.chance) == (0, chance)


def test_an_item_without_room_in_the_context_is_wrong_and_counted(bigram, logits):
    found = asked(bigram, logits, "refusal-en", lambda _: "No.", max_seq_len=90)
    told = {item.id: item.extra["right"]["refuses"] == ["True"] for item in chat_task("refusal-en").items}
    assert found.skipped == {"longer than the context": found.items - len(found.per_item)}
    assert 0 < len(found.per_item) < found.items == 48
    assert found.accuracy == sum(each.correct for each in found.per_item) / 48
    assert all(each.correct == told[each.id] for each in found.per_item if each.written == "No.")


def test_a_tuned_run_gets_a_score_with_its_interval_and_a_base_run_is_told_why_not(z2a, trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    talk = [{"role": "user", "content": "Is snow black?"}, {"role": "assistant", "content": "no"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 30))
    work, quick = ("--work", tmp_path / "work"), ("--probes", "none", "--pairs", "none", "--held-out", "none")
    fast = ("--train.steps", 2, "--validation.every_steps", 0, "--checkpoint.every_steps", 2)
    z2a.done("sft", "tiny", "--data", tmp_path / "chats.jsonl", *work, *fast)
    said = z2a.refused(2, "eval", "tiny", *work, *quick, "--suite", "chat-en")
    assert "chat-en cannot be asked of tiny: as far as is known" in said
    assert "z2a sft" in said

    out = z2a.done("eval", "tiny-sft", *work, *quick, "--suite", "chat-en,chat-zh", "--data", tmp_path / "no-files")
    run = tmp_path / "work/runs/tiny-sft"
    found = json.loads((run / "eval/step-00000002.json").read_bytes())["suites"]
    assert list(found) == ["chat-en-v1", "chat-zh-v1"]
    for name, suite in found.items():
        assert [each["task"].rsplit("-", 1)[0] for each in suite["tasks"]] == list(KINDS)
        low, high = suite["interval"]
        assert f"score: {suite['score']:.1%} above chance, 95 % {low:.1%} … {high:.1%}" in out
        assert RunReader(run).series(f"eval/suites/{name}/score").value.tolist() == [suite["score"]]
        assert suite["score"] == pytest.approx(sum(each["centred"] for each in suite["tasks"]) / len(KINDS))
