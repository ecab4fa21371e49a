"""A run in the terminal: the loss curve, channels, speed, memory, time left, the last events; once, or live.

`frame` draws for a size that is given and knows nothing of terminals, so a test can look at what it drew. Everything
that comes from a run (names, event texts) is printed without control characters.

`watch` asks the reader for new rows twice a second; it draws a frame when there were some, when the window changed its
size, or after a second. It uses the terminal's second screen, so what was there before comes back.
"""

from __future__ import annotations

import math
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.cells import set_cell_size
from rich.text import Text

from zero2all.common.language import flush_right, padded
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, human_count, human_seconds, terminal_safe
from zero2all.track.bins import MIN_POINTS
from zero2all.track.listing import TRAIN_WRITER, median_step_seconds
from zero2all.track.reader import Event, RunReader, RunStatus, Series
from zero2all.track.writer import END_KIND, SEGMENT_KIND

if TYPE_CHECKING:
    from rich.console import Console

MIN_COLUMNS, MIN_ROWS = 40, 10
WIDE_COLUMNS = 120  # from here on the figures stand beside the curve instead of below it
SIDE_COLUMNS = 46
LABEL_COLUMNS = 9
CHANGE_ROWS = 100

COLORS = {"running": "green", "finished": "blue", "stopped": "yellow", "stalled": "yellow", "crashed": "red"}
LAYER_STYLES = {-1: "", 0: "blue", 1: "bold cyan"}  # nothing drawn, values as logged, smoothed
REDRAW_SECONDS = 1.0
LOOK_SECONDS = 0.5
REST_PER_FRAME = 4  # pauses are this many times as long as drawing a frame took
FINISH_KIND = "finish"
ALARM_KINDS = frozenset({"spike", "warning", "rollback", "skip", "quarantine"})


