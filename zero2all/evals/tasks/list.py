"""All benchmarks by name, and how to read those that were asked for.

    tasks = read_tasks(Path("benchmarks"), ["cmmlu", "arc_easy", "my-questions"])

Each is a folder below `--data`, named like the benchmark; any other name is a set of your own: JSON lines or CSV with
question, choices and answer.

    {"question": "首都是？", "choices": ["北京", "上海"], "answer": "北京"}
    {"question": "2 + 2 =", "answer": "4"}

`answer` is the text of the right choice, its letter, or (in JSON) its number from 0. Where several choices are right,
it is their letters (ABD) or a list; then all questions of the set are asked so. Without choices it is a text or a list
of texts that are all right. A CSV has the choices in columns A, B, C, … or in one column, separated by |. May be given
as well: id, context, subject, reasoning (the way to the answer, for examples), language (en, zh), and shape: `continue`
for a text that goes on with the right choice, without the words Question and Answer around it (The capital
of France is → Paris). Files with train or dev in their name give the examples of few-shot prompts.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import crc32c_of
from zero2all.common.schema import nearest_hint
from zero2all.evals.answers import PLAIN
from zero2all.evals.items import CONTINUE, LABELS, NO_ANSWER, NOT_READABLE, QUESTION, Item, ItemError, Task, check_forms
from zero2all.evals.tasks.files import DataFile, Reader, cell, data_files, gold_of, rows_of, text, with_choices
from zero2all.evals.tasks.public import EVERYDAY, EXAMS, OPEN, READING, SOLVING

READERS = {reader.name: reader for reader in (*EXAMS, *EVERYDAY, *READING, *SOLVING)}
QUESTIONS = ("question", "prompt", "problem", "text")
SHARED_FOLDERS = {"arc_easy": "arc", "arc_challenge": "arc"}
"""Benchmarks that come together, in one folder."""


def read_tasks(data: Path, names: Sequence[str], unread: dict[str, str] | None = None) -> list[Task]:
    """The tasks of these names, each from its folder below `data`; `all`: every folder there. A task whose files cannot
    be used is an error; or, where `unread` is given, it is put there with the reason, and the others are read."""
    if list(names) == ["all"]:
        names = [name for name in READERS if folder_of(data, name).is_dir()]
        known = {folder_of(data, name) for name in names}
        others = [path for path in data.glob("*") if path.is_dir() and path not in known and path.name[0] != "."]
        names += sorted(path.name for path in others)
        if not names:
            raise BadInputError(
                f"{data} has no folder with a benchmark. `z2a eval download NAME --data {data}` gets one."
            )
    folders = {name: _existing_folder(data, name) for name in names}
    found = []
    for name, folder in folders.items():
        try:
            found.append(_read(folder, name))
        except BadInputError as error:
            if unread is None:
                raise
            unread[name] = str(error)
    return found


def read_searched(path: Path) -> Task:
    """The texts of a file, or of all files of a folder, to be searched for and not to be asked: of a row the question,
    and an answer and choices if they are there; of a .txt every line."""
    files = [DataFile(path.parent, path.name)] if path.is_file() else data_files(path)
    items, problem = [], "no rows"
    for file, (number, row) in ((each, numbered) for each in files for numbered in rows_of(each)):
        try:
            if isinstance(row, ItemError):
                raise row
            question, name = text(row, *QUESTIONS), str(row.get("id") or f"{file.stem}:{number}")
            more: dict[str, Any] = {"choices": tuple(_choices(row)), "answer": str(row.get("answer") or "")}
            items.append(Item(name, question, language=_language(row, question), **more))
        except ItemError as error:
            problem, items = f"{file} row {number}: {error}", []
            break
    if not items:
        raise BadInputError(f"{path} cannot be searched for: {problem}. Expected rows with {' or '.join(QUESTIONS)}.")
    return Task(str(path), items[0].language, tuple(items))


def folder_of(data: Path, name: str) -> Path:
    """Where the files of a benchmark lie."""
    own = data / name
    return own if own.is_dir() else data / SHARED_FOLDERS.get(name, name)


def read_task(data: Path, name: str) -> Task:
    """One task."""
    return _read(_existing_folder(data, name), name)


def _existing_folder(data: Path, name: str) -> Path:
    folder = folder_of(data, name)
    if not folder.is_dir():
        here = sorted(path.name for path in data.glob("*") if path.is_dir())
        advice = f"`z2a eval download {name} --data {data}` gets it where there is a network."
        if name not in READERS:
            hint = nearest_hint(name, dict.fromkeys([*here, *READERS]))
            advice = f"{hint} A set of your own is a folder with JSON lines or CSV files (question, choices, answer)."
        raise BadInputError(f"There is no folder {folder} with the files of {name}. {advice}")
    return folder


def _read(folder: Path, name: str) -> Task:
    if name in READERS:
        return READERS[name].read(folder)
    task = _own_reader(name).read(folder)
    if any(item.golds for item in task.items):  # then every question of the set may have several right options
        items, shots = (tuple(map(_with_golds, each)) for each in (task.items, task.shots))
        task = replace(task, items=items, shots=shots)
    language, _ = Counter(item.language for item in task.items).most_common(1)[0]
    forms = task.forms if any(item.choices for item in task.items) else OPEN
    return replace(task, language=language, forms=forms)


def _with_golds(item: Item) -> Item:
    if not item.choices or item.golds:
        return item
    return replace(item, extra={**item.extra, "golds": (item.gold,)})


@dataclass(frozen=True)
class TaskQuestions:
    """Benchmarks to ask, as the command line names them."""

    names: tuple[str, ...]
    data: Path
    """Folder with one folder for each."""
    forms: tuple[str, ...] | None = None
    shots: int | None = None
    limit: int | None = None
    run_code: bool = False
    samples: int = 1
    """Answers that are drawn for an item in the forms that write."""
    think_tokens: int = 320
    chat: bool = False
    """Whether written answers are asked for in a conversation."""
    rewrites: tuple[str, ...] = ()
    """In which other ways to ask them: see `rewrites.list`."""
    made: tuple[Task, ...] = ()
    """Tasks that need no files."""

    def read(self) -> tuple[list[Task], dict[str, str]]:
        """The items of all of them, and why the files of others cannot be used; an error for a name or form that does
        not exist, and where there is nothing to ask."""
        check_forms(self.forms)
        unread: dict[str, str] = {}
        tasks = [*(read_tasks(self.data, self.names, unread) if self.names else ()), *self.made]
        if not tasks:
            raise BadInputError("\n".join(unread.values()))
        return tasks, unread

    def record(self) -> dict[str, Any]:
        """These settings as a report keeps them, with the checksum of every file."""
        folders = {folder_of(self.data, name) for name in self.names} if self.names != ("all",) else {self.data}
        paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(self.data).as_posix(): crc32c_of(path) for path in paths}
        return {**asdict(replace(self, made=())), "data": files, "made": [task.name for task in self.made]}


# ---- a set of your own ----


def _own_reader(name: str) -> Reader:
    """The reader of a set that is none of the public ones."""
    return Reader(name, "", _own, ("test", "", "val"), ("train", "dev"), is_own=True)


def _own(row: Any, _: DataFile) -> Iterator[Item]:
    question, answer, choices = text(row, "question"), cell(row, "answer"), _choices(row)
    language = _language(row, question)
    more: dict[str, Any] = {name: str(row.get(name) or "") for name in ("subject", "context")}
    more |= {"language": language, "shape": str(row.get("shape") or QUESTION)}
    if more["shape"] not in (QUESTION, CONTINUE):
        raise ItemError(NOT_READABLE, f"the shape is {more['shape']!r}, not {QUESTION} or {CONTINUE}")
    name = str(row.get("id") or "")
    answers = [str(each).strip() for each in (answer if isinstance(answer, list) else [answer])]
    extra: dict[str, Any] = {"reasoning": str(row["reasoning"])} if row.get("reasoning") else {}
    if not choices:
        if not answers:
            raise ItemError(NO_ANSWER, "it has no right answer")
        extra |= {"aliases": answers[1:]} if answers[1:] else {}
        yield Item(name, question, answer=answers[0], **more, extra=extra)
        return
    labels, is_several = LABELS[: len(choices)], isinstance(answer, list)
    if not is_several and isinstance(answer, str) and answers[0] not in choices:
        letters = _letters(answers[0], labels)
        if len(letters) > 1:  # ABD, or A, B, D
            answers, is_several = list(letters), True
    given = answer if isinstance(answer, list) and all(isinstance(each, int) for each in answer) else answers
    golds = sorted({_gold(each, choices, labels) for each in (given if is_several else [answer])})
    if not golds:
        raise ItemError(NO_ANSWER, "it has no right answer")
    if is_several:
        extra["golds"] = tuple(golds)
    yield replace(with_choices(question, choices, golds[0], **more, extra=extra), id=name)


def _gold(answer: Any, choices: list[str], labels: str) -> int:
    """The number of a right option, given as its number, its text or its letter."""
    if type(answer) is int:  # true and false are texts
        return answer
    text = str(answer).strip()
    if text in choices:
        return choices.index(text)
    text = _letters(text, labels) or text
    return gold_of(text, list(labels) if len(text) == 1 else choices)  # a text that is no option: they are listed


def _letters(text: str, labels: str) -> str:
    """The letters of an answer such as ABD, `A, B`, `a`, (B); none of another text, nor of a word in small letters."""
    plain = re.sub(r"\band\b|[和与及]", "", text.translate(PLAIN))
    letters = re.sub(r"[\s,，、;；/|&.()（）[\]'\"]", "", plain).upper()
    return "" if re.search("[a-z]{2}", plain) or not set(letters) <= set(labels) else letters


def _language(row: Any, question: str) -> str:
    return str(row.get("language") or ("zh" if re.search(r"[\u4e00-\u9fff]", question) else "en"))


def _choices(row: Any) -> list[str]:
    given = row.get("options") if row.get("choices") is None else row["choices"]
    if isinstance(given, str):
        given = given.split("|") if given else []
    if given is None:
        cells = ["" if row.get(label) is None else str(row[label]).strip() for label in LABELS]
        given = cells[: max((number for number, text in enumerate(cells, 1) if text), default=0)]
    if not isinstance(given, list) or any(each is None or isinstance(each, (list, dict)) for each in given):
        raise ItemError(NOT_READABLE, "its choices are not a list of texts")
    return [str(choice).strip() for choice in given]
