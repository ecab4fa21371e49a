"""Reading: C3 (questions on dialogues and texts), CMRC 2018 (find the answer in a passage), LAMBADA (the last word)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zero2all.evals.items import CONTINUE, GOLD_OUTSIDE, NO_ANSWER, ONE_WORD, Item, ItemError
from zero2all.evals.tasks.files import DataFile, cell, rows_of, text
from zero2all.evals.tasks.reader import Reader, with_choices


def _c3(row: Any, _: DataFile) -> Iterator[Item | ItemError]:
    """The original: [[lines of the passage], [questions], id]; the hub: an object with the same three."""
    if isinstance(row, list):
        lines, questions = row[0], [(each["question"], each["choice"], each["answer"]) for each in row[1]]
    else:
        lines, asked = cell(row, "documents", "context"), cell(row, "questions")
        questions = list(zip(asked["question"], asked["choice"], asked["answer"], strict=True))
    passage = "\n".join(line.strip() for line in lines)
    for question, choices, answer in questions:
        texts = [choice.strip() for choice in choices]
        if answer.strip() not in texts:
            yield ItemError(GOLD_OUTSIDE, f"the answer {answer!r} is not among the options {choices}")
            continue
        yield with_choices(question.strip(), texts, texts.index(answer.strip()), language="zh", context=passage)


def _squad_rows(file: DataFile, header: Sequence[str] | None) -> Iterable[tuple[int, Any]]:
    """One row for each question: the original nests questions in paragraphs (in articles, in SQuAD's form), the hub
    does not."""
    number = 0
    for _, article in rows_of(file, header):
        paragraphs = article.get("paragraphs", [article]) if isinstance(article, dict) else [article]
        for paragraph in paragraphs:
            if not isinstance(paragraph, dict) or "qas" not in paragraph:
                number += 1
                yield number, paragraph
                continue
            for asked in paragraph["qas"]:
                number += 1
                yield number, {**asked, "context": paragraph.get("context", paragraph.get("context_text"))}


def _one_form(files: list[DataFile]) -> list[DataFile]:
    """CMRC's repository has every file twice, once in SQuAD's form."""
    return [file for file in files if "squad" in str(file).lower()] or files


def _cmrc(row: Any, _: DataFile) -> Iterator[Item]:
    answers = cell(row, "answers")
    if isinstance(answers, dict):
        texts = answers["text"]
    else:
        texts = [each if isinstance(each, str) else each["text"] for each in answers]
    if not len(texts):
        raise ItemError(NO_ANSWER, "it has no right answer")
    aliases = list(dict.fromkeys(each.strip() for each in texts))
    question, passage = text(row, "question", "query_text"), text(row, "context")
    extra = {"aliases": aliases}
    yield Item(text(row, "id", "query_id"), question, answer=aliases[0], language="zh", context=passage, extra=extra)


def _lambada(row: Any, _: DataFile) -> Iterator[Item]:
    begun, _space, last = text(row, "text").rpartition(" ")
    if not begun:
        raise ItemError(ONE_WORD, "the text has only one word")
    yield Item("", begun, answer=last, shape=CONTINUE)


def _english(files: list[DataFile]) -> list[DataFile]:
    """The hub has translations beside it: `lambada_test_de.jsonl`, `de/…`."""
    others = ("de", "es", "fr", "it")
    return [
        file
        for file in files
        if not file.stem.endswith(tuple(f"_{code}" for code in others)) and file.name.split("/")[0] not in others
    ]


READING = (
    Reader("c3", "zh", _c3, ("test", "val", "dev"), ("train",), default_shots=0),
    Reader(
        *("cmrc", "zh", _cmrc, ("val", "dev"), ("train",), ("bits", "generate")),
        default_shots=0,
        rows=_squad_rows,
        choose=_one_form,
    ),
    Reader("lambada", "en", _lambada, ("test", "val", ""), forms=("bits",), default_shots=0, choose=_english),
)
