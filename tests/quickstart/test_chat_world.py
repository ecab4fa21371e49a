"""Conversations of the small world: they answer its facts, refuse the rest, and give nothing of the tests away."""

import re
from collections import Counter

import pytest

from zero2all.quickstart.chat import (
    PAIRS,
    ChatScore,
    answers_right,
    completed_facts,
    outside_questions,
    preferences,
    sum_prompts,
    write_conversations,
)
from zero2all.quickstart.world.conversations import ChatQuestion, chat_questions, conversations, refusal
from zero2all.quickstart.world.language import LANGUAGES
from zero2all.quickstart.world.questions import UNREAD_PEOPLE

SEED = 1


@pytest.fixture(scope="module", params=["en", "zh"])
def language(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def turns(language: str) -> list[tuple[str, str]]:
    return [turn for talk in conversations(language, 3500, SEED) for turn in talk]


def test_the_same_seed_writes_the_same(language: str, tmp_path) -> None:
    assert list(conversations(language, 50, SEED)) == list(conversations(language, 50, SEED))
    write_conversations(tmp_path / "a", SEED, 20)
    write_conversations(tmp_path / "b", SEED, 20)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_fact_is_asked_often_and_answered_right_and_half_of_the_turns_are_refused(language, turns):
    for fact in LANGUAGES[language].facts:
        answers = [answer for question, answer in turns if fact.subject in question and answer != refusal(language)]
        assert sum(fact.answer in answer for answer in answers) > 15, fact
    assert 0.4 < sum(answer == refusal(language) for _, answer in turns) / len(turns) < 0.6


def test_nothing_it_is_tuned_with_has_a_question_of_the_tests(language: str, turns: list[tuple[str, str]]) -> None:
    rows = [*preferences(language, PAIRS, SEED), *sum_prompts(language, SEED)]
    asked, outside = {row["prompt"] for row in rows} | {question for question, _ in turns}, outside_questions(language)
    assert len(outside) == 100
    assert not asked.intersection(outside)
    assert not asked.intersection(each.question for each in chat_questions(language, SEED))
    assert not [question for question in asked if any(name in question for name in UNREAD_PEOPLE[language])]


def test_the_better_answer_of_a_pair_is_right_or_a_refusal_and_the_worse_one_is_not(language: str) -> None:
    facts, refused = LANGUAGES[language].facts, refusal(language)
    values = {f"{fact.answer}{refused[-1]}" for fact in facts}
    kinds: Counter[tuple[bool, bool]] = Counter()
    for question, better, worse in map(dict.values, preferences(language, PAIRS, SEED)):
        kinds[better == refused, worse == refused] += 1
        told = [each for each in facts if each.subject in question and better == f"{each.answer}{refused[-1]}"]
        same = {f"{other.answer}{refused[-1]}" for each in told for other in each.relation.facts}
        assert worse in ((values if better == refused else same | {refused}) - {better})
    assert kinds[True, False] > kinds[False, False] > kinds[False, True] > 0.1 * PAIRS


def test_no_sum_that_the_chat_is_tested_with_earns_a_reward_in_any_wording(language: str) -> None:
    held_out = {(one.left, one.right, one.operator) for one in LANGUAGES[language].calculations(SEED)[1]}
    for row in sum_prompts(language, SEED):
        left, right = map(int, re.findall(r"\d+", row["prompt"]))
        operator = "+" if left + right == int(row["answer"]) else "-"
        assert (left, right, operator) not in held_out, row


def test_a_fact_is_right_by_its_answer_and_a_sum_by_its_number_alone() -> None:
    fact = ChatQuestion("en", "fact", ("capital", "Peru"), "?", "Lima")
    number = ChatQuestion("en", "sum", None, "?", "4")
    assert [answers_right(fact, said) for said in ("Lima.", "I do not know.")] == [True, False]
    assert [answers_right(number, said) for said in ("4.", "14.")] == [True, False]
    assert ChatScore({"fact": 3}, {"fact": 4}).share("fact") == 0.75


def test_a_fact_is_known_when_one_of_its_wordings_is_completed() -> None:
    def result(name: str, correct: bool, new: bool = False) -> dict[str, object]:
        return {"probe": {"id": name, "new_wording": new}, "correct": correct}

    results = [
        *(result("en/capital/Peru/wording-1", False), result("en/capital/Peru/wording-2", True)),
        *(result("en/capital/Cuba/wording-1", False), result("en/capital/Cuba/new-wording", True, new=True)),
        result("en/arithmetic/1+2", True),
    ]
    assert completed_facts({"probe_results": results}) == {("en", "capital", "Peru")}
