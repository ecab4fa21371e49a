"""Judging texts that the rules keep: a score from a taught model, a function of the user, a threshold.

`FILE.py:FUNCTION` is called with each record, a dict of content, title, category, desc, others, source, file, place and
score. It returns True or None (keep), False or a reason in one word (drop), or a number (the new score). It runs as it
stands, with the user's rights, in every worker.
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

from zero2all.common.errors import BadInputError, UsageError
from zero2all.corpus.taught import ROUND, TaughtModel, find_model

if TYPE_CHECKING:
    from zero2all.corpus.clean.cleaner import Cleaned

SCORE_KEY = "z2a_score"
"""Field of `others` in which a record has its score."""
LOW_SCORE = "low_score"
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
        own = self.filter and self.filter[1:]
        return [self.model and self.model.checksum, self.min_score, own] if any(self) else []

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
                reason = LOW_SCORE
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
