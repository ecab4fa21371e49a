"""The public benchmarks.

Exams with lettered options: CMMLU, C-Eval, MMLU, ARC. Everyday sense and grammar: HellaSwag, PIQA, WinoGrande, and the
minimal pairs of BLiMP and ZhoBLiMP. Reading: C3 (questions on dialogues and texts), CMRC 2018 (find the answer in a
passage), LAMBADA (the last word). Problems whose solution is written out: GSM8K (arithmetic in words), HumanEval
(Python functions).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from zero2all.evals.items import (
    BLANK,
    BLANKS,
    CODE,
    CONTINUE,
    GOLD_OUTSIDE,
    LABELS,
    NO_ANSWER,
    NOT_READABLE,
    ONE_WORD,
    SENTENCE,
    Item,
    ItemError,
)
from zero2all.evals.tasks.files import DataFile, Reader, cell, data_files, gold_of, rows_of, text, with_choices

FOUR = tuple("ABCD")


def _subject(file: DataFile) -> str:
    """`anatomy` of `test/anatomy.csv`, `val/anatomy_val.csv` and `anatomy/val-00000-of-00001.parquet`."""
    if re.match(r"(train|dev|val|test)-\d", file.stem):
        return file.name.split("/")[-2] if "/" in file.name else ""
    return re.sub(r"_(train|dev|val|test)$", "", file.stem)


def _without(*words: str) -> Callable[[list[DataFile]], list[DataFile]]:
    """Leaves out the files with one of these words in their path."""
    return lambda files: [file for file in files if not any(word in str(file).lower() for word in words)]


def lettered(language: str) -> Any:
    """Rows with the columns question, A, B, C, D, answer, in small or capital letters."""

    def read(row: Any, file: DataFile) -> Iterator[Item]:
        question, answer = text(row, "question", "Question"), text(row, "answer", "Answer")
        choices = [text(row, label) for label in FOUR]
        yield with_choices(question, choices, gold_of(answer, FOUR), language=language, subject=_subject(file))

    return read


def _mmlu(row: Any, file: DataFile) -> Iterator[Item]:
    if "choices" not in row:
        yield from lettered("en")(row, file)
        return
    answer = cell(row, "answer")
    gold = gold_of(answer, FOUR) if isinstance(answer, str) else int(answer)
    subject = str(row.get("subject") or _subject(file))
    yield with_choices(text(row, "question"), cell(row, "choices"), gold, subject=subject)


def _all_or_each(files: list[DataFile]) -> list[DataFile]:
    """The hub has every subject once in its own folder and once in `all`."""
    return [file for file in files if "all" in file.name.split("/")[:-1]] or files


def _arc(row: Any, file: DataFile) -> Iterator[Item]:
    """The original nests the options below the question and calls it a stem; the hub has two lists."""
    question = cell(row, "question")
    if isinstance(question, dict):
        options, question = cell(question, "choices"), text(question, "stem")
        labels, texts = [option["label"] for option in options], [option["text"] for option in options]
    else:
        options = cell(row, "choices")
        labels, texts = list(options["label"]), list(options["text"])
    item = with_choices(str(question).strip(), texts, gold_of(text(row, "answerKey"), labels), subject=file.stem)
    yield Item(text(row, "id"), item.question, item.choices, item.gold, item.answer)


def _arc_reader(part: str) -> Reader:
    """Both parts come together, and the original has a CSV without options beside each file."""

    def choose(files: list[DataFile]) -> list[DataFile]:
        return [file for file in files if part in str(file).lower()]

    suffixes = (".jsonl", ".parquet")
    return Reader(f"arc_{part}", "en", _arc, ("test",), ("train", "val", "dev"), suffixes=suffixes, choose=choose)


EXAMS = (
    Reader("cmmlu", "zh", lettered("zh"), ("test",), ("dev",)),
    Reader("ceval", "zh", lettered("zh"), ("val",), ("dev",)),  # the answers of its test split are not public
    Reader(
        "mmlu", "en", _mmlu, ("test",), ("dev", "val"), header=("question", *LABELS[:4], "answer"), choose=_all_or_each
    ),
    _arc_reader("easy"),
    _arc_reader("challenge"),
)


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


def _pairs(name: str, language: str) -> Reader:
    """Minimal pairs. ZhoBLiMP keeps the paradigms that people disagreed on apart."""
    suffixes = (".json", ".jsonl", ".parquet")
    return Reader(
        name, language, _pair(language), ("", "train", "test"), suffixes=suffixes, choose=_without("excluded"), **SCORED
    )


SCORED: dict[str, Any] = {"forms": ("cloze", "bits"), "default_shots": 0}
"""Options of sentences to be completed or compared are not asked for by label."""
EVERYDAY = (
    Reader("hellaswag", "en", _hellaswag, ("val",), ("train",), **SCORED),
    Reader("piqa", "en", _piqa, ("val", "dev"), ("train",), rows=_piqa_rows),
    Reader("winogrande", "en", _winogrande, ("val", "dev"), ("train",), **SCORED, choose=_largest),
    _pairs("blimp", "en"),
    _pairs("zhoblimp", "zh"),
)


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
    other = re.compile(r"(de|es|fr|it)/.*|.*_(de|es|fr|it)")
    return [file for file in files if not any(map(other.fullmatch, (file.name, file.stem)))]


OPEN = ("bits", "generate", "think")
"""Forms of open answers, those without options."""
READING = (
    Reader("c3", "zh", _c3, ("test", "val", "dev"), ("train",), default_shots=0),
    Reader("cmrc", "zh", _cmrc, ("val", "dev"), ("train",), OPEN, default_shots=0, rows=_squad_rows, choose=_one_form),
    Reader("lambada", "en", _lambada, ("test", "val", ""), forms=("bits",), default_shots=0, choose=_english),
)


def _gsm8k(row: Any, _: DataFile) -> Iterator[Item]:
    """The answer is a solution, with calculator marks `<<3*4=12>>`, and `#### 12` as its last line."""
    solution, mark, number = text(row, "answer").rpartition("####")
    if not mark:
        raise ItemError(NOT_READABLE, "the answer has no line with #### and the number")
    worked = re.sub(r"<<.*?>>", "", solution).strip()
    number = number.strip().replace(",", "")
    answer = f"{worked} The answer is {number}.".replace("\n", " ").strip()
    extra = {"number": number, "reasoning": worked.replace("\n", " ")}
    yield Item("", text(row, "question"), answer=answer, extra=extra)


def _humaneval(row: Any, _: DataFile) -> Iterator[Item]:
    extra = {"test": str(cell(row, "test")), "entry_point": text(row, "entry_point")}
    head, body = str(cell(row, "prompt")), str(cell(row, "canonical_solution"))
    yield Item(text(row, "task_id"), head, answer=body, language="code", extra=extra, shape=CODE)


BOTH: dict[str, Any] = {"forms": OPEN, "choose": _without("example", "socratic")}
"""Their repositories have model solutions, examples and (GSM8K) a second wording beside the questions."""
SOLVING = (
    Reader("gsm8k", "en", _gsm8k, ("test",), ("train",), **BOTH),
    Reader("humaneval", "code", _humaneval, ("test", ""), default_shots=0, **{**BOTH, "forms": OPEN[:2]}),
)
