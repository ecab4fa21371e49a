"""The report of a build: per source, what came in, what was kept, and what was not and why.

Two identities are checked at the end of every build:

    records_in = records_kept + sum(dropped) + quarantined
    bytes_in   = bytes_kept   + sum(bytes_dropped) + bytes_quarantined + bytes_repaired

`bytes_*` count UTF-8 bytes of text (of damaged items: raw bytes). `bytes_repaired` is what repair, edits and masks
removed from kept texts; `input_file_bytes` is the size on disk. Valid records count as kept. No time and no host name
goes into the report, so that two builds of the same input write the same bytes. Later stages read the sources listed in
`report.json` and no other folder.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import human_bytes, read_json_object
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, terminal_safe
from zero2all.common.records import REPORT_NAME, report_sources
from zero2all.corpus.segments import Segment

SUMMED = ("records_in", "records_kept", "quarantined", "bytes_in", "bytes_kept", "train_records", "valid_records")
ACCOUNTED_BYTES = ("bytes_kept", "bytes_dropped", "bytes_quarantined", "bytes_repaired")
"""The bytes of a source that add up to `bytes_in`; those dropped stand by reason."""
LENGTH_BUCKETS = 32
OTHER_REASONS = {
    "duplicate": "The same text as another record, white space aside.",
    "near_duplicate": "Nearly the same text as another record.",
    "benchmark": "Contains an item of a benchmark named with --against.",
    "repeated_passages": "Of its text, too little had not occurred before. The bytes are also those cut out of others.",
    "low_score": "The score is below quality.min_score.",
}
"""Why records are dropped by others than the rules of cleaning."""
STRIKING_SHARE, STRIKING_COUNT = 0.005, 20
"""A rule that drops more of a source than both is pointed at, with samples: it may not suit the text."""
SHOWN_SAMPLES, SHOWN_CHARS = 2, 60
FOUND_BY_DOCUMENT = "decided for each document"
"""The reason for the channel of a part of an `auto` source."""
EXAMPLE_CHARS = 300
"""How much of a text the report shows as an example."""


@dataclass
class Tally:
    """Counts while a source is built. Incoming items and outcomes are counted apart, then compared."""

    records_in: int = 0
    records_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quarantined_by_reason: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_kept: int = 0
    bytes_repaired: int = 0
    bytes_dropped: Counter[str] = field(default_factory=Counter)
    bytes_quarantined: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    private_use: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Tally:
        """The counts of some segments together."""
        tally = cls()
        for segment in segments:
            for each in fields(cls):
                counts, more = getattr(tally, each.name), segment.state["tally"][each.name]
                if isinstance(counts, Counter):
                    counts.update(more)
                else:
                    setattr(tally, each.name, counts + more)
        return tally

    def as_report(self) -> dict[str, Any]:
        """The counts as they stand in `report.json`."""
        report: dict[str, Any] = {}
        for each in fields(self):
            counts = getattr(self, each.name)
            if each.name == "quarantined_by_reason":
                report["quarantined"] = counts.total()
            report[each.name] = dict(sorted(counts.items())) if isinstance(counts, Counter) else counts
        return report

    def drop_kept(self, reason: str, records: int, text_bytes: int) -> None:
        """Records or parts of them that were counted as kept are dropped."""
        if records or text_bytes:
            self.records_kept -= records
            self.bytes_kept -= text_bytes
            self.dropped.update({reason: records} if records else {})
            self.bytes_dropped[reason] += text_bytes


def make_report(
    sources: dict[str, dict[str, Any]], options: dict[str, Any], inputs: str, notes: list[str]
) -> dict[str, Any]:
    """Put the reports of all sources together and check them."""
    for name, source in sources.items():
        check_identity(name, source)
    totals: dict[str, Any] = {key: sum(source[key] for source in sources.values()) for key in SUMMED}
    totals["shards"] = sum(source.get("shards", 0) for source in sources.values())  # sources of old builds have none
    dropped: Counter[str] = Counter()
    for source in sources.values():
        dropped.update(source["dropped"])
    return {
        "inputs": inputs,
        "options": options,
        "notes": notes,
        "totals": {**totals, "dropped": dict(sorted(dropped.items()))},
        "sources": sources,
    }


def check_identity(name: str, source: dict[str, Any]) -> None:
    """Every record and byte must be accounted for: what came in equals what was kept, dropped or quarantined."""
    records_out = source["records_kept"] + sum(source["dropped"].values()) + source["quarantined"]
    bytes_out = sum(accounted_bytes(source).values())
    if source["train_records"] + source["valid_records"] != source["records_kept"]:
        raise AssertionError(f"source {name}: train + valid records differ from records kept: {source}")
    if (records_out, bytes_out) != (source["records_in"], source["bytes_in"]):
        raise AssertionError(
            f"source {name}: {source['records_in']} records and {source['bytes_in']} bytes came in, {records_out} "
            f"records and {bytes_out} bytes are accounted for. This is a bug in the corpus stage: {source}"
        )


def accounted_bytes(source: Mapping[str, Any]) -> dict[str, int]:
    """Where the bytes of a source went: kept, dropped, quarantined and repaired."""
    return {
        name.removeprefix("bytes_"): sum(source[name].values()) if isinstance(source[name], Mapping) else source[name]
        for name in ACCOUNTED_BYTES
    }


def read_report(corpus_folder: Path) -> dict[str, Any]:
    """The report of the last finished build."""
    try:
        report = read_json_object(corpus_folder / REPORT_NAME, "Run `z2a corpus build` again.")
    except FileNotFoundError:
        raise BadInputError(
            f"There is no finished corpus in {corpus_folder} (no {REPORT_NAME}). Run `z2a corpus build "
            "NAME=PATH` first. If it was interrupted, run it again to continue."
        ) from None
    report_sources(report, corpus_folder / REPORT_NAME, "Run `z2a corpus build` again.")
    return report


def summary_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """A table: a heading, a row per source, and a total when there are several."""
    rows = [
        ["source", "channel", "records in", "kept", "dropped", "quarantined", "train", "valid", "shards", "text kept"]
    ]
    named = list(report["sources"].items())
    if len(named) > 1:
        named.append((t("total"), {"channel": "", **report["totals"]}))
    for name, source in named:
        counts = [source["records_in"], source["records_kept"], sum(source["dropped"].values()), source["quarantined"]]
        counts += [source["train_records"], source["valid_records"], source.get("shards", 0)]
        rows.append([name, source["channel"], *(f"{count:,}" for count in counts), human_bytes(source["bytes_kept"])])
    return rows


def summary_notes(report: Mapping[str, Any], work: Path | None = None, brief: bool = False) -> list[str]:
    """What the table cannot say, a sentence each: what was guessed, dropped, quarantined, skipped.

    `work`: the workspace, when commands must name it. `brief`: without what was guessed, quarantined, skipped or not
    held out, for a caller that prints this itself.
    """
    notes: list[str] = []
    for name, source in report["sources"].items():
        if not brief and source["channel_guessed"] and source["channel_reason"] != FOUND_BY_DOCUMENT:
            notes.append(f"{name}: channel guessed as {source['channel']} ({source['channel_reason']})")
        if not brief and source["mapping_guessed"]:
            is_part = source["channel_reason"] == FOUND_BY_DOCUMENT
            whole = name.removesuffix(f"-{source['channel']}") if is_part else name
            words = [f"{whole}: fields guessed: {mapping_in_words(mapping)}" for mapping in source["mappings"]]
            guesses = [f"{each}; all other fields are kept under 'others'" for each in words]
            notes += [each for each in guesses if each not in notes]
        if source["dropped"]:
            notes.append(f"{name}: dropped {counts_in_words(source['dropped'])}")
        for rule, note in _striking_drops(name, source, work).items():
            samples = source["examples"]["dropped"].get(rule, [])[:SHOWN_SAMPLES]
            excerpts = " | ".join(in_short(sample, SHOWN_CHARS) for sample in samples)
            notes += [note, f"{name}: {rule} dropped, for example: {excerpts}"] if excerpts else [note]
        if source["masked"]:
            notes.append(f"{name}: masked {counts_in_words(source['masked'])}")
        if source.get("records_cut"):
            notes.append(f"{name}: repeated passages were cut out of {source['records_cut']:,} records")
        if source.get("valid_shared_with_train"):
            notes.append(f"{name}: {source['valid_shared_with_train']:,} held-out records share text with train")
        notes += [f"{name}: {t(words)}" for words in facts_in_words(source).values()]
        if source["quarantined"] and not brief:
            reasons = counts_in_words(source["quarantined_by_reason"])
            listed = (work or Path()) / "corpus/quarantine" / f"{name}.jsonl"
            notes.append(f"{name}: quarantined {reasons}; see {listed}")
        if "no_text_field" in source["quarantined_by_reason"]:
            notes.append(
                f"{name}: some records have no text field; if one of their fields is the text, name it "
                f"with --map content=FIELD"
            )
        if source["skipped_files"] and not brief:
            notes.append(f"{name}: files not read: {counts_in_words(source['skipped_files'])}")
        notes += [f"{name}: {t(note)}" for note in source["reading_notes"]]
        if not brief and not source["valid_records"] and report["options"]["valid_share"]:
            notes.append(f"{name}: too few records to hold out any for validation")
    return [t(note) for note in [*notes, *report["notes"]]]


def striking_drops(report: Mapping[str, Any], work: Path | None = None) -> list[str]:
    """The rules that dropped much of a source, a sentence each, with the command that shows what they dropped."""
    found = (_striking_drops(name, source, work) for name, source in report["sources"].items())
    return [t(note) for notes in found for note in notes.values()]


def _striking_drops(name: str, source: Mapping[str, Any], work: Path | None) -> dict[str, str]:
    """Rule -> what is said of it."""
    in_work = "" if work is None else f"--work {shlex.quote(str(work))} "
    notes = {}
    for rule, count in source["dropped"].items():
        share = count / source["records_in"]
        if count > max(STRIKING_COUNT, STRIKING_SHARE * source["records_in"]):
            look = f"z2a corpus show {in_work}{name} --dropped {rule}"
            notes[rule] = (
                f"{name}: {rule} dropped {share:.1%} of the records as channel {source['channel']}. Check whether "
                f"it should: {look}"
            )
    return notes


def facts_in_words(source: Mapping[str, Any]) -> dict[str, str]:
    """What became of characters without a meaning; a sentence by topic."""
    words = {}
    if counts := source["private_use"]:
        words["characters"] = (
            f"private-use characters in {counted(counts['records'], 'record')}: {counts.get('mapped', 0):,} "
            f"replaced by the standard characters of GB18030, {counts.get('removed', 0):,} removed"
        )
    if counts := source.get("replaced"):  # not in reports of earlier versions
        words["bad bytes"] = (
            f"{counted(counts['characters'], 'character')} in {counted(counts['records'], 'record')} could "
            "not be decoded and became U+FFFD; name another encoding with --encoding"
        )
    return words


def mapping_in_words(mapping: Mapping[str, str]) -> str:
    """{'content': 'text'} -> "content from 'text'"."""
    return ", ".join(t(f"{target} from '{raw}'") for target, raw in mapping.items())


def in_short(text: str, chars: int = 100) -> str:
    """The beginning of a text in one line, without anything a terminal would take for a command."""
    line = " ".join(terminal_safe(text, " ").split())
    return line if len(line) <= chars else f"{line[:chars]} …"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """{'empty': 3, 'duplicate': 1200} -> '1,200 duplicate, 3 empty'."""
    return ", ".join(f"{count:,} {t(reason)}" for reason, count in by_size(counts))


def by_size(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The counts, the largest first."""
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
