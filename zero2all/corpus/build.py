"""Building the corpus: sources in, `corpus/<source>/{train,valid}/part-*` and `report.json` out.

    plan     each source is listed, looked into and cut into tasks                                   plan.py
    ingest   tasks -> segments of cleaned records, in parallel                                       ingest.py
    check    too much damage, or a rule that drops too much, ends the build here                     source_report.py
    dedup    all segments -> which records are duplicates of others, over all sources                dedup/
    finish   segments -> numbered shards, in parallel; a source appears when it is whole             finish.py
    report   `report.html`, then `report.json`, the sign that there is a corpus                      report.py

Everything before finish lives under `corpus/.build/<inputs>/`, where `inputs` names what decides the content: files,
mapping, rules, options. An interrupted build, run again, continues there and writes the same bytes, whatever the number
of workers. `.build` is removed at the end, unless it is kept for later builds with more sources or another dedup.

A source left out of a later build keeps its folder, but no stage reads it. A build that finds all sources finished
still reads their files: one that has changed on disk is built again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.engine import EngineConfig, Shown, TaskEngine, open_engine
from zero2all.common.errors import DiskError, UsageError, is_disk_full
from zero2all.common.files import link_or_copy, read_json, require_free_space, sweep_partials, write_atomic, write_json
from zero2all.common.lock import folder_lock
from zero2all.common.manifest import MANIFEST_NAME, FileCheck, checks_of_current, damaged_files, fingerprint
from zero2all.common.progress import progress, say
from zero2all.common.records import TEXT_ONLY, TITLE_AND_TEXT
from zero2all.corpus.build_errors import nothing_kept
from zero2all.corpus.duplicates import (
    BENCHMARKS_NAME,
    CLUSTERS_NAME,
    Against,
    Duplicates,
    SourceSegments,
    read_duplicates,
    search_duplicates,
)
from zero2all.corpus.finish import SourceFinish, finish_shard
from zero2all.corpus.ingest import NAMED_FILES, ingest_unit
from zero2all.corpus.listing import require_readable
from zero2all.corpus.plan import SourcePart, SourcePlan, cut_sources, list_source, plan_source
from zero2all.corpus.record import SOURCES_NAME, keep_source_numbers, source_numbers
from zero2all.corpus.report import REPORT_NAME, make_report
from zero2all.corpus.report_html import REPORT_HTML_NAME, report_html
from zero2all.corpus.segments import BUILD_NAME, QUARANTINE_NAME, Segment, channels_in, segments_of_unit
from zero2all.corpus.settings import BuildOptions
from zero2all.corpus.source_report import plan_in_words, report_fields, require_usable, segments_of, skipped_names
from zero2all.corpus.sources import Source, source_problems

FORMAT_RULES = 1
"""Raise it when finish changes what it writes from the same segments."""

PRELOADED = ("zero2all.corpus.ingest", "zero2all.corpus.finish", "zero2all.corpus.preload")
"""What worker processes need."""
SMALL_BYTES = 24_000_000
"""Below this much input one process is faster than starting several."""
DISK_SHARE = 2.4
DISK_SHARE_COMPRESSED = 10.0
COMPRESSED_SUFFIXES = frozenset({".parquet", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".rar"})
DISK_MARGIN_BYTES = 64_000_000
CHANNELS_NAME = "channels.json"
"""In the folder of an `auto` source that has been read: its channels."""
PART_KEY = "part_of"
"""In the manifest of a part of an `auto` source: which source, read how, and all channels it became."""


def build_corpus(
    corpus_folder: Path,
    sources: Sequence[Source],
    options: BuildOptions | None = None,
    engine: EngineConfig | None = None,
    keep_build: bool = False,
    announce: Callable[[str], None] | None = None,
    against: Against | None = None,
) -> dict[str, Any]:
    """Build what is missing or out of date, and return the report, which is also `corpus_folder/report.json`.

    `announce` is told, a line at a time, what was found in each source and guessed about it before the work begins.
    Records that contain an item of `against` are dropped.
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
        plans = [
            plan_source(source, listing, corpus_folder, options)
            for source, listing in zip(sources, listings, strict=True)
        ]
        build = _Build(corpus_folder, plans, options, keep_build, against)
        for problem in build.find_damage(engine):
            (announce or say)(problem)
        try:
            if build.stale or not build.is_settled:
                if announce is not None:
                    for plan in plans:
                        announce(plan_in_words(plan))
                build.run(engine)
            return build.write_report()
        except OSError as error:
            if is_disk_full(error):
                raise DiskError(
                    f"The disk of {corpus_folder} is full. Free some space and run the same command again: "
                    "finished work is kept."
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
    names = [name for source in sources for name in source.possible_names]
    for name in [*names, REPORT_NAME, REPORT_HTML_NAME, SOURCES_NAME, CLUSTERS_NAME, BENCHMARKS_NAME]:
        sweep_partials(corpus_folder / name)
    for name in names:
        sweep_partials(corpus_folder / QUARANTINE_NAME / f"{name}.jsonl")


class _Build:
    """One build, step by step.

    `plans` are what is read, `parts` what it becomes: the same, but for `auto` sources, whose channels are known when
    all of them has been read once.
    """

    def __init__(
        self,
        corpus_folder: Path,
        plans: list[SourcePlan],
        options: BuildOptions,
        keep_build: bool,
        against: Against | None,
    ) -> None:
        self.corpus_folder, self.plans, self.options, self.keep_build = corpus_folder, plans, options, keep_build
        self.work, self.against, dedup = corpus_folder / BUILD_NAME, against, options.dedup
        self.dedups = bool(dedup.exact or dedup.near != "off" or dedup.passages.min_chars or against)
        self.parts: list[SourcePart] = []
        self.stale: list[SourcePart] = []
        self.finished: dict[str, list[FileCheck]] = {}
        self._wanted = {plan.inputs for plan in plans}
        """Folders under `.build` that belong to this build."""
        channels = {plan.name: known_channels(corpus_folder, plan) for plan in plans}
        self.is_settled = None not in channels.values()
        if self.is_settled:
            self._settle({name: found or [] for name, found in channels.items()})

    def _settle(self, channels: Mapping[str, list[str]]) -> None:
        """The channels of all sources are known: name everything that this build writes."""
        options, plans = self.options, self.plans
        unnumbered = [SourcePart(plan, channel, 0) for plan in plans for channel in channels[plan.name]]
        self.numbers = source_numbers(self.corpus_folder, [part.name for part in unnumbered])
        self.parts = [replace(part, number=self.numbers[part.name]) for part in unnumbered]
        numbered = [[part.number, part.inputs] for part in self.parts]
        decisive: Any = [numbered, asdict(options.dedup), options.valid_share]
        if self.against is not None:
            decisive += [self.against[0], [part.plan.template for part in self.parts]]
        self.dedup_inputs = fingerprint(decisive)
        shards = {
            "rules": FORMAT_RULES,
            "dedup": self.dedup_inputs if self.dedups else None,
            "format": options.format,
            "shard_bytes": options.shard_bytes,
            "valid_share": options.valid_share,
        }
        self.inputs = {
            part.name: fingerprint([shards, part.number, part.inputs, *_unusual(part.plan.template)])
            for part in self.parts
        }
        current = {
            part.name: checks_of_current(self.corpus_folder / part.name, "corpus", self.inputs[part.name])
            for part in self.parts
        }
        self.finished = {name: checks for name, checks in current.items() if checks is not None}
        self.stale = [part for part in self.parts if part.name not in self.finished]
        self._wanted |= {self.dedup_inputs, *self.inputs.values()}
        self.is_settled = True

    def find_damage(self, config: EngineConfig) -> list[str]:
        """Look at every byte of the finished sources: what is no longer as it was written makes its source stale."""
        source_of = {check.path: name for name, files in self.finished.items() for check in files}
        checks = [check for files in self.finished.values() for check in files]
        problems: dict[str, str] = {}
        for check, problem in damaged_files(checks, config.workers if config.kind == "local" else None):
            name = source_of[check.path]
            problems.setdefault(name, f"{problem}. The source {name} is built again.")
        self.stale = [part for part in self.parts if part.name not in self.finished or part.name in problems]
        return list(problems.values())

    def run(self, config: EngineConfig) -> None:
        """Build every stale source."""
        self._remove_other_builds()
        require_free_space(self.corpus_folder, self._disk_bytes_needed(), "the corpus")
        raw_bytes = sum(plan.listing.size_bytes for plan in self.plans)
        if config.kind == "local" and config.workers is None and raw_bytes < SMALL_BYTES:
            config = EngineConfig("local", 1)
        with open_engine(config, PRELOADED) as engine:
            if not self.is_settled:
                self._find_channels(self._ingest(engine, self.plans))
            folder = self.work / self.dedup_inputs
            duplicates = read_duplicates(folder, [part.name for part in self.stale])
            needed = self.stale if duplicates is not None or not self.dedups else self.parts
            plans = [plan for plan in self.plans if any(part.plan is plan for part in needed)]
            read = self._ingest(engine, plans)
            segments = {part.name: segments_of(part, read[part.plan.name]) for part in needed}
            require_usable(self.corpus_folder, needed, segments, read, self.options)
            if duplicates is None:
                sources = [
                    SourceSegments(part.name, part.number, segments[part.name], part.channel, part.plan.template)
                    for part in needed
                ]
                with progress("dedup", total=None, unit="tasks") as bar:
                    dedup, valid_share = self.options.dedup, self.options.valid_share
                    duplicates = search_duplicates(
                        folder, sources, dedup, valid_share, Shown(engine, bar), self.against
                    )
            self._finish(engine, segments, read, duplicates)

    def _find_channels(self, read: dict[str, list[Segment]]) -> None:
        """Which channels the `auto` sources have, now that they have been read."""
        channels = {plan.name: [plan.channel] for plan in self.plans}
        for plan in self.plans:
            if plan.source.is_auto:
                channels[plan.name] = channels_in(read[plan.name]) or [plan.channel]
                write_json(plan.folder / CHANNELS_NAME, channels[plan.name])
        self._settle(channels)

    def _ingest(self, engine: TaskEngine, plans: list[SourcePlan]) -> dict[str, list[Segment]]:
        tasks = cut_sources(plans, self.options, engine)
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

    def _finish(
        self,
        engine: TaskEngine,
        segments: dict[str, list[Segment]],
        read: dict[str, list[Segment]],
        duplicates: Duplicates,
    ) -> None:
        """Write the stale sources. From here on the corpus of the last build is no longer whole."""
        for name in (REPORT_NAME, REPORT_HTML_NAME, CLUSTERS_NAME, BENCHMARKS_NAME):
            (self.corpus_folder / name).unlink(missing_ok=True)
        keep_source_numbers(self.corpus_folder, self.numbers)
        finishes = [
            (
                part,
                SourceFinish(
                    SourceSegments(part.name, part.number, segments[part.name]),
                    self.corpus_folder / part.name,
                    self.work / self.inputs[part.name] / "out" / part.name,
                    duplicates,
                    self.options,
                    part.plan.template,
                ),
            )
            for part in self.stale
        ]
        tasks = [(part, finish, task) for part, finish in finishes for task in finish.tasks]
        for part, finish in finishes:
            if not finish.tasks:
                self._commit(part, finish, read)
        with progress("write", total=sum(task.line_bytes for *_, task in tasks), unit="B") as bar:
            for position, facts in engine.run(finish_shard, [task for *_, task in tasks], bar.advance):
                part, finish, task = tasks[position]
                if finish.take(task, facts):
                    self._commit(part, finish, read)

    def _commit(self, part: SourcePart, finish: SourceFinish, read: dict[str, list[Segment]]) -> None:
        plan = part.plan
        states = [segment.state for segment in read[plan.name]]
        content = {
            "source": part.name,
            "number": part.number,
            "path": plan.source.location,
            "channel": part.channel,
            "training_text": TEXT_ONLY if self.options.format == "txt" else plan.template,
            "skipped_file_names": skipped_names(plan, states, NAMED_FILES) if part.is_main else {},
        }
        if plan.source.is_auto:
            channels = [each.channel for each in self.parts if each.plan is plan]
            content[PART_KEY] = {"source": plan.name, "inputs": plan.inputs, "channels": channels}
        finish.commit(self.inputs[part.name], content, report_fields(part, states))
        self.stale = [each for each in self.stale if each is not part]
        if not self.keep_build and all(each.plan is not plan for each in self.stale):
            shutil.rmtree(self.work / plan.inputs, ignore_errors=True)

    def write_report(self) -> dict[str, Any]:
        """Put the reports of all sources together; with `report.json` the corpus is there."""
        by_source = {
            part.name: read_json(self.corpus_folder / part.name / MANIFEST_NAME)["report"] for part in self.parts
        }
        notes = []
        held_out = any(each["valid_records"] for each in by_source.values())
        if held_out and self.options.dedup.near == "off":
            notes = ["near duplicates were not looked for: train may hold changed copies and parts of valid records"]
        report = make_report(by_source, asdict(self.options), fingerprint(self.inputs), notes)
        if not report["totals"]["records_kept"]:
            raise nothing_kept(self.corpus_folder, report)
        for name in (CLUSTERS_NAME, BENCHMARKS_NAME):
            found = self.work / self.dedup_inputs / name
            if found.is_file():  # it stays there too: a build with another format finds this dedup done
                link_or_copy(found, self.corpus_folder / name)
        path = self.corpus_folder / REPORT_NAME
        if not path.is_file() or path.read_bytes() != jsonio.dumps_pretty(report):
            path.unlink(missing_ok=True)
            write_atomic(self.corpus_folder / REPORT_HTML_NAME, report_html(report).encode())
            write_json(path, report)
        if not self.keep_build and self.work.exists():
            shutil.rmtree(self.work)
        return report

    def _remove_other_builds(self) -> None:
        """Remove what is left of builds of other inputs."""
        if self.keep_build or not self.work.is_dir():
            return
        for folder in self.work.iterdir():
            if folder.name not in self._wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def _disk_bytes_needed(self) -> int:
        needed = 0.0
        for file in (file for plan in self.plans for file in plan.listing.files):
            compressed = file.path.suffix.lower() in COMPRESSED_SUFFIXES
            needed += file.size_bytes * (DISK_SHARE_COMPRESSED if compressed else DISK_SHARE)
        there = sum(path.stat().st_size for path in self.work.rglob("*") if path.is_file())  # of an interrupted build
        return max(int(needed) - there, 0) + DISK_MARGIN_BYTES


def _unusual(template: str) -> list[str]:
    """A template that decides something: the usual one is left out, so that older corpora stay current."""
    return [] if template == TITLE_AND_TEXT else [template]


def known_channels(corpus_folder: Path, plan: SourcePlan) -> list[str] | None:
    """The channels a source becomes; None when it is `auto` and has not been read to its end."""
    if not plan.source.is_auto:
        return [plan.channel]
    for path in [
        plan.folder / CHANNELS_NAME,
        *(corpus_folder / name / MANIFEST_NAME for name in plan.source.possible_names),
    ]:
        try:
            values = read_json(path)
        except (OSError, ValueError):
            continue
        if path.name == CHANNELS_NAME:
            return list(values)
        part = values.get(PART_KEY)
        if part and (part["source"], part["inputs"]) == (plan.name, plan.inputs):
            return list(part["channels"])
    return None
