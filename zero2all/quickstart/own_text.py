"""Your own file or folder in the quickstart: checked before anything starts, and what the corpus made of it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.progress import counted
from zero2all.common.records import corpus_sources
from zero2all.common.workspace import Workspace
from zero2all.corpus import Source, source_from_path
from zero2all.corpus.listing import list_files
from zero2all.corpus.report import counts_in_words, mapping_in_words, summary_notes

NAMED_FILES = 4
"""Files named for each reason why they were left out; the others are counted."""
LEAST_BYTES = 1000
"""Less than this cannot be 20 KB of text, even compressed."""
WANTED_BYTES = 20_000
KINDS = "text, code, JSON, CSV or parquet files, plain, compressed or in archives"


@dataclass(frozen=True)
class OwnText:
    """What `--data` names."""

    source: Source
    files: int
    size_bytes: int

    def in_words(self) -> str:
        """How much there is."""
        return f"{self.source.path}: {t(counted(self.files, 'file'))}, {human_bytes(self.size_bytes)}"


def look_at(data: Path, mapping: Mapping[str, str] | None = None) -> OwnText:
    """List what there is; an error, before anything is written, when there is nothing."""
    if not data.exists():
        raise BadInputError(f"--data {data} does not exist. Give a file or a folder of {KINDS}.")
    listing = list_files(data)
    size = sum(file.size_bytes for file in listing.files)
    if not size:
        counts = {reason: len(names) for reason, names in listing.skipped.items()}
        empty = t(counted(len(listing.files), "empty file")) if listing.files else ""
        if counts or empty:
            words = ", ".join(filter(None, (counts_in_words(counts), empty)))
            why = f"--data {data} contains only files that are not read ({words})."
        else:
            why = f"--data {data} contains no files."
        raise BadInputError(
            f"{why} Put {KINDS} into it, 20 KB or more, or name another folder. `z2a quickstart` without --data makes "
            "its own text."
        )
    named = source_from_path(data)
    return OwnText(Source(named.name, named.path, "auto", mapping), len(listing.files), size)


def refuse_too_little(own: OwnText) -> None:
    """An error for a few words, before anything is written."""
    if own.size_bytes < LEAST_BYTES:
        raise BadInputError(
            f"--data {own.source.path} has {human_bytes(own.size_bytes)}. That is too little to learn from: the "
            f"quickstart needs 20 KB of text or more. Give more text, or leave out --data: then the quickstart makes "
            f"its own."
        )


def too_little_in_words(text_bytes: int) -> list[str]:
    """What to expect of less text than the quickstart is made for."""
    small = human_bytes(text_bytes)
    said = f"{small} of text is too little: the model will write garbage. Give at least 20 KB, better 1 MB or more."
    return [said] if text_bytes < WANTED_BYTES else []


def refuse_other_text(workspace: Workspace, name: str, sources: Sequence[Source]) -> None:
    """A workspace whose run learned from something else would fail at training, its corpus replaced already.

    Sources are told apart by file name: a folder that was moved is still the same text.
    """
    if not (workspace.run(name) / "checkpoints").is_dir():
        return
    try:
        before = {str(manifest["path"]) for manifest in corpus_sources(workspace.corpus).values()}
    except BadInputError:  # an interrupted build: there is nothing to lose
        return
    if {Path(path).name for path in before} != {Path(source.location).name for source in sources}:
        raise UsageError(
            f"{workspace.root} contains a quickstart that was trained on {', '.join(sorted(before))}. "
            "Add --fresh to replace it, or use another --work to keep both."
        )


def corpus_in_words(report: Mapping[str, Any], workspace: Workspace) -> list[str]:
    """What was found in each channel, dropped, and left out, a line each."""
    lines = []
    for name, source in report["sources"].items():
        kept = t(
            f"{source['records_kept']:,} of {source['records_in'] - source['quarantined']:,} documents kept, "
            f"{human_bytes(source['bytes_kept'])}; {source['valid_records']:,} held out ({name})"
        )
        lines.append(f"{source['channel']:<6} {kept}")
    lines += _fields_in_words(report)
    lines += summary_notes(report, workspace.root, brief=True)
    return lines + [f"left out: {line}" for line in _left_out(report, workspace.corpus)]


def _fields_in_words(report: Mapping[str, Any]) -> list[str]:
    """Which fields of records were taken for the text; the parts of one source share them."""
    found = [mapping_in_words(each) for source in report["sources"].values() for each in source["mappings"]]
    return [f"fields of the records: {words} (--map sets others)" for words in dict.fromkeys(found)]


def _left_out(report: Mapping[str, Any], corpus: Path) -> Iterator[str]:
    """Files that were not read, and damaged or textless parts of those that were, each with its reason."""
    for name, manifest in corpus_sources(corpus).items():
        for reason, count in report["sources"][name]["skipped_files"].items():
            named = manifest["skipped_file_names"].get(reason, [])[:NAMED_FILES]
            more = t(f" and {count - len(named):,} more") if count > len(named) else ""
            yield f"{', '.join(named)}{more} ({t(reason)})"
        for (file, reason), (count, detail) in _quarantined(corpus / "quarantine" / f"{name}.jsonl").items():
            hint = t("; if one is the text: --map content=FIELD") if reason == "no_text_field" else ""
            yield f"{file}: {t(counted(count, 'record'))} ({t(reason.replace('_', ' '))}: {t(detail)}{hint})"


def _quarantined(path: Path) -> dict[tuple[str, str], tuple[int, str]]:
    """(file, reason) -> how many items, and the first detail; only the commonest."""
    counts: Counter[tuple[str, str]] = Counter()
    details: dict[tuple[str, str], str] = {}
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                item = jsonio.loads(line)
                key = (item["file"], item["reason"])
                counts[key] += 1
                details.setdefault(key, item["detail"])
    return {key: (count, details[key]) for key, count in counts.most_common(NAMED_FILES)}


# How one's own text is cut. What is trained on it: `choose.py`.


DOCUMENTS_WANTED = 60
"""Documents that a single text file is cut into, at least: of fewer than 20, none could be held out."""
DOCUMENT_BYTES = (300, 8_000)
VALID_SHARES = ((4_000_000, 0.1), (15_000_000, 0.05))
"""(below this many bytes, share held out): little text needs a larger share to judge by. Above: 2 %."""


def cutting(raw_bytes: int) -> dict[str, Any]:
    """Options of the corpus: how to cut text files of `raw_bytes` together, and which share to hold out."""
    shortest, longest = DOCUMENT_BYTES
    size = min(max(raw_bytes // DOCUMENTS_WANTED, shortest), longest)
    share = next((share for below, share in VALID_SHARES if raw_bytes < below), 0.02)
    return {"split_text_above_bytes": 3 * size, "text_piece_bytes": size, "valid_share": share}
