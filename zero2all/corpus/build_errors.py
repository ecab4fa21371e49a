"""The errors that stop a build, in words: what was wrong, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.corpus.finish import DROPPED_FOLDER
from zero2all.corpus.report import counts_in_words, in_short
from zero2all.corpus.segments import QUARANTINE_NAME
from zero2all.corpus.sources import FIELD_NAMES, Source, content_flag


def nothing_readable(source: Source, skipped: Mapping[str, int], notes: Sequence[str]) -> BadInputError:
    """The error for a source without a single readable file."""
    sentences = [f"Source {source.name}: nothing readable was found in {source.path}."]
    if skipped:
        sentences.append(f"Files left out: {counts_in_words(skipped)}.")
    sentences.append(
        "Expected text, JSON lines, JSON arrays or objects, CSV, parquet, pages or books, plain, compressed or in "
        "archives, in files whose names do not start with a dot."
    )
    sentences += [f"{note}." for note in notes[:3]]
    return BadInputError(" ".join([*sentences, "Check the path."]))


def no_text_field(source: Source, where: str, fields: list[str]) -> BadInputError:
    """The error for rows none of whose fields is known to hold the text."""
    wanted = source.given_mapping.get("content")
    if wanted:
        problem = f"Source {source.name}: the records in {where} have no field '{wanted}', which content is mapped to."
    else:
        problem = f"Source {source.name}: no text field was found in {where}."
    return BadInputError(
        f"{problem} Its records have the fields {', '.join(fields) or '(none)'}. Name the field that holds the text "
        f"with --map content=FIELD, for example {content_flag(fields[0] if fields else 'text')}. Recognised without "
        f"it: {FIELD_NAMES['content'].replace(' ', ', ')}. Of chats, give the kind: NAME=PATH:CHANNEL:conversation."
    )


def nothing_kept(corpus_folder: Path, report: Mapping[str, Any]) -> BadInputError:
    """The error for a build that keeps no record: what each rule dropped, as which channel, with samples."""
    totals, sources = report["totals"], report["sources"]
    counts = {**totals["dropped"], "quarantined": totals["quarantined"]}
    words = counts_in_words({reason: count for reason, count in counts.items() if count})
    lines = []
    for name, source in sources.items():
        for rule, count in source["dropped"].items():
            lines.append(
                f"  {name}: {rule} dropped {count:,} of {source['records_in']:,} records as channel "
                f"{source['channel']}."
            )
            lines += [f"    {in_short(sample)}" for sample in source["examples"]["dropped"].get(rule, [])[:2]]
    look = [
        f"More samples are in {corpus_folder / name / DROPPED_FOLDER}." for name in sources if sources[name]["dropped"]
    ]
    look += [
        f"Damaged items are listed in {corpus_folder / QUARANTINE_NAME / name}.jsonl."
        for name in sources
        if sources[name]["quarantined"]
    ]
    fields = [mapping["content"] for source in sources.values() for mapping in source["mappings"]]
    taken_from = ", ".join(f"'{field}'" for field in dict.fromkeys(fields)) or "whole text files"
    return BadInputError(
        f"The corpus is empty: {totals['records_in']:,} records were read and none was kept ({words}). Text was "
        f"taken from {taken_from}.\n"
        + "".join(f"{line}\n" for line in lines)
        + "If this is good text, check that the text field is the right one (--map content=FIELD), name the right "
        "channel (NAME=PATH:CHANNEL with zh, en, code, auto or a name of yours), or loosen the rule "
        "(z2a corpus rules).\n" + "\n".join(look)
    )
