"""Rewards judge by rules or by a function of the user, which may fail in any way without ending the run."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.pages import ROOT
from tests.waiting import wait_until
from zero2all.common.errors import UsageError
from zero2all.config.finetune import GrpoConfig
from zero2all.finetune.rewards import JudgedAnswer, Rewards


def judged(name, text, calls=0, **record):
    rewards = Rewards(GrpoConfig(rewards={name: 1.0}, format=r"<b>\d+</b>.*"))
    return rewards.values([JudgedAnswer(text, text, calls, record)])[0][name]


def test_rules():
    for name, text, record, value in (
        ("exact", " yes\n", {"answer": "yes"}, 1),
        ("exact", "yes!", {"answer": "yes"}, 0),
        ("exact", "7", {"answer": 7}, 1),
        ("number", "so it is 1,000.0.", {"answer": "1000"}, 1),
        ("number", "12 or 13", {"answer": "we have 6 x 2 = <<6*2=12>>12\n#### 12"}, 0),
        ("number", "it costs $18", {"answer": "18.00"}, 1),
        ("number", "-1/3", {"answer": "-2/6"}, 1),
        ("number", "1/0", {"answer": "3"}, 0),
        ("number", "none", {"answer": "3"}, 0),
        ("format", "<b>12</b> and\nmore", {}, 1),
        ("format", " <b>12</b>", {}, 0),
        ("code", "Here:\n```python\ndef f(x):\n    return x + 1\n```", {"tests": "assert f(1) == 2"}, 1),
        ("code", "def f(x): return x", {"tests": "assert f(1) == 2"}, 0),
    ):
        assert judged(name, text, **record) == value


def test_calls_have_a_price_and_the_first_reward_says_what_is_right():
    rewards = Rewards(GrpoConfig(rewards={"exact": 1.0, "calls": -0.25}))
    values = rewards.values([JudgedAnswer("yes", "yes", 2, {"answer": "yes"})])[0]
    assert rewards.total(values) == 0.5
    assert rewards.is_right(values)


MINE = """
import os, subprocess, sys, time
started = subprocess.Popen(["sleep", "600"])
def score(answer, record):
    print("to stderr, not into the protocol")
    if answer == "raise": raise RuntimeError("I cannot")
    if answer == "hang": time.sleep(600)
    if answer == "nan": return float("nan")
    if answer == "text": return "much"
    if answer == "die": os._exit(3)
    if answer == "unknown": return None
    if answer == "fork" and os.fork() == 0: return -1.0
    return len(answer) + record["more"] + record["calls"]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return lambda seconds: Rewards(GrpoConfig(rewards={f"{tmp_path}/mine.py:score": 1.0}, reward_seconds=seconds))


def test_a_function_that_raises_hangs_or_dies_leaves_answers_out_and_goes_on(mine):
    rewards, started = mine(1.0), time.monotonic()
    words = ["ab", "raise", "abc", "hang", "nan", "text", "die", "unknown", "abcd", "fork", "abc"]
    values = rewards.values([JudgedAnswer(word, word, 1, {"more": 10}) for word in words])
    found = [next(iter(each.values())) for each in values]
    assert found.pop(9) in (15, -1.0), "whichever process of a fork is first; the next is not shifted"
    assert found == [13, None, 14, *[None] * 5, 15, 14]
    reasons = ("RuntimeError: I cannot", "longer than 1 s", "is nan", "ValueError", "has ended", "returned None")
    assert [reason for reason in reasons if reason not in "\n".join(rewards.failures)] == []
    assert time.monotonic() - started < 30, "a process that hangs is killed"


def test_after_three_hangs_in_a_step_the_other_answers_are_not_tried(mine):
    rewards, started = mine(0.2), time.monotonic()
    values = rewards.values([JudgedAnswer("hang", "", 0, {})] * 50)
    assert {next(iter(each.values())) for each in values} == {None}
    assert time.monotonic() - started < 20
    assert rewards.is_right(values[0]) is None


def test_nothing_that_a_function_has_started_outlives_the_program(tmp_path):
    """Not what it forked, at a normal end; not the function itself, where the program is killed."""
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n"
        "def score(answer, record):\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "    pathlib.Path(__file__).with_name(answer).write_text(str(os.getpid()))\n"
        "    if answer == 'killed': time.sleep(600)\n"
        "    return 1.0\n"
    )
    for word, code in (("ended", 0), ("killed", -signal.SIGKILL)):
        program = (
            "from zero2all.finetune.rewards import GrpoConfig, JudgedAnswer, Rewards\n"
            f"rewards = Rewards(GrpoConfig(rewards={{'{tmp_path}/mine.py:score': 1.0}}, reward_seconds=600))\n"
            f"rewards.values([JudgedAnswer('{word}', '', 0, {{}})])\n"
        )
        child, path = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT), tmp_path / word
        wait_until(lambda path=path: path.exists() and path.read_text())
        if code:
            child.kill()
        assert child.wait() == code
        judge = int(path.read_text())
        wait_until(lambda judge=judge: not psutil.pid_exists(judge) or psutil.Process(judge).status() == "zombie")


def test_what_cannot_be_a_reward_is_named(tmp_path):
    for name, text, said in (
        ("{}/mine.py:score", "import nothing_of_this_name", "ModuleNotFoundError"),
        ("{}/mine.py:score", "def other(): pass", "AttributeError"),
        ("{}/none.py:score", "", "There is no file"),
        ("exakt", "", "There is no reward 'exakt'. Expected: exact, number, code, calls, format, or FILE.py:FUNCTION"),
        ("format", "", "needs finetune.grpo.format"),
    ):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(UsageError, match=said):
            Rewards(GrpoConfig(rewards={name.format(tmp_path): 1.0})).values([JudgedAnswer("a", "a", 0, {})])
