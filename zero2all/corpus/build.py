"""Building the corpus: sources in, `corpus/<source>/{train,valid}/part-*` and `report.json` out.

    plan     each source is listed, looked into and cut into tasks                                   plan.py
    ingest   tasks -> segments of cleaned records, in parallel                                       ingest.py
    dedup    all segments -> which records are duplicates of others, over all sources                dedup/
    finish   segments -> numbered shards, in parallel; a source appears when it is whole             finish.py
    report   `report.html`, then `report.json`, the sign that there is a corpus                      report.py

Everything before finish lives under `corpus/.build/<inputs>/`, where `inputs` names what decides the content: files
(names, sizes, times), mapping, rules, options. A build that was interrupted, run again, finds there what is done and
goes on behind it, and writes byte for byte what an uninterrupted build writes, whatever the number of workers.
`.build` is removed at the end, unless it is to be kept: then a source that has not changed need not be read again
when another is added or another dedup is tried.

A source left out of a later build keeps its folder, but no stage reads it. A build that finds all sources finished
still reads their files (gigabytes a second): one that is no longer as it was written is built again.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.engine import Engine, EngineConfig, Shown, open_engine
from zero2all.common.errors import BadInputError, DiskError, UsageError
from zero2all.common.files import (
    link_or_copy,
    read_json,
    require_free_space,
    sweep_partials,
    write_atomic,
    write_json,
)
from zero2all.common.lock import folder_lock
from zero2all.common.manifest import MANIFEST_NAME, checks_of_current, damaged_files, fingerprint
from zero2all.common.progress import progress, say
from zero2all.corpus.boilerplate import strip_boilerplate
from zero2all.corpus.duplicates import (
    CLUSTERS_NAME,
    Duplicates,
    SourceSegments,
    read_duplicates,
    search_duplicates,
)
from zero2all.corpus.finish import DROPPED_FOLDER, SourceFinish, finish_shard
from zero2all.corpus.ingest import NAMED_FILES, ingest_unit
from zero2all.corpus.listing import UNREADABLE, require_readable
from zero2all.corpus.options import BuildOptions
from zero2all.corpus.plan import (
    Cut,
    SourcePlan,
    cut_sources,
    list_source,
    no_text_field,
    nothing_readable,
    plan_source,
    planned_units,
    report_fields,
    skipped_names,
)
from zero2all.corpus.quarantine import QUARANTINE_NAME, Quarantine
from zero2all.corpus.record import SOURCES_NAME, source_numbers
from zero2all.corpus.report import REPORT_NAME, Tally, counts_in_words, make_report
from zero2all.corpus.report_html import REPORT_HTML_NAME, report_html
from zero2all.corpus.segments import BUILD_NAME, Segment, segments_of_unit
from zero2all.corpus.sources import Source, source_problems

FORMAT_RULES = 1
"""Raise it when finish changes what it writes from the same segments."""

PRELOADED = ("zero2all.corpus.ingest", "zero2all.corpus.finish", "zero2all.corpus.warm")
"""What worker processes need."""
SMALL_BYTES = 24_000_000
"""Below this much input one process is faster than starting several."""
DISK_SHARE = 2.4
DISK_SHARE_COMPRESSED = 10.0
COMPRESSED_SUFFIXES = frozenset({".parquet", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".rar"})
DISK_MARGIN_BYTES = 64_000_000
PASSING = frozenset({UNREADABLE, "read_error"})
"""Reasons of damage that may be gone at the next attempt, though the file has not changed."""

Announce = Callable[[str], None]


def build_corpus(
    corpus_folder: Path,
    sources: Sequence[Source],
    options: BuildOptions | None = None,
    engine: EngineConfig | None = None,
    keep_build: bool = False,
    announce: Announce | None = None,
) -> dict[str, Any]:
    """Build what is missing or out of date, and return the report, which is also `corpus_folder/report.json`.

    `announce` is told, a line at a time, what was found in each source and guessed about it before the work begins.
    """
    options = options or BuildOptions()
    engine = engine or EngineConfig()
    check_sources(sources, options, engine)
    corpus_folder = corpus_folder.absolute()  # workers may stand in other folders
    sources = [source if source.is_remote else replace(source, path=Path(source.path).absolute()) for source in sources]
    listings = [list_source(source, corpus_folder) for source in sources]
    corpus_folder.mkdir(parents=True, exist_ok=True)
    busy = f"Another process is building the corpus in {corpus_folder}. Wait for it, or choose another --work."
    with folder_lock(corpus_folder, busy):
        _sweep(corpus_folder, sources)
        numbers = source_numbers(corpus_folder, [source.name for source in sources])
        plans = [
            plan_source(source, numbers[source.name], listing, corpus_folder, options)
            for source, listing in zip(sources, listings, strict=True)
        ]
        build = _Build(corpus_folder, plans, options, keep_build)
        for problem in build.find_damage(engine):
            (announce or say)(problem)
        try:
            if build.stale:
                if announce is not None:
                    for plan in plans:
                        announce(plan.in_words())
                build.run(engine)
            return build.write_report()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskError(
                    f"The disk of {corpus_folder} is full. Free some space and run the same command: what is finished "
                    f"is kept and not done twice."
                ) from error
            raise


def check_sources(sources: Sequence[Source], options: BuildOptions, engine: EngineConfig) -> None:
    """Raise when the sources or settings cannot be built from, before anything is written."""
    problems = source_problems(sources) + options.problems() + engine.problems()
    if len(problems) == 1:
        raise UsageError(f"The corpus cannot be built: {problems[0]}.")
    if problems:
        raise UsageError("The corpus cannot be built:\n" + "\n".join(f"{n}. {p}" for n, p in enumerate(problems, 1)))
    for source in sources:
        if not source.is_remote:
            require_readable(Path(source.path), source.name)


def _sweep(corpus_folder: Path, sources: Sequence[Source]) -> None:
    """Remove what a killed build left behind, also where nothing is going to be rebuilt."""
    for name in [*(source.name for source in sources), REPORT_NAME, REPORT_HTML_NAME, SOURCES_NAME, CLUSTERS_NAME]:
        sweep_partials(corpus_folder / name)
    for source in sources:
        sweep_partials(corpus_folder / QUARANTINE_NAME / f"{source.name}.jsonl")


class _Build:
    """One build, step by step."""

    def __init__(self, corpus_folder: Path, plans: list[SourcePlan], options: BuildOptions, keep_build: bool) -> None:
        self.corpus_folder, self.plans, self.options, self.keep_build = corpus_folder, plans, options, keep_build
        self.work = corpus_folder / BUILD_NAME
        self.dedups = options.dedup.exact or options.dedup.near != "off" or options.dedup.lines
        lines = [options.dedup.line_records, options.dedup.line_max_frequent]
        self.lines_inputs = fingerprint(["lines", [plan.inputs for plan in plans], lines])
        numbered = [[plan.number, plan.inputs] for plan in plans]
        self.dedup_inputs = fingerprint([numbered, asdict(options.dedup), options.valid_share])
        decisive = {
            "rules": FORMAT_RULES,
            "dedup": self.dedup_inputs if self.dedups else None,
            "format": options.format,
            "shard_bytes": options.shard_bytes,
            "valid_share": options.valid_share,
        }
        self.inputs = {plan.name: fingerprint([decisive, plan.number, plan.inputs]) for plan in plans}
        self.cuts: dict[str, Cut] = {}
        self.finished = {
            plan.name: checks
            for plan in plans
            if (checks := checks_of_current(corpus_folder / plan.name, "corpus", self.inputs[plan.name])) is not None
        }
        self.stale = [plan for plan in plans if plan.name not in self.finished]

    def find_damage(self, config: EngineConfig) -> list[str]:
        """Look at every byte of the finished sources: what is no longer as it was written makes its source stale."""
        source_of = {check.path: name for name, files in self.finished.items() for check in files}
        checks = [check for files in self.finished.values() for check in files]
        problems: dict[str, str] = {}
        for check, problem in damaged_files(checks, config.workers if config.kind == "local" else None):
            name = source_of[check.path]
            problems.setdefault(name, f"{problem}; the source {name} is built again")
        self.stale = [plan for plan in self.plans if plan.name not in self.finished or plan.name in problems]
        return list(problems.values())

    # ---- the steps --------------------------------------------------------------------------------------------

    def run(self, config: EngineConfig) -> None:
        """Build every stale source."""
        self._remove_other_builds()
        require_free_space(self.corpus_folder, self._disk_bytes_needed(), "the corpus")
        for name in (REPORT_NAME, REPORT_HTML_NAME, CLUSTERS_NAME):
            (self.corpus_folder / name).unlink(missing_ok=True)
        raw_bytes = sum(plan.listing.size_bytes for plan in self.plans)
        if config.kind == "local" and config.workers is None and raw_bytes < SMALL_BYTES:
            config = EngineConfig("local", 1)
        with open_engine(config, PRELOADED) as engine:
            folder = self.work / self.dedup_inputs
            duplicates = read_duplicates(folder) if self.dedups else None
            needed = self.stale if duplicates is not None or not self.dedups else self.plans
            self.cuts = cut_sources(needed, self.options, engine)
            segments = self._ingest(engine, needed)
            for plan in needed:
                self._require_usable(plan, segments[plan.name])
            if self.options.dedup.lines:
                channels = {plan.name: plan.channel for plan in self.plans}
                work = self.work / self.lines_inputs
                segments = strip_boilerplate(segments, channels, work, self.options.dedup, engine)
            if self.dedups and duplicates is None:
                sources = [SourceSegments(plan.name, plan.number, segments[plan.name]) for plan in self.plans]
                with progress("dedup", total=None, unit="tasks") as bar:
                    dedup, valid_share = self.options.dedup, self.options.valid_share
                    duplicates = search_duplicates(folder, sources, dedup, valid_share, Shown(engine, bar))
            self._finish(engine, segments, duplicates)

    def _ingest(self, engine: Engine, plans: list[SourcePlan]) -> dict[str, list[Segment]]:
        tasks = [task for plan in plans for task in self.cuts[plan.name].tasks]
        units: list[list[Segment] | None] = [segments_of_unit(task.folder) for task in tasks]
        todo = [number for number, unit in enumerate(units) if unit is None]
        total = sum(task.raw_bytes for task in tasks)
        done = total - sum(tasks[number].raw_bytes for number in todo)
        if todo:
            with progress("read", total=total, unit="B", done=done) as bar:
                for position, segments in engine.run(ingest_unit, [tasks[number] for number in todo], bar.advance):
                    units[todo[position]] = segments
        by_source: dict[str, list[Segment]] = {plan.name: [] for plan in plans}
        for task, unit in zip(tasks, units, strict=True):
            assert unit is not None, "every task has been run"
            by_source[task.source] += unit
        return by_source

    def _require_usable(self, plan: SourcePlan, segments: list[Segment]) -> None:
        """Stop when a source has nothing in it, no text, or too much damage; the list of damage is there to look at."""
        source, options = plan.source, self.options
        quarantine = Quarantine(self.corpus_folder / QUARANTINE_NAME / f"{source.name}.jsonl")
        quarantine.write(segments, plan.number)
        tally = Tally()
        for segment in segments:
            tally.add(segment.state["tally"])
        states = [segment.state for segment in segments]
        if not tally.records_in:
            facts = report_fields(plan, self.cuts[plan.name], states)
            raise nothing_readable(source, facts["skipped_files"], facts["reading_notes"])
        damaged = tally.quarantined.total()
        if damaged == tally.quarantined["no_text_field"] == tally.records_in:
            fields = dict.fromkeys(field for state in states for field in state["unmapped_fields"])
            raise no_text_field(source, str(source.path), list(fields))
        unread_bytes = sum(state["unread_bytes"] for state in states)
        unread_share = unread_bytes / max(plan.listing.size_bytes, 1)  # of what was compressed, more may be unread
        share = min(1.0, max(damaged / tally.records_in, unread_share))
        if share > options.max_damaged_share:
            _forget_unreadable(plan, segments)
            raise BadInputError(
                f"Source {source.name}: {damaged:,} of {tally.records_in:,} records are damaged, and "
                f"{unread_bytes:,} bytes behind damaged places could not be read: {share:.2%}, where "
                f"{options.max_damaged_share:.2%} is allowed. Found: {quarantine.in_words()}. Each is listed "
                f"with file, place and reason in {quarantine.path}. Repair the input, or accept the loss with a "
                f"larger --max-damaged-share."
            )

    def _finish(self, engine: Engine, segments: dict[str, list[Segment]], duplicates: Duplicates | None) -> None:
        finishes = [
            (
                plan,
                SourceFinish(
                    SourceSegments(plan.name, plan.number, segments[plan.name]),
                    self.corpus_folder / plan.name,
                    self.work / self.inputs[plan.name] / "out" / plan.name,
                    duplicates,
                    self.options,
                ),
            )
            for plan in self.stale
        ]
        tasks = [(plan, finish, task) for plan, finish in finishes for task in finish.tasks]
        for plan, finish in finishes:
            if not finish.tasks:
                self._commit(plan, finish)
        with progress("write", total=sum(task.line_bytes for *_, task in tasks), unit="B") as bar:
            for position, facts in engine.run(finish_shard, [task for *_, task in tasks], bar.advance):
                plan, finish, task = tasks[position]
                if finish.take(task, facts):
                    self._commit(plan, finish)

    def _commit(self, plan: SourcePlan, finish: SourceFinish) -> None:
        states = [segment.state for segment in finish.segments]
        content = {
            "source": plan.name,
            "number": plan.number,
            "path": plan.source.location,
            "channel": plan.channel,
            "skipped_file_names": skipped_names(plan, states, NAMED_FILES),
        }
        finish.commit(self.inputs[plan.name], content, report_fields(plan, self.cuts[plan.name], states))
        if not self.keep_build:
            shutil.rmtree(self.work / plan.inputs, ignore_errors=True)

    def write_report(self) -> dict[str, Any]:
        """Put the reports of all sources together; with `report.json` the corpus is there."""
        by_source = {
            plan.name: read_json(self.corpus_folder / plan.name / MANIFEST_NAME)["report"] for plan in self.plans
        }
        report = make_report(by_source, asdict(self.options), fingerprint(self.inputs), self._notes())
        totals = report["totals"]
        if not totals["records_kept"]:
            raise BadInputError(
                f"The corpus is empty: {totals['records_in']:,} records were read and none was kept "
                f"({counts_in_words({**totals['dropped'], 'quarantined': totals['quarantined']})}). Check that the "
                f"text field is the right one (content was taken from {_mappings_in_words(by_source)}), and that the "
                f"rules are not too strict for this text: samples of what each rule dropped are under "
                f"{self.corpus_folder / self.plans[0].name / DROPPED_FOLDER}, what was damaged under "
                f"{self.corpus_folder / QUARANTINE_NAME}."
            )
        clusters = self.work / self.dedup_inputs / CLUSTERS_NAME
        if clusters.is_file():  # it stays there too: a build with another format finds this dedup done
            link_or_copy(clusters, self.corpus_folder / CLUSTERS_NAME)
        path = self.corpus_folder / REPORT_NAME
        if not path.is_file() or path.read_bytes() != jsonio.dumps_pretty(report):
            path.unlink(missing_ok=True)
            write_atomic(self.corpus_folder / REPORT_HTML_NAME, report_html(report).encode())
            write_json(path, report)
        if not self.keep_build and self.work.exists():
            shutil.rmtree(self.work)
        return report

    # ---- details ----------------------------------------------------------------------------------------------

    def _notes(self) -> list[str]:
        if self.options.valid_share and self.options.dedup.near == "off":
            return ["near duplicates were not looked for: some of valid may stand, slightly changed, in train"]
        return []

    def _remove_other_builds(self) -> None:
        """What is left of builds of other inputs would only take room."""
        if self.keep_build or not self.work.is_dir():
            return
        wanted = {self.dedup_inputs, self.lines_inputs, *self.inputs.values(), *(plan.inputs for plan in self.plans)}
        for folder in self.work.iterdir():
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def _disk_bytes_needed(self) -> int:
        needed = 0.0
        for plan in self.plans:
            for file in plan.listing.files:
                compressed = file.path.suffix.lower() in COMPRESSED_SUFFIXES
                needed += file.size_bytes * (DISK_SHARE_COMPRESSED if compressed else DISK_SHARE)
        there = sum(path.stat().st_size for path in self.work.rglob("*") if path.is_file())  # of an interrupted build
        return max(int(needed) - there, 0) + DISK_MARGIN_BYTES


def _forget_unreadable(plan: SourcePlan, segments: list[Segment]) -> None:
    """Let the next run try again what the disk or the network refused: a right that is given does not change a file."""
    if any(unit["format"] == UNREADABLE for unit in planned_units(plan)):
        shutil.rmtree(plan.folder, ignore_errors=True)  # how the source was cut is no longer true
    for segment in segments:
        if not PASSING.isdisjoint(segment.state["tally"]["quarantined_by_reason"]):
            shutil.rmtree(segment.folder.parent, ignore_errors=True)


def _mappings_in_words(by_source: dict[str, dict[str, Any]]) -> str:
    fields = [mapping["content"] for source in by_source.values() for mapping in source["mappings"]]
    return ", ".join(f"'{field}'" for field in dict.fromkeys(fields)) or "whole text files"
