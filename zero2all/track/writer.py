"""Write the metrics of a run without ever hurting it.

`log()` copies the values into a queue and returns: it does not block, does not raise, starts no process and opens no
connection. One daemon thread writes each row as a JSON line at once, so that a killed process loses at most one row
(about 7 µs per call; measured November 2026 on two cores). When the disk is full or the folder is gone, the thread
keeps trying and the queue keeps the newest `queue_rows` rows; what was dropped is counted in `problems` and written as
an event row later.

Files: `<run>/metrics/<writer>-<attempt>.jsonl`, one per process start, never reopened. Metric rows are
`{step, time, tokens, values}`, event rows `{step, time, kind, data}`. The first row is an event `segment` (who writes,
and from which step a resumed run goes on), the last row of a run that ended by itself an event `end`. NaN and the
infinities are written as the strings "NaN", "Infinity" and "-Infinity", because JSON has no numbers for them.
"""

from __future__ import annotations

import atexit
import functools
import math
import operator
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec

from zero2all.common import jsonio
from zero2all.track.status import pid_namespace

METRICS_FOLDER = "metrics"
SEGMENT_KIND = "segment"
END_KIND = "end"
FORMAT = 1
FILE_NAME = re.compile(r"(?P<writer>.+)-(?P<attempt>\d+)\.jsonl")
WRITER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
REPORT_KIND = "tracking"  # the kind of the event row that counts what the writer dropped

REPORT_EVERY_SECONDS = 1.0
CLOSE_SECONDS = 2.0  # how long `close` waits for the last rows by default; only a disk that hangs takes so long
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
MAX_PROBLEMS = 100  # different messages kept in `problems`; a million bad metric names must not fill the memory
TAKEN_OVER = "the run belongs to another process now"
END_ROW_BYTES = 16 << 10


