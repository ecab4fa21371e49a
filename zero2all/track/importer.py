"""TensorBoard event files -> run folders of ours.

Each folder with event files becomes one run. A file that writes a tag an earlier one wrote is a restart of the same
process and becomes its next attempt; one with tags of its own is another writer. Scalars and texts are taken over;
images, histograms and what is damaged are left out and counted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import staged_folder
from zero2all.common.workspace import FOLDER_NAME_WORDS, is_folder_name
from zero2all.track.listing import TRAIN_WRITER
from zero2all.track.tensorboard import Damage, TensorboardEvent, event_files, messages, read_events
from zero2all.track.values import json_number
from zero2all.track.writer import END_KIND, METRICS_FOLDER, SEGMENT_KIND


@dataclass
class Imported:
    """One run that was made, and what of its source could not be used."""

    folder: Path
    files: int = 0
    rows: int = 0
    values: int = 0
    texts: int = 0
    damage: Damage = field(default_factory=Damage)


def import_tensorboard(
    source: Path, runs: Path, name: str, rename: Mapping[str, str] | None = None, tokens_tag: str | None = None
) -> list[Imported]:
    """Make the run `runs/name` of the event files in `source`, and `runs/name-SUB` of those in each folder below it.

    `rename` gives tags other names, for example {"train/loss": "loss"}; `tokens_tag` holds the tokens seen so far.
    """
    if not is_folder_name(name):
        raise UsageError(f"--name is {name!r}, expected {FOLDER_NAME_WORDS}.")
    if not source.is_dir():
        raise BadInputError(f"{source} is not a folder. Give the folder with TensorBoard's event files (*tfevents*).")
    folders = [folder for folder in (source, *sorted(source.rglob("*"))) if folder.is_dir() and event_files(folder)]
    if not folders:
        raise BadInputError(f"There are no TensorBoard event files (*tfevents*) in {source} or below it.")
    targets = [runs / "-".join([name, *folder.relative_to(source).parts]) for folder in folders]
    taken = [str(target) for target in targets if target.exists()]
    if taken:
        raise UsageError(f"These runs exist already: {', '.join(taken)}. Choose another name with --name.")
    messages()  # a missing package is reported before anything is written
    return [_import_folder(*pair, rename or {}, tokens_tag) for pair in zip(folders, targets, strict=True)]


def _import_folder(source: Path, target: Path, rename: Mapping[str, str], tokens_tag: str | None) -> Imported:
    done = Imported(target)
    writers: list[tuple[set[str], int]] = []  # the tags of each writer so far, and its attempts
    with staged_folder(target) as folder:
        metrics = folder / METRICS_FOLDER
        metrics.mkdir()
        for path in event_files(source):
            body = folder / "body"
            tags, last_step, last_time = _convert(path, body, done, rename, tokens_tag)
            if not tags:
                continue
            number = next((number for number, (known, _) in enumerate(writers) if known & tags), len(writers))
            known, attempts = writers[number] if number < len(writers) else (set(), 0)
            writers[number : number + 1] = [(known | tags, attempts + 1)]
            writer = TRAIN_WRITER if number == 0 else f"import{number + 1}"
            target_file = metrics / f"{writer}-{attempts + 1}.jsonl"
            _finish(target_file, body, writer, attempts + 1, last_step, last_time, path.name)
            done.files += 1
        (folder / "body").unlink(missing_ok=True)
    return done


def _convert(
    path: Path, body: Path, done: Imported, rename: Mapping[str, str], tokens_tag: str | None
) -> tuple[set[str], int, float]:
    """Write the rows of one event file; returns its tags and where it ended."""
    tags: set[str] = set()
    last_step, last_time, tokens = 0, 0.0, 0
    with open(body, "wb") as out:
        for when, step, values, texts in _rows(read_events(path, done.damage)):
            tags |= values.keys() | texts.keys()
            last_step, last_time = step, when
            seen = values.get(tokens_tag) if tokens_tag else None
            if seen is not None and math.isfinite(seen):
                tokens = int(seen)
            if values:
                named = {rename.get(tag, tag): json_number(number) for tag, number in values.items()}
                out.write(jsonio.dumps_line({"step": step, "time": when, "tokens": tokens, "values": named}))
            for tag, text in texts.items():
                out.write(_event_line(step, when, "text", {"name": rename.get(tag, tag), "text": text}))
            done.rows += bool(values)
            done.values += len(values)
            done.texts += len(texts)
    return tags, last_step, last_time


def _rows(events: Iterator[TensorboardEvent]) -> Iterator[tuple[float, int, dict[str, float], dict[str, str]]]:
    """Time, step, numbers and texts: neighbours of the same step together, as long as no tag comes twice."""
    when, step = 0.0, 0
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for event in events:
        for tag, content in event.values:
            if (values or texts) and (event.step != step or tag in values or tag in texts):
                yield when, step, values, texts
                values, texts = {}, {}
            if not values and not texts:
                when, step = event.time, event.step
            if isinstance(content, str):
                texts[tag] = content
            else:
                values[tag] = content
    if values or texts:
        yield when, step, values, texts


def _finish(path: Path, body: Path, writer: str, attempt: int, step: int, when: float, origin: str) -> None:
    with open(path, "wb") as out, open(body, "rb") as rows:
        first = jsonio.loads(rows.readline())
        header = {"writer": writer, "attempt": attempt, "host": None, "pid": None, "process_start": first["time"]}
        header |= {"resumed_from": None, "format": 1, "imported_from": origin}
        out.write(_event_line(first["step"], first["time"], SEGMENT_KIND, header))
        rows.seek(0)
        shutil.copyfileobj(rows, out)
        out.write(_event_line(step, when, END_KIND, {"reason": "done", "message": f"Imported from {origin}."}))


def _event_line(step: int, when: float, kind: str, data: dict[str, Any]) -> bytes:
    return jsonio.dumps_line({"step": step, "time": when, "kind": kind, "data": data})
