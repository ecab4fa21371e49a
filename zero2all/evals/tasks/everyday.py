"""Everyday sense and grammar: HellaSwag, PIQA, WinoGrande, and the minimal pairs of BLiMP and ZhoBLiMP."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zero2all.evals.items import BLANK, BLANKS, CONTINUE, NO_ANSWER, SENTENCE, Item, ItemError
from zero2all.evals.tasks.files import DataFile, cell, data_files, rows_of, text
from zero2all.evals.tasks.reader import Reader, gold_of, with_choices

SCORED_FORMS = ("cloze", "bits")
"""Options of sentences to be completed or compared are not asked for by label."""


def _hellaswag(row: Any, _: DataFile) -> Iterator[Item]:
    label = text(row, "label")
    if not label:
        raise ItemError(NO_ANSWER, "the label is empty: the test split has none")
    begun = text(row, "ctx_b")
    context = f"{text(row, 'ctx_a')} {begun[:1].upper()}{begun[1:]}".strip()
    activity = text(row, "activity_label")
    yield with_choices(
        _without_marks(f"{activity}: {context}"),
        [_without_marks(ending) for ending in cell(row, "endings")],
        int(label),
        subject=activity,
        shape=CONTINUE,
    )


def _without_marks(words: str) -> str:
    """WikiHow's headings and steps stand in brackets: `[header] How to … [title] First`."""
    return re.sub(r"\s+", " ", re.sub(r"\[.*?\]", "", words.replace(" [title]", ". "))).strip()


def _piqa(row: Any, _: DataFile) -> Iterator[Item]:
    yield with_choices(text(row, "goal"), [text(row, "sol1"), text(row, "sol2")], int(cell(row, "label")))


def _piqa_rows(file: DataFile, header: Sequence[str] | None) -> Iterable[tuple[int, Any]]:
    """The original keeps the labels beside the questions: `train.jsonl` and `train-labels.lst`."""
    labels: list[str] = []
    for other in data_files(file.folder, (".lst",)):
        if other.archive == file.archive and other.name == f"{file.name.removesuffix('.jsonl')}-labels.lst":
            labels = other.read().decode().split()
    for number, row in rows_of(file, header):
        if isinstance(row, dict) and "label" not in row and number <= len(labels):
            row = {**row, "label": labels[number - 1]}
        yield number, row


def _winogrande(row: Any, _: DataFile) -> Iterator[Item]:
    sentence = text(row, "sentence")
    if sentence.count("_") != 1:
        raise ItemError(BLANKS, f"the sentence has {sentence.count('_')} blanks (_), not one")
    gold = gold_of(text(row, "answer"), ("1", "2"))
    yield with_choices(sentence, [text(row, "option1"), text(row, "option2")], gold, shape=BLANK)


def _largest(files: list[DataFile]) -> list[DataFile]:
    """WinoGrande has training sets of several sizes, each within the next, and one dev split."""
    train = [file for file in files if file.split == "train"]
    best = [file for file in train if "xl" in re.split(r"[^a-z]+", str(file).lower())] or train[-1:]
    others = [file for file in files if file.split != "train"]
    folders = {file.name.rpartition("/")[0] for file in best}
    return best + ([file for file in others if file.name.rpartition("/")[0] in folders] or others)


def _pair(language: str) -> Any:
    def read(row: Any, file: DataFile) -> Iterator[Item]:
        pair = [text(row, "sentence_good"), text(row, "sentence_bad")]
        is_split = re.fullmatch(r"(train|dev|val|test)(-.*)?", file.stem)
        folder = file.name.split("/")[-2] if is_split and "/" in file.name else file.stem
        subject = str(row.get("UID") or row.get("paradigm") or folder)
        yield with_choices("", pair, 0, language=language, subject=subject, shape=SENTENCE)

    return read


def _kept(files: list[DataFile]) -> list[DataFile]:
    """ZhoBLiMP keeps the paradigms that people disagreed on apart."""
    return [file for file in files if "excluded" not in str(file).lower()]


def _pairs(name: str, language: str) -> Reader:
    return Reader(
        name,
        language,
        _pair(language),
        ("", "train", "test"),
        forms=SCORED_FORMS,
        default_shots=0,
        suffixes=(".json", ".jsonl", ".parquet"),
        choose=_kept,
    )


EVERYDAY = (
    Reader("hellaswag", "en", _hellaswag, ("val",), ("train",), forms=SCORED_FORMS, default_shots=0),
    Reader("piqa", "en", _piqa, ("val", "dev"), ("train",), rows=_piqa_rows),
    Reader(
        "winogrande",
        "en",
        _winogrande,
        ("val", "dev"),
        ("train",),
        forms=SCORED_FORMS,
        default_shots=0,
        choose=_largest,
    ),
    _pairs("blimp", "en"),
    _pairs("zhoblimp", "zh"),
)
