"""Finish: segments and the list of duplicates -> numbered shards, samples of what was dropped, a source's report.

Which record goes to which shard is computed first, from the lengths of the lines; then every shard is a task of its
own. Shards are written under `.build` and moved, as a whole folder with its manifest, to `corpus/<source>`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import advance
from zero2all.common.files import PARTIAL_MARK, crc32c_of, fsync_folder, fsync_tree, put_in_place, sweep_partials
from zero2all.common.manifest import write_manifest
from zero2all.common.records import ORIGINS_NAME, SPLITS, iter_records
from zero2all.corpus.channels import SCRIPTS
from zero2all.corpus.dedup.index import read_index
from zero2all.corpus.dedup.split import HELD_OUT, HELD_OUT_SHARED
from zero2all.corpus.duplicates import DROP_REASONS, REPEATED, Duplicates, SourceSegments
from zero2all.corpus.record import ORDINAL_BITS, make_gid, numbered, numbers_bytes
from zero2all.corpus.report import EXAMPLE_CHARS, LENGTH_BUCKETS, Tally, check_identity
from zero2all.corpus.segments import (
    DROPPED_NAME,
    LAYOUT_NAME,
    RECORDS_NAME,
    SAMPLE_CHARS,
    SAMPLES_PER_RULE,
    Segment,
    first_ordinals,
)
from zero2all.corpus.settings import BuildOptions
from zero2all.corpus.shard_files import shard_name, write_shard

DROPPED_FOLDER = "dropped"
EXAMPLES = 3
READ_BYTES = 1 << 20


class SegmentRows(NamedTuple):
    """Consecutive rows of one segment."""

    folder: Path
    verdicts: Path
    """A byte per record of this segment: what becomes of it."""
    first_ordinal: int
    """Ordinal of the segment's first item in its source."""
    start: int = 0
    end: int | None = None


@dataclass
class RecordShardTask:
    """Everything a worker needs to write one shard. It ends before it would grow past `shard_bytes`."""

    path: Path
    shard_format: str
    source_number: int
    held_out: bool
    template: str
    """Makes the text of a plain text shard."""
    ranges: list[SegmentRows] = field(default_factory=list)
    records: int = 0
    line_bytes: int = 0


def finish_shard(task: RecordShardTask) -> dict[str, Any]:
    """Write one shard, unless an earlier attempt did; returns what its manifest says of it."""
    if task.path.is_file():
        advance(task.line_bytes)
    else:
        sweep_partials(task.path)
        written = write_shard(task.path, task.shard_format, _lines_of(task), task.template)
        if written != task.records:
            raise AssertionError(f"{task.path} should have {task.records} records and got {written}")
    return {"bytes": task.path.stat().st_size, "crc32c": crc32c_of(task.path)}


def _lines_of(task: RecordShardTask) -> Iterator[list[bytes]]:
    """The numbered lines of a shard, some at a time."""
    for row_range in task.ranges:
        rows = _Rows(row_range)
        chosen = np.flatnonzero(rows.keep & (rows.is_valid == task.held_out))
        for some, lines in rows.read(chosen):
            pairs = zip(lines, rows.ordinals[some].tolist(), strict=True)
            batch = [numbered(line, task.source_number, ordinal) for line, ordinal in pairs]
            advance(sum(map(len, batch)))
            yield batch


def iter_dropped(corpus: Path, source: str, rule: str) -> Iterator[dict[str, Any]]:
    """Samples of what a rule dropped from a source: at most 200, in input order."""
    path = corpus / source / DROPPED_FOLDER / f"{rule}.jsonl"
    if path.is_file():
        with open(path, "rb") as file:
            yield from map(jsonio.loads, file)


