"""The runs a board knows: the folders it was given, the runs found below them, and the readers that are open.

A run has an id, `<number of the root>/<path below it>`, which is only ever looked up among the runs that were found: no
file is opened by a path of a request. Listing is cheap and repeated while somebody looks; only runs that somebody
opened are read. A reader is used by one thread at a time, and kept when the folder of its run vanishes.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.track.frame import seconds_left
from zero2all.track.listing import distinct_names
from zero2all.track.reader import RunListing, RunReader, find_runs
from zero2all.track.status import RunStatus

if TYPE_CHECKING:
    from zero2all.track.mirror import Mirror

MAX_OPEN_RUNS = 40
MAX_ANSWERS = 100  # curves kept per open run, each at most 100 KB
LISTING_SHARE = 0.1  # at most this share of the time is spent listing, however many runs there are
LISTING_SECONDS = 1.0


@dataclass(frozen=True)
class Root:
    """One place that was given on the command line."""

    label: str
    folder: Path
    mirror: Mirror | None = None

    def facts(self) -> dict[str, Any]:
        """What the page shows about it."""
        if self.mirror is not None:
            return {"label": self.label, "remote": True, "state": self.mirror.state}
        work = self.folder.parent if self.folder.name == "runs" else self.folder
        return {
            "label": self.label,
            "remote": False,
            "state": "live" if self.folder.is_dir() else "missing",
            "work": shlex.quote(str(work)),
        }


class OpenRun:
    """A run somebody looks at. `lock` is held while the reader is used."""

    def __init__(self, run_id: str, folder: Path, cache: Path | None) -> None:
        self.run_id = run_id
        self.folder = folder
        self.lock = threading.Lock()
        self.used_at = time.monotonic()
        self.is_gone = False
        self._cache = cache
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()

    @cached_property
    def reader(self) -> RunReader:
        """The reader; the first use reads the whole run, so it is made under this run's lock and no other."""
        return RunReader(self.folder, self._cache)

    def remember(self, question: Hashable, answer: Callable[[], Any]) -> Any:
        """The answer to a question about this version of the run, worked out once: pages are reloaded and shared."""
        key = (self.reader.version, question)
        if key not in self._answers:
            self._answers[key] = answer()
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return self._answers[key]

    def counts(self) -> dict[str, Any]:
        """How many events and metrics there are, and the newest values, looked up once per version."""
        counts: dict[str, Any] = self.remember("counts", self._counts)
        return counts

    def _counts(self) -> dict[str, Any]:
        reader, newest = self.reader, self.reader.series("loss").value[-1:]
        loss = float(newest[0]) if len(newest) and math.isfinite(newest[0]) else None
        counts = {"events": len(reader.events()), "metrics": len(reader.metrics())}
        return {**counts, "loss": loss, "speed": reader.tokens_per_second}


class UnknownRunError(Exception):
    """An id that no run was found under."""


