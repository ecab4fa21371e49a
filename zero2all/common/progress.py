"""Progress of long work: a live bar on a terminal, a line every few seconds in a log file.

    with progress("pack", total=bytes_in, unit="B") as bar:
        bar.advance(len(block))

The bar shows the share done, the speed in `unit` per second and the time left. `note` adds a short live text such
as the current loss.
"""

import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from zero2all.common.language import padded, translate

LOG_EVERY_SECONDS = 10.0
BRIEF_LOG_EVERY_SECONDS = 60.0
WIDE_COLUMNS = 72
"""Narrower terminals get no room for the bar itself and its note: both would be broken over lines."""
TEXT_MARKS = "\n\t\u3000\xa0\u200c\u200d"
"""Line ends, tabs, wide spaces and joiners: what a printed document keeps beside printable characters."""

SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
SMALLEST, LARGEST = 1e-30, 1e30
"""Products of a few such numbers are still numbers."""


class Bar:
    """What a stage may do with its bar. This one shows nothing."""

    def advance(self, amount: float, note: str = "") -> None:
        """Count `amount` more units as done."""

    def set_total(self, total: float) -> None:
        """Change the total."""


_is_brief = False


@contextmanager
def brief_progress() -> Iterator[None]:
    """While the block runs, bars vanish when they are done, and log files get fewer lines."""
    global _is_brief
    before, _is_brief = _is_brief, True
    try:
        yield
    finally:
        _is_brief = before


@contextmanager
def progress(label: str, total: float | None, unit: str, done: float = 0, quiet: bool = False) -> Iterator[Bar]:
    """A bar named `label`; `done` units were finished before and do not count in the speed. `quiet` shows nothing."""
    label, unit = translate(label), translate(unit)
    if quiet:
        yield Bar()
    elif sys.stderr.isatty():
        with _rich_bar(label, total, unit, done) as bar:
            yield bar
    else:
        log = _LogBar(label, total, unit, done)
        yield log
        if not _is_brief:
            log.finish()


def say(line: str) -> None:
    """Log a line at level INFO, by the logger of the module that calls. `show_log` is how z2a shows it."""
    name = sys._getframe(1).f_globals.get("__name__", "")
    logging.getLogger(name if name.startswith("zero2all.") else "zero2all").info("%s", line)


class _TerminalHandler(logging.Handler):
    """Prints on the stderr of the moment; a closed one (`2>&1 | head`) does not end the work."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(translate(record.getMessage()), file=sys.stderr, flush=True)


def show_log() -> None:
    """From here on, what this package logs is printed on stderr, in the person's language. For programs: who imports
    zero2all as a library sets handlers and levels of the logger `zero2all` as usual."""
    logger = logging.getLogger("zero2all")
    if not any(isinstance(each, _TerminalHandler) for each in logger.handlers):
        logger.addHandler(_TerminalHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # or a library that configures logging would make each line appear twice


def tell(text: str, flush: bool = False) -> None:
    """Print a result on stdout, in the person's language."""
    print(translate(text), flush=flush)


def human_count(count: float) -> str:
    """12345678 -> '12.3M'."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= (limit if suffix == "k" else 0.99995 * limit):  # 999,999 is 1.0M, not 1000.0k
            return f"{count / limit:.1f}{suffix}"
    return f"{count:.0f}"


def scaled(text: str, scales: Mapping[str, float] = SCALES) -> float:
    """A number from 0 on with a unit behind it, as `scales` has them; ValueError for anything else."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", re.sub("[,_]", "", text))
    value = float(found[1]) * scales[found[2]] if found and found[2] in scales else float("nan")
    if value != 0 and not SMALLEST <= value <= LARGEST:
        raise ValueError(text)
    return value


def counted(count: int, noun: str) -> str:
    """1, "step" -> '1 step'; 12345, "step" -> '12,345 steps'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def terminal_safe(text: str, instead: str = "\N{REPLACEMENT CHARACTER}", keep: str = "") -> str:
    """The text with `instead` for every character that a terminal could obey, and for line ends; `keep` may stay."""
    return "".join(char if char.isprintable() or char in keep else instead for char in text)


def human_seconds(seconds: float) -> str:
    """75 -> '1m15s'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class _LogBar(Bar):
    """One line now and then, for output that is a file or a pipe."""

    def __init__(self, label: str, total: float | None, unit: str, done: float) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.done_at_start = done
        self.started = self.last_line = time.monotonic()
        self.note = ""
        self.is_new = True

    def advance(self, amount: float, note: str = "") -> None:
        self.done, self.is_new = self.done + amount, True
        self.note = note or self.note
        now = time.monotonic()
        if now - self.last_line >= (BRIEF_LOG_EVERY_SECONDS if _is_brief else LOG_EVERY_SECONDS):
            self.last_line = now
            self._print(now)

    def set_total(self, total: float) -> None:
        self.total = total

    def finish(self) -> None:
        if self.is_new:  # else the last line says the same
            self._print(time.monotonic())

    def _print(self, now: float) -> None:
        self.is_new = False
        elapsed = now - self.started
        speed = (self.done - self.done_at_start) / elapsed if elapsed > 0 else 0.0
        parts = [f"{padded(self.label, 10)} {human_count(self.done)}"]
        if self.total:
            parts[0] += f"/{human_count(self.total)} {self.unit} ({min(1.0, self.done / self.total):.0%})"
        else:
            parts[0] += f" {self.unit}"
        parts.append(f"{human_count(speed)} {self.unit}/s")
        if self.total and speed > 0 and self.done < self.total:
            parts.append(translate(f"{human_seconds((self.total - self.done) / speed)} left"))
        if self.note:
            parts.append(translate(self.note))
        say("  ".join(parts))


class _RichBar(Bar):
    """The live bar; rich is imported only when there is a terminal to draw on."""

    def __init__(self, live: Any, task: Any) -> None:
        self.live, self.task = live, task

    def advance(self, amount: float, note: str = "") -> None:
        self.live.update(self.task, advance=amount, **({"note": translate(note)} if note else {}))

    def set_total(self, total: float) -> None:
        self.live.update(self.task, total=total)


@contextmanager
def _rich_bar(label: str, total: float | None, unit: str, done: float) -> Iterator[_RichBar]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{human_count(speed)} {unit}/s", style="cyan")

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        TextColumn("{task.percentage:>3.0f}%"),
        SpeedColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    ]
    if console.width >= WIDE_COLUMNS:
        columns = [columns[0], BarColumn(bar_width=30), *columns[1:], TextColumn("{task.fields[note]}", style="dim")]
    live = Progress(*columns, console=console, refresh_per_second=5, transient=_is_brief)
    live.start()
    console.show_cursor()  # a process that is stopped or killed could not give it back
    try:
        yield _RichBar(live, live.add_task(padded(label, 10), total=total, completed=int(done), note=""))
    finally:
        with suppress(OSError):  # the terminal may be gone, and how the work ended must not depend on it
            live.stop()
