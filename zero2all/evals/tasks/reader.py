"""What the readers of all benchmarks have in common: which split is asked, which gives examples, what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.evals.items import (
    DUPLICATE,
    FORMS,
    GOLD_OUTSIDE,
    NO_ANSWER,
    NOT_READABLE,
    Item,
    ItemError,
    Task,
    check_item,
)
from zero2all.evals.tasks.files import SUFFIXES, DataFile, data_files, rows_of

ReadRow = Callable[[Any, DataFile], Iterable[Item | ItemError]]
"""The items of a row (their ids may be empty), or why one of them, or the row, cannot be used."""


@dataclass(frozen=True)
class Reader:
    """How one benchmark is read from a folder."""

    name: str
    language: str
    read_row: ReadRow
    items: tuple[str, ...]
    """Splits to ask, of which the first that is there is taken; an empty name: files that name no split."""
    shots: tuple[str, ...] = ()
    """Splits with examples, likewise."""
    forms: tuple[str, ...] = FORMS
    default_shots: int = 5
    header: tuple[str, ...] | None = None
    """Columns of CSV files without a first line of names."""
    rows: Callable[[DataFile, Sequence[str] | None], Iterable[tuple[int, Any]]] = rows_of
    suffixes: tuple[str, ...] = SUFFIXES
    choose: Callable[[list[DataFile]], list[DataFile]] = list
    """Of the files that are there, those of this benchmark."""
    is_own: bool = False
    """A person's own set, which no hub has."""

    def read(self, folder: Path) -> Task:
        """The task; items that cannot be used are named and counted, a folder without any is an error."""
        files = self.choose(data_files(folder, self.suffixes))
        splits = {file.split for file in files}
        asked = next((split for split in self.items if split in splits), None)
        if asked is None:
            wanted = " or ".join(split or "a name without a split" for split in self.items)
            hint = "Check the folder." if self.is_own else f"See `z2a eval fetch {self.name}`."
            raise BadInputError(
                f"{folder} has no items of {self.name}: expected files ({', '.join(self.suffixes)}) of the split "
                f"{wanted}, found {', '.join(map(str, files[:8])) or 'none'}. {hint}"
            )
        items, problems, counts = self._read([file for file in files if file.split == asked])
        if not items:
            reasons = "; ".join(problems[:3]) or "the files are empty"
            raise BadInputError(f"{folder} has no item of {self.name} that can be asked: {reasons}.")
        examples = next((split for split in self.shots if split in splits - {asked}), None)
        shots, _, _ = self._read([file for file in files if file.split == examples and examples is not None])
        shot_ids = tuple(replace(shot, id=f"{examples}/{shot.id}") for shot in shots)
        return Task(
            self.name, self.language, tuple(items), shot_ids, self.forms, counts, tuple(problems), self.default_shots
        )

    def _read(self, files: Iterable[DataFile]) -> tuple[list[Item], list[str], Mapping[str, int]]:
        items: dict[str, Item] = {}
        problems: list[str] = []
        counts: Counter[str] = Counter()
        for file in files:
            for number, row in self.rows(file, self.header):
                for place, found in enumerate(self._row(row, file)):
                    # A row may hold several questions; one without an id of its own is named after its place.
                    place_name = f"{file.stem}:{number}{f'.{place + 1}' if place else ''}"
                    try:
                        item = _usable(found, place_name)
                        if item.id in items:
                            raise ItemError(DUPLICATE, f"there is another item {item.id}")
                        items[item.id] = item
                    except ItemError as error:
                        counts[error.reason] += 1
                        problems.append(f"{file} row {number}: {error}")
        return list(items.values()), problems, dict(counts)

    def _row(self, row: Any, file: DataFile) -> Iterable[Item | ItemError]:
        if isinstance(row, ItemError):
            return [row]
        try:
            return list(self.read_row(row, file))
        except ItemError as error:
            return [error]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return [ItemError(NOT_READABLE, f"its format is not that of {self.name} ({error!r})")]


def _usable(found: Item | ItemError, place_name: str) -> Item:
    if isinstance(found, ItemError):
        raise found
    return check_item(found if found.id else replace(found, id=place_name))


def with_choices(question: str, choices: Iterable[str], gold: int, **more: Any) -> Item:
    """An item with options, its answer filled in; an ItemError where the right one is not among them."""
    texts = tuple(choice.strip() for choice in choices)
    if not 0 <= gold < len(texts):
        raise ItemError(GOLD_OUTSIDE, f"the right answer is number {gold} (from 0) of {len(texts)} options")
    return Item("", question, texts, gold, texts[gold], **more)


def gold_of(label: str, labels: Sequence[str]) -> int:
    """The place of a label such as B among those of the options."""
    if not label:
        raise ItemError(NO_ANSWER, "it has no right answer")
    if label not in labels:
        raise ItemError(GOLD_OUTSIDE, f"the right answer is {label}; the options are {', '.join(labels)}")
    return list(labels).index(label)
