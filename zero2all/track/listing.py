"""Find runs below some folders and say how each stands, without reading whole files.

Of a run only the head and the tail of its latest metrics file are read, so 200 runs take a fraction of a second
however long they are.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.files import read_regular
from zero2all.common.yamlio import LARGEST_BYTES
from zero2all.track.metrics_file import read_number, read_row
from zero2all.track.status import Evidence, RunStatus, is_writer_alive, judge
from zero2all.track.writer import END_KIND, FILE_NAME, METRICS_FOLDER, SEGMENT_KIND

TRAIN_WRITER = "train"
CONFIG_FILE = "config.yaml"
HEAD_BYTES = 16 << 10
TAIL_BYTES = (16 << 10, 2 << 20, 64 << 20)  # how much of the end is read: more only when the first holds no metric row
TAIL_ROWS = 512
MAX_DEPTH = 4
MAX_FOLDERS = 50_000  # folders looked into below one root, so that pointing at a whole disk ends
ANNEAL_FILE = "anneal.json"
TOTAL_STEPS = re.compile(r"^train:[^\n]*\n(?:(?:[ #][^\n]*)?\n)*?  steps: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class RunListing:
    """One run in a list."""

    name: str  # its path below the root it was found in; the folder's own name where it is the root
    folder: Path
    status: RunStatus
    last_loss: float | None


def find_runs(roots: Sequence[Path]) -> list[RunListing]:
    """Every run at or below `roots`, in order of root and name; a root that does not exist has none."""
    listings = []
    seen: set[Path] = set()
    for root in roots:
        for folder in sorted(_run_folders(Path(root))):
            if (real := folder.resolve()) not in seen:
                seen.add(real)
                name = folder.relative_to(root).as_posix() if folder != Path(root) else real.name
                listings.append(RunListing(name, folder, *read_status(folder)))
    return listings


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, and as many of the folders above it as tell it from the others."""
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for parts in paths:
        others = [other for other in paths if other != parts]
        length = 1
        while length < len(parts) and any(other[-length:] == parts[-length:] for other in others):
            length += 1
        names.append("/".join(parts[-length:]).replace("//", "/"))
    return names


