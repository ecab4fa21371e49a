"""Judging texts that the rules keep: a score from a taught model, a function of the user, a threshold.

A model (`z2a corpus teach`) is one table over hashed units and pairs of units (words in lower case with one digit for a
number, signs, line breaks, single Han, kana and Hangul), so that no vocabulary is kept and any script has a score:

    quality      the mean weight of a text's units and pairs, each counted with the root of its number, by logistic
                 regression -> P(good), from 0 to 1
    reference    how often each unit and pair occurs in good text -> minus the mean bits of a unit after the one before
                 (Witten and Bell): p(w | c) = (count(c w) + kinds(c) p(w)) / (count(c) + kinds(c))

It lies in `<workspace>/taught/<kind>/`, as model.safetensors, report.json, manifest.json. `FILE.py:FUNCTION` is called
with each record, a dict of content, title, category, desc, others, source, file, place and score. It returns True or
None (keep), False or a reason in one word (drop), or a number (the new score).
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import crc32c_of
from zero2all.common.manifest import read_manifest

if TYPE_CHECKING:
    from zero2all.corpus.clean.cleaner import Cleaned

TAUGHT, MODEL_NAME = "taught", "model.safetensors"
SHAPES = {"quality": ((1 << 20) + 1, 1), "reference": ((1 << 22) + 1, 2)}
"""A weight for each row; or its count, and how many kinds follow it. The last row: the bias, or the totals."""
JUDGED_CHARS, ROUND = 4_000, 4
"""What is learned from one text, and judged of it: its beginning; and the digits of a score."""
SCALE, UNSEEN = 30.0, 2.0**-17
"""Logit of a text whose units and pairs all have the weight 1; the chance of a unit that no reference text has."""
SCORE_KEY = "z2a_score"
"""Field of `others` in which a record has its score."""
REASON = re.compile(r"[\w-]{1,40}")
FILTER_SECONDS = 60.0
"""So long may a filter take for one record."""


@dataclass(frozen=True)
class QualityConfig:
    """How texts that the rules keep are judged."""

    model: Literal["quality", "reference"] | None = None
    """Which model that `z2a corpus teach` made gives texts their scores; None: none does."""
    min_score: float | None = None
    """Texts with a lower score are dropped. None: scores are only stored."""
    filter: str | None = None
    """FILE.py:FUNCTION, your own filter; it runs as it stands. None: there is none."""

    def problems(self) -> list[str]:
        """Everything wrong with these settings, one sentence each."""
        if self.min_score is not None and self.model is None and self.filter is None:
            return ["quality.min_score is set, and nothing gives a score: set quality.model or quality.filter"]
        return []


class TaughtModel(NamedTuple):
    """A model as it goes to other processes: by its folder, whose name is its kind."""

    folder: Path
    checksum: str

    def scores(self, texts: Sequence[str]) -> list[float]:
        """The score of each text."""
        return scores_of(texts, self.folder.name, _table(self))


class Filter(NamedTuple):
    """A function and the code of its file, as it was when the build began."""

    path: Path
    name: str
    code: str


class Quality(NamedTuple):
    """What workers judge by."""

    model: TaughtModel | None = None
    min_score: float | None = None
    filter: Filter | None = None

    @property
    def decisive(self) -> list[Any]:
        """What decides; nothing where nothing is asked for, so that older corpora stay current."""
        asked = [self.model and self.model.checksum, self.min_score, self.filter and self.filter[1:]]
        return asked if any(self) else []

    def judge(self, records: Sequence[Mapping[str, Any]], done: Sequence[Cleaned]) -> list[float | None]:
        """The score of each text that the rules kept; one that is dropped here gets its reason."""
        scores: list[float | None] = [None] * len(done)
        kept = [at for at, cleaned in enumerate(done) if cleaned.reason is None]
        found = self.model.scores([done[at].text for at in kept]) if self.model else [None] * len(kept)
        for at, score in zip(kept, found, strict=True):
            reason = None
            if self.filter is not None:
                score, reason = _ask(self.filter, {**records[at], "content": done[at].text, "score": score})
            if reason is None and self.min_score is not None and score is not None and score < self.min_score:
                reason = "low_score"
            if reason is not None:
                done[at].reason, done[at].measures = reason, {} if score is None else {"score": score}
            scores[at] = score
        return scores


def find_quality(config: QualityConfig, workspace: Path) -> Quality:
    """Find what the settings name; an error where it is not there."""
    own = None
    if (text := config.filter) is not None:
        file, _, name = text.rpartition(":")
        path = Path(file).expanduser().absolute()
        try:
            own = Filter(path, name, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The filter `{text}` cannot be read ({error}). Expected FILE.py:FUNCTION.") from error
        _function(own)
    return Quality(find_model(workspace, config.model) if config.model else None, config.min_score, own)


@cache
def _function(own: Filter) -> Callable[[dict[str, Any]], Any]:
    sys.path.append(str(own.path.parent))  # for what it imports from beside it
    names: dict[str, Any] = {"__name__": own.path.stem, "__file__": str(own.path)}
    try:
        exec(compile(own.code, str(own.path), "exec"), names)
    except (Exception, SystemExit) as error:
        raise UsageError(f"The filter {own.path} cannot be loaded: {_in_words(error, own)}") from error
    if not callable(names.get(own.name)):
        raise UsageError(f"There is no function `{own.name}` in {own.path}.")
    return names[own.name]


def _ask(own: Filter, record: dict[str, Any]) -> tuple[float | None, str | None]:
    """The score and the reason that a filter gives; what it does wrong is told with the record."""
    where, score = f"{record['file']}, {record['place']}, of source {record['source']}", record["score"]
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, FILTER_SECONDS)
    try:
        answer = _function(own)(record)
    except (Exception, SystemExit) as error:
        raise BadInputError(f"The filter {own.path}:{own.name} failed at {where}: {_in_words(error, own)}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if answer is None or isinstance(answer, bool):
        return score, "filter_dropped" if answer is False else None
    if isinstance(answer, (int, float)) and abs(answer) < float("inf"):
        return round(float(answer), ROUND), None
    if isinstance(answer, str) and REASON.fullmatch(answer):
        return score, f"filter_{answer}"
    raise BadInputError(
        f"The filter {own.path}:{own.name} returned {str(answer)[:200]} at {where}. Expected: True, False, a number, "
        "or a reason of up to 40 letters, digits, - and _."
    )


def _stop(*_: object) -> None:
    raise TimeoutError(f"it took more than {FILTER_SECONDS:g} seconds")


def _in_words(error: BaseException, own: Filter) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(own.path)]
    return f"{type(error).__name__}: {error}" + (f", line {lines[-1]}" if lines else "")


def find_model(workspace: Path, kind: str) -> TaughtModel:
    """The model of a workspace; an error where there is none that can be used."""
    folder = workspace / TAUGHT / kind
    manifest = read_manifest(folder, TAUGHT, "z2a corpus teach")
    found = TaughtModel(folder, manifest["files"].get(MODEL_NAME, {}).get("crc32c", ""))
    _table(found)
    return found


@cache
def _table(model: TaughtModel) -> np.ndarray:
    """The table of a model, which the process keeps."""
    path = model.folder / MODEL_NAME
    try:
        is_same, table = crc32c_of(path) == model.checksum, load_file(path)["table"]
    except (OSError, SafetensorError, KeyError) as error:
        raise BadInputError(f"{path} cannot be read ({error}). Run `z2a corpus teach` again.") from error
    if not is_same or table.shape != SHAPES[model.folder.name]:
        raise BadInputError(f"{path} was changed after it was made. Run `z2a corpus teach` again.")
    return table


def scores_of(texts: Sequence[str], kind: str, table: np.ndarray) -> list[float]:
    """The score of each text: P(good), or minus the bits of a unit."""
    score = _certainty if kind == "quality" else _likeness
    return [round(score(text, table), ROUND) for text in texts]


def rows_of(text: str, kind: str) -> np.ndarray:
    """(units, 2): the rows of the units of a text and of its pairs; a text without units has one of its own."""
    from zero2all.corpus.dedup.text_kernels import CLASSES, find_rows

    points = np.frombuffer(text[:JUDGED_CHARS].lower().encode("utf-32-le", "surrogatepass"), np.uint32)
    rows = np.zeros((len(points) + 1, 2), np.uint32)
    return rows[: max(find_rows(points, CLASSES, SHAPES[kind][0].bit_length() - 1, rows), 1)]


def shares_of(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the different units and pairs of a text, and how much each counts: the root of its number."""
    rows, counts = np.unique(rows_of(text, "quality"), return_counts=True)
    roots = np.sqrt(counts)
    return rows, (roots * (SCALE / roots.sum())).astype(np.float32)


@cache
def _room() -> np.ndarray:
    return np.zeros(SHAPES["quality"][0], np.uint16)


def _certainty(text: str, table: np.ndarray) -> float:
    """P(good) of a text: as with `shares_of`, without sorting."""
    from zero2all.corpus.dedup.text_kernels import weigh_rows

    weights, roots = weigh_rows(rows_of(text, "quality").ravel(), table, _room())
    return float(1 / (1 + np.exp(-SCALE * weights / roots - table[-1, 0])))


def _likeness(text: str, table: np.ndarray) -> float:
    """Minus the mean bits of a unit."""
    rows = rows_of(text, "reference")
    units, kinds = table[rows[:, 0]].T.astype(np.float64)
    all_units, all_kinds = table[-1].tolist()
    chance = (units + all_kinds * UNSEEN) / (all_units + all_kinds)
    follow = np.maximum(kinds[:-1], 1)
    chance[1:] = (table[rows[1:, 1], 0] + follow * chance[1:]) / (units[:-1] + follow)
    return float(np.log2(np.minimum(chance, 1)).mean())