def frame(reader: RunReader, columns: int, rows: int, now: float, note: str = "") -> list[Text]:
    """One picture: exactly `rows` lines, none wider than `columns`. `note` is shown in the last line."""
    columns, rows = max(columns, MIN_COLUMNS), max(rows, MIN_ROWS)
    status = reader.status
    head = [_headline(reader, status, columns, now)]
    foot = [_footline(reader, status, note)]
    room = rows - len(head) - len(foot)
    if columns >= WIDE_COLUMNS:
        chart = _chart(reader, columns - SIDE_COLUMNS - 2, room)
        side = _figures(reader, status, SIDE_COLUMNS, room // 2)
        side += [Text(), *_events(reader, SIDE_COLUMNS, room - len(side) - 1)]
        body = _beside(chart, side, columns - SIDE_COLUMNS - 2, room)
    else:
        below = max(4, min(10, room // 2))
        body = _chart(reader, columns, room - below)
        half = (columns - 2) // 2
        figures = _figures(reader, status, half, below)
        body += _beside(figures, _events(reader, columns - half - 2, below), half, below)
    lines = head + body[:room] + [Text()] * (room - len(body)) + foot
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def print_frame(reader: RunReader, console: Console, note: str = "") -> None:
    """Print one picture as large as the terminal (80 x 24 where there is none) and be done."""
    size = console.size
    for line in frame(reader, size.width, size.height - 1, time.time(), note):  # one line for the prompt
        console.print(line, soft_wrap=True)


def watch(reader: RunReader, console: Console, note: Callable[[], str] = str) -> None:
    """Show the run until Ctrl-C or `q`. `note` is asked before each frame for a remark, e.g. about the connection."""
    from rich.console import Group
    from rich.live import Live

    drawn_at, drawn_size, cost = 0.0, (0, 0), 0.0
    with _single_keys() as pressed, Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        pending = True
        while True:
            is_new = reader.refresh()
            size = (console.size.width, console.size.height)
            began = time.monotonic()
            pending |= is_new or size != drawn_size or began - drawn_at >= REDRAW_SECONDS
            if pending and began - drawn_at >= REST_PER_FRAME * cost:
                live.update(Group(*frame(reader, *size, time.time(), note())), refresh=True)
                drawn_at, drawn_size, pending = time.monotonic(), size, False
                cost = drawn_at - began
            if pressed(LOOK_SECONDS) in ("q", "Q"):
                return


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key for some seconds; without a terminal to read from it only waits."""
    if not sys.stdin.isatty():
        yield _only_wait
        return
    import termios
    import tty

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)

    def pressed(seconds: float) -> str:
        if not select.select([handle], [], [], seconds)[0]:
            return ""
        key = os.read(handle, 64)
        if not key:  # the terminal is gone
            raise KeyboardInterrupt
        return key[:1].decode("latin-1")

    tty.setcbreak(handle)
    try:
        yield pressed
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


# ---- the parts of a frame ----


def _headline(reader: RunReader, status: RunStatus, columns: int, now: float) -> Text:
    line = Text(_clean(reader.name)[: max(12, columns // 3)], style="bold")
    line.append(f"  ● {t(status.state)}", style=COLORS.get(status.state, ""))
    if status.last_step is not None:
        step = f"{status.last_step:,}"
        if status.total_steps:
            step = f"{status.last_step:,}/{status.total_steps:,} ({status.last_step / status.total_steps:.0%})"
        line.append("  " + t(f"step {step}"))
    left = seconds_left(reader, status)
    if left is not None and status.state == "running":
        line.append("  " + t(f"{human_seconds(left)} left"), style="cyan")
    if status.attempt is not None and status.attempt > 1:
        line.append("  " + t(f"attempt {status.attempt}"), style="dim")
    if status.last_time is not None and status.state != "finished":
        line.append("  " + t(f"updated {human_seconds(now - status.last_time)} ago"), style="dim")
    return line


def _footline(reader: RunReader, status: RunStatus, note: str) -> Text:
    line = Text()
    if status.message:
        line.append(_clean(t(status.message)), style=COLORS.get(status.state, ""))
    problems = sum(reader.problems.values())
    if problems:
        line.append("  " if line else "")
        line.append(t(f"{problems:,} lines or values left out (the board lists them)"), style="red")
    if note:
        line.append(("  " if line else "") + _clean(t(note)), style="dim")
    return line


def _chart(reader: RunReader, columns: int, rows: int) -> list[Text]:
    """The loss: values as logged dim, smoothed bright; the y axis on the left, steps below."""
    metric = "loss" if "loss" in reader.metrics() else next(iter(reader.metrics()), None)
    width, height = columns - LABEL_COLUMNS, rows - 2
    if metric is None or height < 2 or width < 10:
        return [Text(t("no metrics yet"), style="dim")]
    series = reader.series(metric)
    points = max(1, len(series))
    smoothing = points / MIN_POINTS if points >= 4 * MIN_POINTS else None
    bins = reader.bins(metric, count=2 * width, smoothing=smoothing)
    low, high = _y_range(bins.minimum.astype(float), bins.maximum.astype(float))
    x_range = (float(series.step[0]), float(max(series.step[-1], series.step[0] + 1)))
    canvas = Canvas(width, height, x_range, (low, high), layers=2)
    canvas.curve(bins.x, bins.minimum.astype(float), bins.maximum.astype(float), layer=0 if smoothing else 1)
    if bins.smooth is not None:
        canvas.curve(bins.x, bins.smooth.astype(float), layer=1)

    title = Text(t("training loss") if metric == "loss" else _clean(metric), style="bold")
    last = float(series.value[-1])
    title.append(f" {last:.4f}", style="red" if not math.isfinite(last) else "cyan")
    if bins.smooth is not None and math.isfinite(bins.smooth[-1]):
        title.append("  " + t(f"smoothed {bins.smooth[-1]:.4f}"), style="dim")
    above = int((series.value[np.isfinite(series.value)] > high).sum())
    not_finite = int((~np.isfinite(series.value)).sum())
    spikes = sum(event.kind == "spike" for event in reader.events())
    for count, words, style in (
        (above, f"{above:,} points above the chart", "yellow"),
        (not_finite, f"{not_finite:,} not finite", "red"),
        (spikes, counted(spikes, "spike"), "yellow"),
    ):
        if count:
            title.append(f"  {t(words)}", style=style)
    lines = [title]
    tops = canvas.top_layers()
    for number, row in enumerate(canvas.lines()):
        is_labelled = number % 3 == 0 or number == height - 1
        label = _label(high - (high - low) * number / max(1, height - 1)) if is_labelled else ""
        line = Text().append(label.rjust(LABEL_COLUMNS - 1) + ("┤" if label else "│"), style="dim")
        _append_colored(line, row, tops[number])
        lines.append(line)
    first_step, last_step = f"{int(x_range[0]):,}", f"{int(series.step[-1]):,}"
    gap = max(1, width - len(first_step) - len(last_step))
    lines.append(Text(" " * LABEL_COLUMNS + first_step + " " * gap + last_step, style="dim"))
    return lines


def _append_colored(line: Text, row: str, tops: NDArray[np.int64]) -> None:
    start = 0
    for end in range(1, len(row) + 1):
        if end == len(row) or tops[end] != tops[start]:
            blank = tops[start] < 0  # spaces: some fonts draw the braille blank as eight faint dots
            line.append(" " * (end - start) if blank else row[start:end], style=LAYER_STYLES[tops[start]])
            start = end


def _y_range(low: NDArray[np.float64], high: NDArray[np.float64]) -> tuple[float, float]:
    """From the lowest value to a top that the steep start and single spikes do not decide: they touch the edge."""
    tops = high[np.isfinite(high)]
    bottoms = low[np.isfinite(low)]
    if not len(tops):
        return 0.0, 1.0
    floor = float(bottoms.min())
    later = tops[len(tops) // 10 :]
    top = min(float(tops.max()), floor + 1.3 * (float(np.quantile(later, 0.98)) - floor))
    if top <= floor:
        top = floor + max(abs(floor) * 0.01, 1e-6)
    return floor, top


def _figures(reader: RunReader, status: RunStatus, columns: int, rows: int) -> list[Text]:
    """A table of channels, then the machine's figures, as many as there is room for."""
    metrics = reader.metrics()
    vitals = _vitals(reader, metrics, status)
    channels = _channels(reader, metrics)
    room = max(2, rows - min(len(vitals), rows // 2 - 1))
    lines = []
    if channels:
        lines.append(Text(f"{'':<8}{flush_right(t('training'), 15)}{flush_right(t('held-out'), 16)}", style="dim"))
        heading = flush_right(t("loss"), 7) + f"{'bpb':>7}" + flush_right(t("change"), 8) + f"{'bpb':>9}"
        lines.append(Text(padded(t("channel"), 8) + heading, style="dim"))
        lines += [_channel_line(channel) for channel in channels[: room - 2]]
    lines += vitals[: rows - len(lines)]
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


@dataclass(frozen=True)
class _Channel:
    """The newest figures of a channel, or of all together."""

    name: str
    loss: float | None  # training loss, as is its change
    change: float | None
    bpb: float | None = None  # bits per byte of the training text
    held_out_bpb: float | None = None


def _channel_line(channel: _Channel) -> Text:
    line = Text(set_cell_size(_clean(channel.name), 7) + " ")
    bad = channel.loss is not None and not math.isfinite(channel.loss)
    line.append(f"{_figure(channel.loss):>7}", style="red" if bad else "cyan")
    line.append(f"{_figure(channel.bpb):>7}")
    shown = "" if channel.change is None or not math.isfinite(channel.change) else f"{channel.change:+.4f}"[:7]
    line.append(f"{shown:>8}", style="green" if shown.startswith("-") else "yellow")
    line.append(f"{_figure(channel.held_out_bpb):>9}")
    return line


def _channels(reader: RunReader, metrics: list[str]) -> list[_Channel]:
    """The whole and every channel."""
    rows = []
    if "loss" in metrics:
        series = reader.series("loss")
        rows.append(_Channel(t("all"), _last(series), change_of(series)))
    prefixes = ("loss/", "bpb/", "eval/valid/bpb/")
    names = {metric.removeprefix(prefix) for prefix in prefixes for metric in metrics if metric.startswith(prefix)}
    for name in sorted(names):
        found = [reader.series(prefix + name) for prefix in prefixes]
        loss, bpb, held_out = (_last(each) if len(each) else None for each in found)
        rows.append(_Channel(name, loss, change_of(found[0]), bpb, held_out))
    return rows


def _vitals(reader: RunReader, metrics: list[str], status: RunStatus) -> list[Text]:
    figures: list[tuple[str, str]] = []
    if "tokens_per_second" in metrics:
        figures.append((t("tokens/s"), human_count(reader.tokens_per_second or 0)))
    for metric in (metric for metric in metrics if metric.split("/")[0] == "mfu"):
        figures += [(f"MFU {metric[4:]}", f"{_last(reader.series(metric)):.1%}")]
    # Not memory/checkpoint_stall: how long a checkpoint in memory stops a step.
    for metric in (metric for metric in metrics if re.match("memory/(?!checkpoint_)", metric)):
        figures += [(t(f"memory {metric[7:]}"), _memory(metric, _last(reader.series(metric))))]
    if status.last_tokens:
        figures.append((t("tokens"), human_count(status.last_tokens)))
    for metric, label in (("lr", t("learning rate")), ("grad_norm", t("gradient norm"))):
        if metric in metrics:
            figures.append((label, f"{_last(reader.series(metric)):.3g}"))
    named = [(set_cell_size(_clean(label), 20), value) for label, value in figures]
    return [Text().append(label + " ", style="dim").append(value) for label, value in named]


def _events(reader: RunReader, columns: int, rows: int) -> list[Text]:
    """The last events, the newest first."""
    if rows <= 0:
        return []
    events = [event for event in reader.events() if not _is_quiet(event)]
    lines = [Text(t("last events") if events else t("no events yet"), style="dim")]
    for event in reversed(events[-(rows - 1) :] if rows > 1 else []):
        line = Text().append(f"{event.step:>8,} ", style="dim")
        kind = "finished" if event.kind == FINISH_KIND else event.kind
        line.append(_clean(t(kind)), style="yellow" if kind in ALARM_KINDS else "")
        line.append(f" {_summary(event)}")
        line.truncate(columns, overflow="ellipsis")
        lines.append(line)
    return lines


def _is_quiet(event: Event) -> bool:
    """The writers' own marks: the end of a training that finished is another event, that of an evaluation no part."""
    is_told = event.writer != TRAIN_WRITER or event.data.get("reason") == "done"
    return event.kind == SEGMENT_KIND or (event.kind == END_KIND and is_told)


def _summary(event: Event) -> str:
    if event.kind == FINISH_KIND and {"tokens", "seconds"} <= event.data.keys():
        return t(f"{event.data['tokens']:,} tokens in {human_seconds(event.data['seconds'])}")
    if event.kind == END_KIND and event.data.get("message"):
        return _clean(t(str(event.data["message"]).removeprefix("PreemptedError: ")))
    parts = []
    for key, value in event.data.items():
        if isinstance(value, float):
            parts.append(f"{t(key)} {value:.4g}")
        elif isinstance(value, str | int | bool):
            parts.append(t(key) if value is True else f"{t(key)} {value}")
        elif isinstance(value, list) and value and isinstance(value[0], str):
            words = "; ".join(t(str(item)) for item in value)
            parts.append(words if key == "notes" else f"{key} {words}")
    return _clean(", ".join(parts))[:200]


def _beside(left: list[Text], right: list[Text], left_columns: int, rows: int) -> list[Text]:
    lines = []
    for number in range(rows):
        line = left[number].copy() if number < len(left) else Text()
        line.truncate(left_columns, overflow="ellipsis", pad=True)
        if number < len(right):
            line.append("  ")
            line.append_text(right[number])
        lines.append(line)
    return lines


# ---- figures ----


def seconds_left(reader: RunReader, status: RunStatus) -> float | None:
    """How long the rest takes at the pace of the last rows; None when the run has no end or no pace."""
    if not status.total_steps or status.last_step is None:
        return None
    series = reader.series("loss")
    pace = median_step_seconds(series.step[-257:], series.time[-257:])
    return None if pace is None else max(0.0, pace * (status.total_steps - status.last_step))


def change_of(series: Series) -> float | None:
    """How far the mean of the last rows (up to 100, at most a quarter) is from that of as many before them."""
    count = min(CHANGE_ROWS, len(series) // 4)
    if count < 1:
        return None
    late, early = series.value[-count:], series.value[-2 * count : -count]
    late, early = late[np.isfinite(late)], early[np.isfinite(early)]
    return float(late.mean() - early.mean()) if len(late) and len(early) else None


def _last(series: Series) -> float:
    return float(series.value[-1]) if len(series) else math.nan


def _memory(metric: str, value: float) -> str:
    if not math.isfinite(value):
        return "?"
    if metric.endswith("gib"):
        return f"{value:.1f} GiB"
    if metric.endswith(("share", "fraction")):
        return f"{value:.0%}"
    return f"{human_count(value)}B" if value >= 1e6 else f"{value:.4g}"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}"[:6] if math.isfinite(value) and abs(value) < 1e5 else f"{value:.4g}"[:6]


def _label(value: float) -> str:
    return f"{value:.3f}"[: LABEL_COLUMNS - 2] if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.1e}"


def _clean(text: str) -> str:
    return terminal_safe(str(text), "?")


# Curves in a terminal: every character is 2 x 4 dots of Unicode's braille block, so 80 columns show 160 points.
#
# A character shows the dots of all layers, in the color of the topmost. Points are joined, and a column with several is
# filled from the lowest to the highest, so a one-step spike is a line and not a gap.


BLANK = 0x2800
DOT_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
"""The bit of each dot in a character's code, by row and column."""


class Canvas:
    """A drawing of `columns` x `rows` characters; the world inside is given by the two ranges."""

    def __init__(
        self, columns: int, rows: int, x_range: tuple[float, float], y_range: tuple[float, float], layers: int = 1
    ) -> None:
        self.columns, self.rows = max(columns, 1), max(rows, 1)
        self.x_range, self.y_range = x_range, y_range
        self._dots = np.zeros((layers, 4 * self.rows, 2 * self.columns), dtype=bool)

    def curve(
        self, x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64] | None = None, layer: int = 0
    ) -> None:
        """Draw through the points; with `high`, a band. Values outside the canvas are drawn at its edge."""
        high = low if high is None else high
        known = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
        width, height = 2 * self.columns, 4 * self.rows
        across = _place(x[known], self.x_range, width)
        top, bottom = (height - 1 - _place(edge[known], self.y_range, height) for edge in (high, low))
        inside = (across >= 0) & (across < width)
        top, bottom = (np.clip(edge[inside], 0, height - 1) for edge in (top, bottom))
        across = across[inside]
        for column, first, last in zip(across, top, bottom, strict=True):
            self._dots[layer, first : last + 1, column] = True
        middle = (top + bottom) / 2
        for here, there in pairwise(range(len(across))):
            self._join(layer, int(across[here]), float(middle[here]), int(across[there]), float(middle[there]))

    def _join(self, layer: int, x0: int, y0: float, x1: int, y1: float) -> None:
        count = math.ceil(max(abs(x1 - x0), abs(y1 - y0), 1))
        columns = np.linspace(x0, x1, count + 1).round().astype(np.int64)
        rows = np.linspace(y0, y1, count + 1).round().astype(np.int64)
        self._dots[layer, rows, columns] = True

    def lines(self) -> list[str]:
        """The drawing, top row first."""
        cells = self._dots.any(axis=0).reshape(self.rows, 4, self.columns, 2)
        codes = BLANK + np.einsum("rdcs,ds->rc", cells.astype(np.int64), DOT_BITS)
        return ["".join(map(chr, row)) for row in codes.tolist()]

    def top_layers(self) -> NDArray[np.int64]:
        """For each character the highest layer with a dot in it, -1 for none: (rows, columns)."""
        filled = self._dots.reshape(len(self._dots), self.rows, 4, self.columns, 2).any(axis=(2, 4))
        numbers = np.arange(len(self._dots))[:, None, None]
        highest: NDArray[np.int64] = np.where(filled, numbers, -1).max(axis=0)
        return highest


def _place(values: NDArray[np.float64], bounds: tuple[float, float], dots: int) -> NDArray[np.int64]:
    """The dot of each value along an axis of `dots` dots; outside the bounds it is outside the dots too."""
    first, last = bounds
    span = (last - first) or 1.0
    share = np.clip((values - first) / span, -2.0, 3.0)  # far outside is far enough: no overflow
    return np.floor(share * (dots - 1) + 0.5).astype(np.int64)