class RunLibrary:
    """All runs below some roots."""

    def __init__(self, roots: Sequence[Root], cache: Path | None = None) -> None:
        self.roots = list(roots)
        self.cache = cache
        self._mirrors = [root.mirror for root in self.roots if root.mirror is not None]
        self.version = 0  # rises whenever the list of runs, or something in it, changed
        self._rows: dict[str, dict[str, Any]] = {}
        self._folders: dict[str, Path] = {}
        self._changed_at: dict[str, int] = {}
        self._open: dict[str, OpenRun] = {}
        self._lock = threading.Lock()
        self._listing_lock = threading.Lock()
        self._listed_at = -math.inf
        self._listing_took = 0.0

    def refresh_list(self, wanted: str | None = None) -> None:
        """Look for runs again, unless that was done a moment ago. Where a run is `wanted` that is not in the list, a
        shorter moment will do, and none when its folder exists."""
        with self._listing_lock:
            started = time.monotonic()
            pause = max(0.0 if wanted else LISTING_SECONDS, self._listing_took / LISTING_SHARE)
            if started < self._listed_at + pause and not (wanted and self._has_folder(wanted)):
                return
            rows: dict[str, dict[str, Any]] = {}
            folders: dict[str, Path] = {}
            for number, root in enumerate(self.roots):
                for listing in find_runs([root.folder]):
                    row = _row(number, listing)
                    rows[row["id"]] = row
                    folders[row["id"]] = listing.folder
            self._name_places(rows)
            self._take(rows, folders)
            self._listed_at = time.monotonic()
            self._listing_took = self._listed_at - started

    def _has_folder(self, run_id: str) -> bool:
        """Whether there is a folder of this name below its root; only that is asked, nothing in it is read."""
        root, _, name = run_id.partition("/")
        path = Path(name)
        if not (root.isdecimal() and int(root) < len(self.roots)) or path.is_absolute() or ".." in path.parts:
            return False
        return (self.roots[int(root)].folder / path).is_dir()

    def _name_places(self, rows: dict[str, dict[str, Any]]) -> None:
        """Runs of the same name in several places say in which they are."""
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in rows.values():
            by_name.setdefault(row["name"], []).append(row)
        for alike in by_name.values():
            if len(alike) > 1:
                for row in alike:
                    row["place"] = self._places[row["root"]]

    @cached_property
    def _places(self) -> list[str]:
        """What tells the roots apart: of remote ones the address, of folders the end of their path."""
        local = [root.folder for root in self.roots if root.mirror is None]
        names = dict(zip(local, distinct_names(local), strict=True))
        return [root.label if root.mirror is not None else names[root.folder] for root in self.roots]

    def place_of(self, run_id: str) -> str:
        """Where a run is, if another place has one of the same name; else nothing."""
        return str(self._rows.get(run_id, {}).get("place", ""))

    def _take(self, rows: dict[str, dict[str, Any]], folders: dict[str, Path]) -> None:
        changed = [run_id for run_id, row in rows.items() if self._rows.get(run_id) != row]
        changed += [run_id for run_id in self._rows if run_id not in rows]
        with self._lock:
            if changed:
                self.version += 1
                self._changed_at.update(dict.fromkeys(changed, self.version))
            self._rows, self._folders = rows, folders

    def rows(self, search: str = "", limit: int = 500) -> tuple[list[dict[str, Any]], int]:
        """The runs whose name contains `search`, the most recently written first, and how many there are."""
        wanted = search.casefold()
        found = [row for row in self._rows.values() if wanted in f"{row['id']} {row['place']}".casefold()]
        found.sort(key=lambda row: (-(row["time"] or 0), row["id"]))
        return found[:limit], len(found)

    def rows_since(self, version: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows that changed after `version` of the list, and the ids that are gone."""
        with self._lock:
            changed = [run_id for run_id, changed_at in self._changed_at.items() if changed_at > version]
            gone = [run_id for run_id in changed if run_id not in self._rows]
            return [self._rows[run_id] for run_id in changed if run_id in self._rows], gone

    @contextmanager
    def reading(self, run_id: str) -> Iterator[OpenRun]:
        """The open run `run_id`, for this thread alone."""
        run = self._opened(run_id)
        with run.lock:
            run.used_at = time.monotonic()
            yield run

    def refresh(self, run_id: str) -> tuple[int, dict[str, Any]]:
        """Read what was appended to a run; returns its version and the facts the page follows live."""
        run = self._opened(run_id)
        with run.lock:
            run.used_at = time.monotonic()
            run.reader.refresh()
            run.is_gone = not run.folder.is_dir()
            return run.reader.version, live_facts(run)

    def _opened(self, run_id: str) -> OpenRun:
        with self._lock:
            run = self._open.get(run_id)
            if run is not None:
                return run
        if run_id not in self._folders:
            self.refresh_list(wanted=run_id)
        with self._lock:
            folder = self._folders.get(run_id)
            if folder is None:
                raise UnknownRunError(run_id)
            run = self._open.setdefault(run_id, OpenRun(run_id, folder, self.cache))
            if len(self._open) > MAX_OPEN_RUNS:
                oldest = min(self._open.values(), key=lambda each: each.used_at)
                if oldest is not run and not oldest.lock.locked():
                    del self._open[oldest.run_id]
            return run

    def start(self) -> None:
        """Start the mirrors, and list the runs, so that the page finds the list ready."""
        for mirror in self._mirrors:
            mirror.start()
        threading.Thread(target=self.refresh_list, name="first-list", daemon=True).start()

    def stop(self) -> None:
        """End the mirrors."""
        for mirror in self._mirrors:
            mirror.stop()


def live_facts(run: OpenRun) -> dict[str, Any]:
    """What changes while a run is watched, in a few hundred bytes."""
    status = run.reader.status
    return {
        **_status_facts(status),
        "message": status.message,
        "left": seconds_left(run.reader, status) if status.state == "running" else None,
        "gone": run.is_gone,
        **run.counts(),
    }


def _row(number: int, listing: RunListing) -> dict[str, Any]:
    loss = listing.last_loss if listing.last_loss is not None and math.isfinite(listing.last_loss) else None
    facts = {"id": f"{number}/{listing.name}", "name": listing.name, "place": "", "root": number, "loss": loss}
    return facts | _status_facts(listing.status)


def _status_facts(status: RunStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "step": status.last_step,
        "total": status.total_steps,
        "tokens": status.last_tokens,
        "time": status.last_time,
        "attempt": status.attempt,
    }