def metrics_files(folder: Path) -> list[tuple[Path, str, int]]:
    """Every metrics file in a `metrics` folder, by writer and then by attempt as a number (10 comes after 9)."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = FILE_NAME.fullmatch(entry.name)
                if match and entry.is_file():
                    found.append((folder / entry.name, match["writer"], int(match["attempt"])))
    except OSError:
        return []
    return sorted(found, key=lambda each: each[1:])


def total_steps(folder: Path) -> int | None:
    """The step a run ends with: where its anneal ends, else `train.steps` of its config, found without parsing all."""
    try:
        anneal = jsonio.loads_strict(read_regular(folder / ANNEAL_FILE, HEAD_BYTES))
        return int(anneal["from_step"]) + int(anneal["steps"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        pass  # no anneal, or one that has not begun
    try:
        match = TOTAL_STEPS.search(read_regular(folder / CONFIG_FILE, LARGEST_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None
    return int(match[1]) if match and len(match[1]) < 19 else None


def _run_folders(root: Path) -> Iterator[Path]:
    waiting = [(root, 0)]
    looked_into = 0
    while waiting and looked_into < MAX_FOLDERS:
        folder, depth = waiting.pop()
        looked_into += 1
        try:
            with os.scandir(folder) as entries:
                below = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        except OSError:
            continue
        # Programs have folders called "metrics" too: only one with our files, or beside a config, is a run.
        if METRICS_FOLDER in below and (metrics_files(folder / METRICS_FOLDER) or (folder / CONFIG_FILE).is_file()):
            yield folder
        elif depth < MAX_DEPTH:
            waiting += [(folder / name, depth + 1) for name in below]


def read_status(folder: Path) -> tuple[RunStatus, float | None]:
    """The status of the run in `folder` and its last loss, from the head and the tail of its latest file."""
    files = metrics_files(folder / METRICS_FOLDER)
    latest = latest_attempt(files)
    if latest is None:
        return RunStatus(total_steps=total_steps(folder), message="There are no metrics yet."), None
    path, _, attempt = latest
    try:
        header, alive, rows, modified = _ends(path)
    except OSError as error:
        return RunStatus(attempt=attempt, message=f"{path.name} cannot be read ({error.strerror})."), None
    metric_rows = [row for row in rows if "values" in row]
    last: dict[str, Any] = metric_rows[-1] if metric_rows else rows[-1] if rows else {}
    last_time = float(rows[-1]["time"]) if rows else None
    end = rows[-1]["data"] if rows and rows[-1].get("kind") == END_KIND else None
    steps, times = [row["step"] for row in metric_rows], [float(row["time"]) for row in metric_rows]
    state, message = judge(Evidence(header, end, last_time, modified, median_step_seconds(steps, times), alive))
    status = RunStatus(state, last.get("step"), last_time, last.get("tokens"), total_steps(folder), attempt, message)
    loss = _last_value(metric_rows)
    for earlier, writer, _ in reversed(files):  # an attempt that has just begun has no loss of its own yet
        if loss is None and writer == latest[1] and earlier != path:
            with suppress(OSError):
                loss = _last_value(_ends(earlier)[2])
    return status, loss


def _last_value(rows: list[dict[str, Any]], metric: str = "loss") -> float | None:
    found = [row["values"][metric] for row in rows if metric in row.get("values", ())]
    return read_number(found[-1]) if found else None


def last_value(folder: Path, metric: str) -> float | None:
    """The newest value of a metric of training, looked for in the last 2 MB of each attempt."""
    for path, writer, _ in reversed(metrics_files(folder / METRICS_FOLDER)):
        with suppress(OSError):
            if writer == TRAIN_WRITER and (value := _last_value(_ends(path, metric)[2], metric)) is not None:
                return value
    return None


def latest_attempt(files: list[tuple[Path, str, int]]) -> tuple[Path, str, int] | None:
    """The file that has the status of a run: the last attempt of training, else the one written last."""

    def modified(file: tuple[Path, str, int]) -> float:
        try:
            return file[0].stat().st_mtime
        except OSError:
            return 0.0

    trained = [each for each in files if each[1] == TRAIN_WRITER]
    if trained:
        return trained[-1]
    return max(files, key=modified, default=None)


def median_step_seconds(steps: Any, times: Any) -> float | None:
    """Seconds per step, from some rows; None if they are too few."""
    advance = np.diff(steps)
    good = advance > 0
    return float(np.median(np.diff(times)[good] / advance[good])) if good.any() else None


def _ends(path: Path, metric: str = "") -> tuple[dict[str, Any], bool | None, list[dict[str, Any]], float]:
    """Who writes a file and whether that process runs, the rows at its end (with `metric`: those that have it), and
    when it was written."""
    with open(path, "rb", buffering=0) as file:
        first = read_row(os.pread(file.fileno(), HEAD_BYTES, 0).split(b"\n", 1)[0]) or {}
        header = first["data"] if first.get("kind") == SEGMENT_KIND else {}
        alive = is_writer_alive(header)
        stat = os.fstat(file.fileno())
        rows: list[dict[str, Any]] = []
        for size in TAIL_BYTES[:2] if metric else TAIL_BYTES:
            start = max(0, stat.st_size - size)
            lines = os.pread(file.fileno(), size, start).split(b"\n")
            if start:
                del lines[0]  # half a line
            found = (row for line in reversed(lines) if line and (row := read_row(line)) is not None)
            if metric:
                found = (row for row in found if metric in row.get("values", ()))
            rows = list(itertools.islice(found, TAIL_ROWS))[::-1]
            if start == 0 or any("values" in row for row in rows):
                break
        return header, alive, rows, stat.st_mtime
