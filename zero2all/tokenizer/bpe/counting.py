"""Runs one counting pass over all parts, with threads and progress, and resumes it after an interruption.

One thread reads the text, the others count blocks of it; with a single thread it does both. Counts are sums of whole
numbers, so the result is the same for any number of threads, and so are the numbers of the blocks. Between two parts,
now and then, all counts are written to the scratch folder under a new name, and only then `progress.json` is replaced
by one that names it: whenever the process is killed, the next run finds a whole state and continues with the next part.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numba import njit

from zero2all.common.errors import BadInputError
from zero2all.common.files import fsync_tree, read_json, write_json
from zero2all.common.progress import Bar, progress
from zero2all.tokenizer.parts import TextPart
from zero2all.tokenizer.text import BREAK_CHARACTER, TextCleaner, well_formed

PROGRESS_NAME = "progress.json"
SAVE_SHARE = 20
"""Saving may take at most one part in this many of the time."""


class Count(Protocol):
    """The whole count."""

    def worker(self) -> Any:
        """A counter for one thread: `add(codes, number)` counts a block, `flush()` adds it all to the whole count."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the state."""

    def load(self, folder: Path, facts: dict[str, Any]) -> None:
        """Read it back."""


@dataclass(frozen=True)
class CountingRun:
    """How the passes are run."""

    parts: Sequence[TextPart]
    reader: BlockReader
    threads: int
    scratch: Path
    save_every_seconds: float
    """0 saves after every part."""
    identity: str
    """Names everything that decides the counts: parts, options, version. A state of another identity is not used."""

    def count(self, name: str, label: str, count: Count, settings: dict[str, Any], keep: bool = False) -> Counter[str]:
        """Count all parts (or those that a saved state lacks) into `count`; returns what the reader did to the text.

        With `keep`, the finished count is saved in any case.
        """
        folder = self.scratch / name
        seen: Counter[str] = Counter()
        finished = self._resume(folder, count, settings, seen)
        total = sum(part.size_bytes for part in self.parts)
        done = sum(part.size_bytes for part in self.parts[:finished])
        workers = [count.worker() for _ in range(self.threads)]
        started = saved_at = time.monotonic()
        saving = 0.0
        with progress(label, total=total, unit="B", done=done) as bar, ThreadPoolExecutor(self.threads) as threads:
            for number in range(finished, len(self.parts)):
                seen += self._count_part(self.parts[number], number, workers, threads, bar)
                last = number + 1 == len(self.parts)
                wait = max(self.save_every_seconds, SAVE_SHARE * saving) if self.save_every_seconds else 0.0
                if last or time.monotonic() - saved_at >= wait:
                    for worker in workers:
                        worker.flush()
                    before = time.monotonic()
                    # A count that took less time than that is counted again as quickly.
                    if not last or (not keep and before - started >= self.save_every_seconds):
                        self._save(folder, count, settings, seen, number + 1)
                    saved_at = time.monotonic()
                    saving = saved_at - before
        if keep and finished < len(self.parts):  # else the state that was loaded is this one
            self._save(folder, count, settings, seen, len(self.parts))
        return seen

    def _count_part(
        self, part: TextPart, first_number: int, workers: list[Any], threads: ThreadPoolExecutor, bar: Bar
    ) -> Counter[str]:
        seen: Counter[str] = Counter()
        free: SimpleQueue[Any] = SimpleQueue()
        for worker in workers:
            free.put(worker)
        reported = 0

        def work(texts: list[str], number: int) -> tuple[Counter[str], int]:
            codes, done = self.reader.codes(texts)
            worker = free.get()
            try:
                worker.add(codes, number)
            finally:
                free.put(worker)
            return done, utf8_bytes(codes)

        def note(done: Counter[str], size: int) -> None:
            nonlocal reported
            seen.update(done)
            # The part's size is an estimate; the bar follows it, not beyond.
            advance = min(size, max(0, part.size_bytes - reported))
            reported += size
            bar.advance(advance)

        waiting: deque[Future[tuple[Counter[str], int]]] = deque()
        for number, (texts, begun) in enumerate(batches(part.texts()), first_number):
            seen["documents"] += begun
            if self.threads == 1:
                note(*work(texts, number))
                continue
            waiting.append(threads.submit(work, texts, number))
            if len(waiting) > self.threads + 1:
                note(*waiting.popleft().result())
        while waiting:
            note(*waiting.popleft().result())
        bar.advance(max(0, part.size_bytes - reported))
        return seen

    def _resume(self, folder: Path, count: Count, settings: dict[str, Any], seen: Counter[str]) -> int:
        """Load the state of a run that was interrupted; the number of parts it had finished."""
        try:
            state = read_json(folder / PROGRESS_NAME)
        except FileNotFoundError:
            state = {}
        if state.get("identity") != self.identity or state.get("settings") != settings:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            return 0
        try:
            count.load(folder / state["folder"], state["count"])
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"The saved state of the training in {folder} cannot be read ({error}). Delete {self.scratch} "
                "and start again."
            ) from error
        seen.update(state["seen"])
        return int(state["finished"])

    def _save(self, folder: Path, count: Count, settings: dict[str, Any], seen: Counter[str], finished: int) -> None:
        fresh = folder / f"state-{finished:06d}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        facts = count.save(fresh)
        fsync_tree(folder)
        state = {"identity": self.identity, "settings": settings, "finished": finished, "folder": fresh.name}
        write_json(folder / PROGRESS_NAME, {**state, "count": facts, "seen": dict(seen)})
        for old in folder.glob("state-*"):
            if old != fresh:
                shutil.rmtree(old, ignore_errors=True)