def find_record(corpus: Path, numbers: Mapping[str, int], gid: int) -> tuple[str, dict[str, Any]] | None:
    """The split and record of a gid, looked for in the source with its number; None when it was not kept."""
    names = [name for name, number in numbers.items() if number == gid >> ORDINAL_BITS]
    for name, split in itertools.product(names, SPLITS):
        for record in iter_records(corpus, name, split):
            if record.get("gid") == gid:
                return split, record
    return None


class _Rows:
    """The kept records of a segment, or a range of them."""

    def __init__(self, row_range: SegmentRows) -> None:
        self.folder, verdicts, first_ordinal, start, end = row_range
        folder = self.folder
        index = read_index(folder)[start:end]
        layout = np.load(folder / LAYOUT_NAME)
        self.text_bytes = index["text_bytes"].astype(np.int64)
        self.ordinals = index["ordinal"].astype(np.int64) + first_ordinal
        self.line_bytes = layout["line_bytes"].astype(np.int64)[start:end]
        self.scripts = layout["script"][start:end]
        before = int(layout["line_bytes"][:start].sum(dtype=np.int64))
        self.offsets = before + np.cumsum(self.line_bytes) - self.line_bytes
        self.verdicts = np.load(verdicts)[start:end]
        self.keep = ~np.isin(self.verdicts, list(DROP_REASONS))
        self.is_valid = np.isin(self.verdicts, (HELD_OUT, HELD_OUT_SHARED))

    def read(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[bytes]]]:
        """Some rows, in order, a batch at a time: which they are, and their lines."""
        starts = self.offsets[rows]
        ends = starts + self.line_bytes[rows]
        # A batch ends where lines are left out, and at every multiple of READ_BYTES.
        cuts = np.flatnonzero((starts[1:] != ends[:-1]) | (starts[1:] // READ_BYTES != starts[:-1] // READ_BYTES)) + 1
        with open(self.folder / RECORDS_NAME, "rb", buffering=0) as file:
            for first, end in itertools.pairwise([0, *cuts.tolist(), len(rows)]):
                if first == end:
                    continue
                at = int(starts[first])
                data = os.pread(file.fileno(), int(ends[end - 1]) - at, at)
                bounds = zip((starts[first:end] - at).tolist(), (ends[first:end] - at).tolist(), strict=True)
                yield rows[first:end], [data[start:stop] for start, stop in bounds]

    def records(self, rows: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        """Some rows with their records; for a few."""
        for some, lines in self.read(rows):
            yield from zip(some.tolist(), map(jsonio.loads, lines), strict=True)


class SourceFinish:
    """One source on its way from segments to its final folder."""

    def __init__(
        self,
        source: SourceSegments,
        final: Path,
        work: Path,
        duplicates: Duplicates,
        options: BuildOptions,
        template: str,
    ) -> None:
        self.source, self.segments = source, source.segments
        self.final, self.work, self.duplicates, self.options = final, work, duplicates, options
        self.template = template
        self.tally = Tally.of(source.segments)
        self.lengths = np.zeros(LENGTH_BUCKETS, np.int64)
        self.script_records = np.zeros(len(SCRIPTS), np.int64)
        self.script_bytes = np.zeros(len(SCRIPTS), np.int64)
        self._first_ordinals = first_ordinals(self.segments)
        self.cut_records = self.shared_with_train = 0
        self._count()
        self.tasks = self._plan()
        self.facts: dict[str, dict[str, Any]] = {}

    def _count(self) -> None:
        """Count what stays and what goes."""
        for number in range(len(self.segments)):
            rows = self._rows(number)
            for value, reason in DROP_REASONS.items():
                dropped = rows.verdicts == value
                self.tally.drop_kept(reason, int(dropped.sum()), int(rows.text_bytes[dropped].sum()))
            cut = read_index(self.segments[number].folder)["text_bytes"] - rows.text_bytes
            self.tally.drop_kept(DROP_REASONS[REPEATED], 0, int(cut.sum()))
            self.cut_records += int((cut > 0).sum())
            self.shared_with_train += int((rows.verdicts == HELD_OUT_SHARED).sum())
            text_bytes = rows.text_bytes[rows.keep]
            scripts = rows.scripts[rows.keep]
            buckets = np.log2(np.maximum(text_bytes, 1)).astype(np.int64)
            self.lengths += np.bincount(buckets, minlength=LENGTH_BUCKETS)
            self.script_records += np.bincount(scripts, minlength=len(SCRIPTS))
            self.script_bytes += np.bincount(scripts, weights=text_bytes, minlength=len(SCRIPTS)).astype(np.int64)
        found = int(self.lengths.sum()), int(self.script_bytes.sum())
        if found != (self.tally.records_kept, self.tally.bytes_kept):
            raise AssertionError(
                f"source {self.source.name}: the index has {found[0]} records of {found[1]} bytes, the counts say "
                f"{self.tally.records_kept} and {self.tally.bytes_kept}. This is a bug in the corpus stage."
            )

    def _plan(self) -> list[RecordShardTask]:
        shards: dict[str, list[RecordShardTask]] = {name: [] for name in SPLITS}
        for number in range(len(self.segments)):
            rows = self._rows(number)
            lengths = rows.line_bytes + numbers_bytes(self.source.number, rows.ordinals)
            for name, planned in shards.items():
                chosen = np.flatnonzero(rows.keep & (rows.is_valid == (name == "valid")))
                self._add_to_shards(planned, name, number, chosen, np.cumsum(lengths[chosen]))
        return [task for planned in shards.values() for task in planned]

    def _add_to_shards(
        self, shards: list[RecordShardTask], split: str, number: int, rows: np.ndarray, sums: np.ndarray
    ) -> None:
        """Append some rows of a segment to the shards of a split; `sums` are the running sums of their lengths."""
        at = before = 0
        while at < len(rows):
            room = self.options.shard_bytes - shards[-1].line_bytes if shards else 0
            end = int(np.searchsorted(sums, before + room, side="right"))
            if end <= at and (not shards or shards[-1].records):
                path = self.work / split / shard_name(len(shards), self.options.format)
                task = (path, self.options.format, self.source.number, split == "valid", self.template)
                shards.append(RecordShardTask(*task))
                continue
            end = max(end, at + 1)  # a record above the size of a shard has one to itself
            shard = shards[-1]
            shard.ranges.append(self._all_rows(number)._replace(start=int(rows[at]), end=int(rows[end - 1]) + 1))
            shard.records += end - at
            shard.line_bytes += int(sums[end - 1]) - before
            before = int(sums[end - 1])
            at = end

    def take(self, task: RecordShardTask, facts: dict[str, Any]) -> bool:
        """Note a shard that is written; True when it was the last."""
        self.facts[task.path.relative_to(self.work).as_posix()] = facts
        return len(self.facts) == len(self.tasks)

    def commit(self, inputs: str, content: dict[str, Any], report: dict[str, Any]) -> None:
        """Add samples and manifest, and put the folder in its place."""
        held_out = sum(task.records for task in self.tasks if task.held_out)
        for name in SPLITS:
            (self.work / name).mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work / DROPPED_FOLDER, ignore_errors=True)
        for leftover in self.work.rglob(f"*{PARTIAL_MARK}*"):  # of a killed attempt, whatever lives under its number
            leftover.unlink(missing_ok=True)
        samples = self._write_samples()
        self._write_origins()
        report = {
            **self.tally.as_report(),
            "shards": len(self.tasks),
            "train_records": sum(task.records for task in self.tasks) - held_out,
            "valid_records": held_out,
            "valid_shared_with_train": self.shared_with_train,
            "records_cut": self.cut_records,
            **report,
            "length_histogram": {f"{1 << bucket}": int(count) for bucket, count in enumerate(self.lengths) if count},
            "scripts": {
                SCRIPTS[number]: {"records": int(self.script_records[number]), "bytes": int(self.script_bytes[number])}
                for number in np.argsort(-self.script_bytes, kind="stable")
                if self.script_records[number]
            },
            "examples": {"kept": self._examples(), "dropped": samples},
        }
        check_identity(self.source.name, report)
        write_manifest(self.work, "corpus", inputs, {**content, "report": report}, self.facts)
        fsync_tree(self.work)
        put_in_place(self.work, self.final)
        fsync_folder(self.final.parent)

    def _rows(self, number: int) -> _Rows:
        return _Rows(self._all_rows(number))

    def _all_rows(self, number: int) -> SegmentRows:
        """All rows of a segment."""
        verdicts, folder = self.duplicates.files_of(self.source.name, number, self.segments[number].folder)
        return SegmentRows(folder, verdicts, self._first_ordinals[number])

    def _write_samples(self) -> dict[str, list[str]]:
        """`dropped/RULE.jsonl`: the first samples of each rule over the whole source; returns a few of each."""
        folder = self.work / DROPPED_FOLDER
        counts: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        for number, segment in enumerate(self.segments):
            for sample in [*self._rule_samples(number, segment), *self._duplicate_samples(number, counts)]:
                rule = sample.pop("rule")
                if counts[rule] < SAMPLES_PER_RULE:
                    counts[rule] += 1
                    folder.mkdir(parents=True, exist_ok=True)
                    with open(folder / f"{rule}.jsonl", "ab") as file:
                        file.write(jsonio.dumps_line(sample))
                    if counts[rule] <= EXAMPLES:
                        examples.setdefault(rule, []).append(sample["excerpt"][:EXAMPLE_CHARS])
        return dict(sorted(examples.items()))

    def _write_origins(self) -> None:
        """`origins.jsonl`: from which raw file the items from an ordinal on came."""
        last = None
        with open(self.work / ORIGINS_NAME, "wb", buffering=1 << 20) as out:
            for first_ordinal, segment in zip(self._first_ordinals, self.segments, strict=True):
                with open(segment.folder / ORIGINS_NAME, "rb") as file:
                    for run in map(jsonio.loads, file):
                        if run["file"] != last:
                            last = run["file"]
                            out.write(jsonio.dumps_line({"first": first_ordinal + run["first"], "file": last}))

    def _rule_samples(self, number: int, segment: Segment) -> Iterator[dict[str, Any]]:
        with open(segment.folder / DROPPED_NAME, "rb") as file:
            for line in file:
                sample = jsonio.loads(line)
                ordinal = self._first_ordinals[number] + sample.pop("item")
                yield {"gid": make_gid(self.source.number, ordinal), **sample}

    def _duplicate_samples(self, number: int, counts: Counter[str]) -> Iterator[dict[str, Any]]:
        if all(counts[reason] >= SAMPLES_PER_RULE for reason in DROP_REASONS.values()):
            return
        rows = self._rows(number)
        first = self.duplicates.first_document(self.source.name, number)
        for value, reason in DROP_REASONS.items():
            wanted = np.flatnonzero(rows.verdicts == value)[: SAMPLES_PER_RULE - counts[reason]]
            kept = self.duplicates.kept_for((wanted + first).tolist())
            for row, record in rows.records(wanted):
                yield {
                    "gid": make_gid(self.source.number, int(rows.ordinals[row])),
                    "rule": reason,
                    "kept_gid": kept.get(first + row),
                    "title": record["title"][:SAMPLE_CHARS],
                    "chars": len(record["content"]),
                    "excerpt": record["content"][:SAMPLE_CHARS],
                }

    def _examples(self) -> list[str]:
        found: list[str] = []
        for number in range(len(self.segments)):
            rows = self._rows(number)
            first = np.flatnonzero(rows.keep)[: EXAMPLES - len(found)]
            found += [record["content"][:EXAMPLE_CHARS] for _, record in rows.records(first)]
            if len(found) >= EXAMPLES:
                break
        return found
