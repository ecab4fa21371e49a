"""The last stages of the quickstart: the model learns to answer, and is asked.

It is fine-tuned for a minute on conversations of its own world (`world/conversations.py`), by `finetune.sft` as
`z2a sft` would. Then base and chat model are asked the same, as `z2a chat` asks: every fact in a wording that no
conversation has for it, sums that were kept out, and questions about things outside its world, which it is to refuse.
Those were written by hand, before the conversations, and nothing is generated from them (`outside_questions.txt`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.files import atomic_file, package_text, write_json
from zero2all.common.workspace import Workspace
from zero2all.finetune import dpo, rl
from zero2all.finetune.objectives import objective_of
from zero2all.finetune.sft import FOLDER, SftOptions, prepare_sft
from zero2all.infer.chat import chat_prompt
from zero2all.infer.engine import Engine
from zero2all.infer.load import LoadedModel
from zero2all.infer.text import TextRequest, complete
from zero2all.quickstart.world.conversations import (
    ChatQuestion,
    chat_questions,
    conversations,
    preferences,
    refusal,
    sum_prompts,
)
from zero2all.quickstart.world.language import LANGUAGES
from zero2all.tokenizer.chat import Message
from zero2all.train.run import train

CONVERSATIONS = 3500
"""Of each language."""
REPLAY = 0.15
"""Share of the tokens that is the text of the world again: without it, held-out text costs 0.3 bits a byte more."""
RAW_NAME, ANSWERS_NAME = "chat.jsonl", "chat.json"
LONGEST_ANSWER = 24
OUTSIDE = "outside"


@dataclass(frozen=True)
class ChatScore:
    """What a model answers in a chat, in one language: right answers and questions, by kind."""

    right: dict[str, int]
    asked: dict[str, int]

    def share(self, kind: str) -> float:
        """Of fact, known_fact (one that the base model completes), sum or outside."""
        return self.right[kind] / max(1, self.asked[kind])


def write_conversations(path: Path, seed: int, count: int) -> None:
    """Write the conversations of both languages, as others write theirs."""
    with atomic_file(path) as file:
        both = [conversations(language, count, seed) for language in LANGUAGES]
        for pair in zip(*both, strict=True):
            for turns in pair:
                said = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
                file.write(jsonio.dumps_line({"messages": [{"role": role, "content": text} for role, text in said]}))


def teach(workspace: Workspace, base: str, name: str, seed: int, count: int, step: int) -> None:
    """Fine-tune the checkpoint `step` of the run `base` as the run `name`, or find it done."""
    path = workspace.root / FOLDER / RAW_NAME
    if not path.is_file():
        write_conversations(path, seed, count)
    prepared = prepare_sft(
        base, workspace, SftOptions(name, [path], epochs=1.0, replay=REPLAY, step=step, replace=True)
    )
    train(prepared.config, workspace, say=lambda _: None, brief=True)


def outside_questions(language: str) -> list[str]:
    """What nobody can know from the text of the small world."""
    lines = [line for line in package_text("zero2all.quickstart.world", "outside_questions.txt").splitlines() if line]
    is_chinese = language == "zh"
    return [line for line in lines if not line.startswith("#") and (not line.isascii()) == is_chinese]


def judge(loaded: LoadedModel, seed: int, known: set[tuple[str, str, str]], answers: Path) -> dict[str, ChatScore]:
    """The score of a model by language; every question and answer is written to `answers`. `known`: the facts
    (language, relation, subject) that the base model completes."""
    scores, written = {}, []
    for language in LANGUAGES:
        asked = list(chat_questions(language, seed))
        asked += [
            ChatQuestion(language, OUTSIDE, None, text, refusal(language)) for text in outside_questions(language)
        ]
        right, counts = (dict.fromkeys(("fact", "known_fact", "sum", OUTSIDE), 0) for _ in range(2))
        for question, answer in zip(asked, ask(loaded, [each.question for each in asked]), strict=True):
            is_right = answers_right(question, answer)
            is_known = question.fact is not None and (language, *question.fact) in known
            for kind in (question.kind, *(["known_fact"] if is_known else [])):
                counts[kind] += 1
                right[kind] += is_right
            shown = {"language": language, "kind": question.kind, "question": question.question, "answer": answer}
            written.append({**shown, "expected": question.answer, "right": is_right})
        scores[language] = ChatScore(right, counts)
    write_json(answers, written)
    return scores


def answers_right(question: ChatQuestion, answer: str) -> bool:
    """Whether an answer has what it should have: a sum that number alone."""
    if question.kind == "sum":
        return re.findall(r"\d+", answer) == [question.answer]
    return question.answer in answer


def ask(loaded: LoadedModel, questions: Sequence[str]) -> list[str]:
    """The answer to each question, each in a chat of its own, as `z2a chat` would ask; the likeliest one."""
    requests = []
    for question in questions:
        prompt = chat_prompt(loaded, [Message("user", question)])
        requests.append(
            TextRequest(prompt.prompt, LONGEST_ANSWER, stop=prompt.stop, heal=prompt.heal, end_ids=prompt.end_ids)
        )
    answers = dict.fromkeys(range(len(requests)), "")
    for index, text, _ in complete(Engine(loaded), requests):
        answers[index] = text.strip()
    return list(answers.values())


def completed_facts(evaluation: dict[str, Any]) -> set[tuple[str, str, str]]:
    """The facts (language, relation, subject) that a base model completes in one of their held-out wordings."""
    found = set()
    for result in evaluation["probe_results"]:
        language, relation, subject, *_ = result["probe"]["id"].split("/")
        if result["correct"] and not result["probe"]["new_wording"] and relation != "arithmetic":
            found.add((language, relation, subject))
    return found


PAIRS, PAIRS_RATE = 1000, 1e-4
"""Of each language, and the highest learning rate: at five times as much both answers of a pair become unlikely."""
SUMS_STEPS, SUMS_RATE = 40, 3e-4
SUMS_SETTINGS = {"rewards": "{number: 1, format: 0.2}", "format": "[0-9]+[.。]?", "max_new_tokens": 8}
"""Of `finetune.grpo`. By `number` alone a model that refuses every sum earns nothing, and learns nothing: of 960 drawn
answers none was right. So a number by itself earns a little, too."""


def tune(workspace: Workspace, method: str, chat: str, name: str, seed: int, share: float = 1.0) -> None:
    """What `--full` adds: tune the run `chat` by dpo or rl as the run `name`, or find it done. `share`: of the pairs or
    of the steps.

    By dpo it learns which of two answers is better, from pairs that the small world writes: a right answer before an
    invented one or a refusal, and where nobody can know, a refusal before an invention. By rl it is to learn the sums
    that the conversations refuse: answers are drawn and rewarded, and no written answer is in its loss.
    """
    if method == "dpo":
        path, count = workspace.root / dpo.FOLDER / "pairs.jsonl", int(PAIRS * share)
        data = _written(path, lambda each: preferences(each, count, seed))
        prepared = dpo.prepare_dpo(chat, workspace, SftOptions(name, [data], epochs=1.0, lr=PAIRS_RATE, replace=True))
    else:
        path, steps = workspace.root / rl.FOLDER / "sums.jsonl", max(2, int(SUMS_STEPS * share))
        data = _written(path, lambda each: sum_prompts(each, seed))
        overrides = [f"--finetune.grpo.{field}={value}" for field, value in SUMS_SETTINGS.items()]
        options = rl.RlOptions(name, [data], lr=SUMS_RATE, steps=steps, overrides=overrides, replace=True)
        prepared = rl.prepare_rl(chat, workspace, options)
    train(prepared.config, workspace, say=lambda _: None, make_objective=objective_of, brief=True)


def _written(path: Path, rows: Callable[[str], Iterator[dict[str, str]]]) -> Path:
    """Rows of both languages, in a file as others write theirs; one that is there stays."""
    if not path.is_file():
        with atomic_file(path) as file:
            file.writelines(jsonio.dumps_line(row) for language in LANGUAGES for row in rows(language))
    return path