def has_finished(folder: Path, writer: str = "train") -> bool:
    """Whether the latest attempt of `writer` in the run `folder` said that it was done."""
    try:
        found = [match for path in (folder / METRICS_FOLDER).iterdir() if (match := FILE_NAME.fullmatch(path.name))]
        attempts = [int(match["attempt"]) for match in found if match["writer"] == writer]
        with open(folder / METRICS_FOLDER / f"{writer}-{max(attempts)}.jsonl", "rb") as file:
            file.seek(-min(END_ROW_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            row = jsonio.loads(file.read().splitlines()[-1])
        return bool(row["kind"] == END_KIND and row["data"]["reason"] == "done")
    except (OSError, ValueError, LookupError, TypeError):  # no metrics, or an end that is none
        return False


P = ParamSpec("P")


def _never_raises(
    method: Callable[Concatenate[MetricsWriter, P], None],
) -> Callable[Concatenate[MetricsWriter, P], None]:
    """A way to log: an error drops the row and is counted, and in a forked child nothing is done."""

    @functools.wraps(method)
    def call(run: MetricsWriter, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            if run._fork_count == _fork_count:
                method(run, *args, **kwargs)
        except Exception as error:
            run._drop(f"{method.__name__}()", error)

    return call


class MetricsWriter:
    """The metrics of one process of one run. Create it once, call `log` every step, `close` it at the end.

    Numbers of any kind may be passed, also tensors with one element: a CUDA scalar is copied asynchronously and
    resolved in the thread. A sharded DTensor is refused, because reading it would start a collective on this rank
    alone: pass `x.full_tensor()`. In a forked child every call does nothing.
    """

    def __init__(
        self,
        folder: Path,
        writer: str = "train",
        queue_rows: int = 10_000,
        resumed_from: int | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create the file of this attempt in `<folder>/metrics`, under the next free number.

        `resumed_from` is the step of the checkpoint that a resumed run continues: what earlier attempts wrote after it
        is no longer part of the curve. An unwritable folder is remembered in `problems` and tried again. `may_write` is
        asked before each row: once it says False, another process has the run, and rows are dropped and counted.
        """
        if not WRITER_NAME.fullmatch(writer):
            raise ValueError(f"writer={writer!r} becomes part of a file name: use letters, digits, '_', '.' and '-'.")
        if queue_rows < 1:
            raise ValueError(f"queue_rows={queue_rows}: the queue must hold at least one row.")
        self.folder = Path(folder)
        self.writer = writer
        self.attempt: int | None = None
        self.resumed_from = resumed_from
        self.dropped_rows = 0  # rows that will never be in the file
        self.problems: dict[str, int] = {}  # what went wrong so far, and how often. Empty in a healthy run.

        self._may_write = may_write
        self._queue: SimpleQueue[_Row | None] = SimpleQueue()
        self._end: dict[str, Any] = {}
        self._queue_rows = queue_rows
        self._lock = threading.RLock()  # re-entrant: a signal handler may log an event in the middle of log()
        self._closed = False
        self._is_abandoned = False
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._fork_count = _fork_count
        self._fd: int | None = None
        self._torn = False
        self._reported = (0, 0)
        self._reported_at = 0.0
        self._last_step = 0
        self._thread = threading.Thread(target=self._work, name=f"track-{writer}", daemon=True)
        try:
            if may_write():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._open()
        except Exception as error:
            self._remember("opening the metrics file", error)
        try:
            self._thread.start()
            atexit.register(self._close_at_exit)
        except Exception as error:
            self._remember("starting the writer thread", error)

    @property
    def path(self) -> Path:
        """The file this run writes to."""
        return self.folder / METRICS_FOLDER / f"{self.writer}-{self.attempt or 1}.jsonl"

    @_never_raises
    def log(self, values: Mapping[str, Any], step: int, tokens: int = 0, at: float | None = None) -> None:
        """Write one row of metrics soon. `at`: seconds since the epoch; None: now."""
        kept = dict(values)
        waits: list[Any] = []
        if not _FLOATS.issuperset(map(type, kept.values())):
            kept, waits = self._snapshots(kept)
        when = time.time() if at is None else float(at)
        row = {"step": operator.index(step), "time": when, "tokens": operator.index(tokens), "values": kept}
        self._put((row, waits))

    @_never_raises
    def event(self, kind: str, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Write that something happened at `step`. `data` may be nested; objects are written as text."""
        devices: set[Any] = set()
        content = _frozen(data or {}, devices)
        row = {"step": operator.index(step), "time": time.time(), "kind": utf8_text(kind), "data": content}
        self._put((row, _copies_done(devices)))

    def close(self, timeout_seconds: float | None = None, reason: str = "done", message: str | None = None) -> None:
        """Write what is queued, for at most `timeout_seconds` (None: CLOSE_SECONDS), then say why the run ended.

        `reason`: "done"; "failed", with a `message`; "preempted", for a run that will go on. Rows not written in
        time are added to `dropped_rows`. Called at interpreter exit if the program does not.
        """
        try:
            if self._fork_count != _fork_count or self._closed:
                return
            self._closed = True
            self._end = {"reason": utf8_text(reason)}
            if message is not None:
                self._end["message"] = utf8_text(message)[:2000]
            self._closing.set()
            self._queue.put(None)
            atexit.unregister(self._close_at_exit)
            if self._thread.ident is not None:
                self._thread.join(CLOSE_SECONDS if timeout_seconds is None else timeout_seconds)
            # One row is in the hands of a thread that did not end; the queue also holds the end mark.
            left_rows = self._queue.qsize() - (0 if self._thread.is_alive() else 1)
            if self._thread.is_alive() or left_rows > 0:
                self._is_abandoned = True  # these rows are counted here, whatever the thread still does
                self._drop("close()", TimeoutError("the last rows were not written in time"), max(left_rows, 1))
        except Exception as error:
            self._remember("close()", error)

    def _close_at_exit(self) -> None:
        """The program ended without closing, perhaps with an error that nobody caught."""
        self._close_with(getattr(sys, "last_value", None), "exit")

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._close_with(error, "done")

    def _close_with(self, error: BaseException | None, reason: str) -> None:
        if error is None:
            self.close(reason=reason)
        else:
            self.close(reason="failed", message=_sentence(error))

    # ---- the caller's side ----

    def _snapshots(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The values as they are now, and the CUDA events after which they are on the host."""
        kept: dict[str, Any] = {}
        devices: set[Any] = set()
        for key, value in values.items():
            try:
                kept[key] = value if type(value) is float else _snapshot(value, devices)
            except Exception as error:
                self._remember(f"the value of {str(key)[:100]!r}", error)
        return kept, _copies_done(devices)

    def _put(self, row: _Row) -> None:
        if self._closed:
            self._drop("log() or event()", RuntimeError("called after close()"))
            return
        if self._queue.qsize() >= self._queue_rows:
            with suppress(Empty):  # the thread was faster
                self._queue.get_nowait()
                with self._lock:
                    self.dropped_rows += 1
        self._queue.put(row)

    def _drop(self, what: str, error: Exception, rows: int = 1) -> None:
        with self._lock:
            self.dropped_rows += rows
        self._remember(what, error)

    def _remember(self, what: str, error: Exception) -> None:
        message = f"{what}: {_sentence(error)}"[:500]
        with self._lock:
            if message not in self.problems and len(self.problems) >= MAX_PROBLEMS:
                message = "further problems"
            self.problems[message] = self.problems.get(message, 0) + 1

    # ---- the thread's side ----

    def _work(self) -> None:
        while (row := self._queue.get()) is not None:
            try:
                self._write(row)
            except Exception as error:
                self._drop("writing a row", error)
        try:
            self._report()
            end = {"step": self._last_step, "time": time.time(), "kind": END_KIND, "data": self._end}
            self._append(jsonio.dumps_line(end))
            if self._fd is not None:
                os.close(self._fd)
        except Exception as error:
            self._remember("ending the writer thread", error)

    def _write(self, row: _Row) -> None:
        content, waits = row
        for copied in waits:
            copied.synchronize()
        self._last_step = content["step"]
        if self._append(self._line(content)):
            if self._queue.empty() or time.monotonic() - self._reported_at > REPORT_EVERY_SECONDS:
                self._report()
        elif not self._is_abandoned:
            with self._lock:
                self.dropped_rows += 1

    def _line(self, content: dict[str, Any]) -> bytes:
        if "values" in content:
            numbers = content["values"].values()
            if _FLOATS.issuperset(map(type, numbers)) and all(map(math.isfinite, numbers)):
                try:
                    return jsonio.dumps_line(content)  # as nearly every row
                except Exception:
                    pass  # a name that is no text: it is made one below
            content["values"] = self._numbers(content["values"])
        else:
            content["data"] = _plain(content["data"])
        return jsonio.dumps_line(content)

    def _numbers(self, values: dict[str, Any]) -> dict[str, float | str]:
        numbers: dict[str, float | str] = {}
        for key, value in values.items():
            try:
                numbers[utf8_text(key)] = _json_number(value)
            except Exception as error:
                self._remember(f"the value of {str(key)[:100]!r}", error)
        return numbers

    def _report(self) -> None:
        """Write an event row when rows were dropped or a new kind of problem appeared since the last one."""
        with self._lock:
            now = (self.dropped_rows, len(self.problems))
            data = {"dropped_rows": self.dropped_rows, "problems": dict(self.problems)}
        if now != self._reported:
            self._reported, self._reported_at = now, time.monotonic()
            row = {"step": self._last_step, "time": time.time(), "kind": REPORT_KIND, "data": _plain(data)}
            self._append(jsonio.dumps_line(row))

    def _append(self, line: bytes) -> bool:
        """Hand one line to the kernel, trying until it is taken; False when the run closes before that, or is lost."""
        if not self._may_write():
            self._remember(f"writing to the {METRICS_FOLDER} folder", PermissionError(TAKEN_OVER))
            return False
        if self._torn:
            line = b"\n" + line
        sent = 0
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                # A deleted file takes writes without complaint, and they are gone: look at the link count.
                if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
                    lost = FileNotFoundError("the metrics file was deleted, its rows are lost")
                    self._remember("while running", lost)
                    fd, self._fd = self._fd, None
                    os.close(fd)
                if self._fd is None:
                    self._open()
                    line, sent = line.lstrip(b"\n"), 0
                assert self._fd is not None, "_open sets the file or raises"
                while sent < len(line):
                    sent += os.write(self._fd, line[sent:])
                self._torn = False
                return True
            except OSError as error:
                self._remember(f"writing to the {METRICS_FOLDER} folder", error)
            if self._closing.is_set():
                self._torn = self._torn or sent > 0
                return False
            self._closing.wait(delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS)

    def _open(self) -> None:
        """Create the next free file and begin it. A run folder that was deleted is not created again."""
        folder = self.folder / METRICS_FOLDER
        folder.mkdir(exist_ok=True)
        if self.attempt is None:
            matches = (FILE_NAME.fullmatch(entry.name) for entry in os.scandir(folder))
            taken = [int(match["attempt"]) for match in matches if match and match["writer"] == self.writer]
            self.attempt = max(taken, default=0) + 1
        while True:
            try:
                fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, mode=0o666)
                break
            except FileExistsError:
                self.attempt += 1
        first = {"step": self.resumed_from or 0, "time": time.time(), "kind": SEGMENT_KIND, "data": self._header()}
        header = jsonio.dumps_line(first)
        try:
            if os.write(fd, header) != len(header):
                raise OSError("there is no room for the first row")
        except BaseException:  # a file without its beginning must not stay
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise
        self._fd = fd

    def _header(self) -> dict[str, Any]:
        """Who writes this file: enough to tell later whether that process still runs."""
        return {
            "writer": self.writer,
            "attempt": self.attempt,
            "host": os.uname().nodename,
            "pid": self._pid,
            "process_start": _process_start(),
            "pid_namespace": pid_namespace(),
            "resumed_from": self.resumed_from,
            "format": FORMAT,
        }


# ---- what may be logged: the caller's side takes a copy without waiting for the device, the thread turns it into JSON


def _snapshot(value: Any, devices: set[Any]) -> Any:
    """A copy of the value, not waited for. The CUDA devices that are still copying are added to `devices`."""
    if hasattr(value, "full_tensor"):
        raise TypeError("this is a sharded DTensor; log its full_tensor()")
    if not hasattr(value, "detach"):
        return value
    value = value.detach()
    device = getattr(value, "device", None)
    kind = getattr(device, "type", None)
    if kind == "cpu":
        return value.item()
    if kind == "cuda":
        devices.add(device)
        return value.to("cpu", non_blocking=True)
    return value.clone() if hasattr(value, "clone") else value


def _copies_done(devices: set[Any]) -> list[Any]:
    """CUDA events right behind the copies; `.item()` would wait for all that was queued since, too."""
    # Only CUDA tensors put a device here, so torch is loaded; importing it for everyone else would take seconds.
    return [sys.modules["torch"].cuda.current_stream(device).record_event() for device in devices]


def _json_number(value: Any) -> float | str:
    """A JSON number, or the name of a float that JSON cannot write."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a metric must be a number, this is {type(value).__name__}")
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _frozen(value: Any, devices: set[Any]) -> Any:
    """A copy of nested `value` that later changes by the caller do not reach; device scalars stay unresolved."""
    if isinstance(value, Mapping):
        return {utf8_text(key): _frozen(inner, devices) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_frozen(inner, devices) for inner in value]
    if hasattr(value, "detach"):
        try:
            return _snapshot(value, devices)
        except Exception as error:  # several elements, or sharded
            return f"{type(value).__name__}: {error}"
    return value


def _plain(value: Any) -> Any:
    """What `_frozen` kept, as JSON can hold it: numbers, text, lists and objects; anything else by its `str`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    try:
        return _json_number(value)
    except Exception:
        return utf8_text(value)


def utf8_text(value: Any) -> str:
    """UTF-8 text, whatever comes; lone surrogates are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


# ---- the process ----

_FLOATS = frozenset((float,))

_fork_count = 0  # forks on the way to this process; cheaper than asking for the process number


def _count_fork() -> None:
    global _fork_count
    _fork_count += 1


os.register_at_fork(after_in_child=_count_fork)

_Row = tuple[dict[str, Any], list[Any]]
"""A row as it waits in the queue, and the CUDA events after which its values are on the host."""


def _process_start() -> float:
    """When this process began, in seconds since the epoch; where the system does not say, now."""
    try:
        # The name of the program, in brackets, may hold anything; the start is the 20th field behind it.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return float(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except Exception:
        return time.time()


def _sentence(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # an exception whose own text cannot be made
        return type(error).__name__