# Documents to arrays of code points, in blocks of bounded size. What is repaired or removed is counted here.
#
# A block is code points as uint32, with `DOCUMENT_END` after every document. A document longer than a block is cut into
# chunks that end where a line ends and the next begins with something visible: no pretoken crosses such a place, so the
# pretokens are those of the whole document. Only a text without any such place has to be in memory whole.


BLOCK_CHARACTERS = 1 << 15
"""Characters of a block, about: 256 KB as code points, little enough to be reused from the heap."""

_SAFE_PLACE = re.compile(r"\n(?=[!-~\u4e00-\u9fff])")


class BlockReader:
    """Turns documents into blocks; may be used by several threads at once.

    `forbidden` are the control tokens: a string that spells one is removed, and the text on its two sides is not read
    as neighbours.
    """

    def __init__(self, normalisation: str = "none", forbidden: Sequence[str] = ()) -> None:
        self._cleaner = TextCleaner(normalisation, forbidden)

    def codes(self, texts: list[str]) -> tuple[np.ndarray, Counter[str]]:
        """The block of these documents, and what was done to them."""
        counts: Counter[str] = Counter()
        codes = _encoded(texts)
        # Surrogates other than our own marks at the ends mean that a document needs repair.
        if _surrogates(codes) != len(texts):
            repaired = [well_formed(text) for text in texts]
            counts["repaired_documents"] = sum(new is not old for new, old in zip(repaired, texts, strict=True))
            texts = repaired
            codes = _encoded(texts)
        cleaned = [self._cleaner.clean(text, counts) for text in texts]
        if any(new is not old for new, old in zip(cleaned, texts, strict=True)):
            codes = _encoded(cleaned)
        return codes, counts


def batches(texts: Iterable[str], characters: int = BLOCK_CHARACTERS) -> Iterator[tuple[list[str], int]]:
    """Documents in batches of about `characters` characters, and how many of them begin in each batch.

    The chunks of a long document count as one document: the first of them.
    """
    batch: list[str] = []
    held = begun = 0
    for text in texts:
        begun += 1
        for chunk in _chunks(text, characters) if len(text) > 4 * characters else (text,):
            batch.append(chunk)
            held += len(chunk)
            if held >= characters:
                yield batch, begun
                batch, held, begun = [], 0, 0
    if batch:
        yield batch, begun


def _chunks(text: str, characters: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        place = _SAFE_PLACE.search(text, start + characters)
        end = place.end() if place else len(text)
        yield text[start:end]
        start = end


@njit(cache=True, nogil=True)
def _surrogates(codes):  # type: ignore[no-untyped-def]
    """How many code points of a block are surrogates."""
    found = 0
    for code in codes:
        found += (code >> np.uint32(11)) == np.uint32(0xD800 >> 11)
    return found


@njit(cache=True, nogil=True)
def utf8_bytes(codes):  # type: ignore[no-untyped-def]
    """The size of a block in UTF-8, document ends counted as if they were text."""
    size = 0
    for code in codes:
        size += 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)
    return size


def _encoded(texts: list[str]) -> np.ndarray:
    return np.frombuffer(BREAK_CHARACTER.join([*texts, ""]).encode("utf-32-le", "surrogatepass"), np.uint32)
