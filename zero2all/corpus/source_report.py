"""What was found in a source, before and by reading it; and whether that can become a corpus.

If not, the build stops before it writes anything.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.progress import counted
from zero2all.common.records import TITLE_AND_TEXT
from zero2all.corpus.build_errors import no_text_field, nothing_readable
from zero2all.corpus.channels import NOTHING_SAMPLED
from zero2all.corpus.listing import UNREADABLE
from zero2all.corpus.plan import SourcePart, SourcePlan, planned_units
from zero2all.corpus.report import FOUND_BY_DOCUMENT, Tally, in_short, mapping_in_words
from zero2all.corpus.segments import CHANNELS_KEY, QUARANTINE_NAME, Segment, dropped_excerpts, write_quarantine
from zero2all.corpus.settings import BuildOptions
from zero2all.corpus.sources import content_flag

SWALLOWING = 16
"""Damaged items this many times as large as a record hold other records, which count as unread."""
MOST_DROPPED_BY_GUESS = 0.2
"""When a rule drops a larger share of a source whose channel was guessed, the build stops: the guess may be wrong."""
NAMED_FIELDS = 10
"""Of records without text."""
NOTED_FILES = 20
TRANSIENT = frozenset({UNREADABLE, "read_error"})
"""Reasons of damage that may be gone at the next attempt, though the file has not changed."""


def require_usable(
    corpus_folder: Path,
    parts: Sequence[SourcePart],
    segments: Mapping[str, list[Segment]],
    read: Mapping[str, list[Segment]],
    options: BuildOptions,
) -> None:
    """Stop when a source has nothing in it, no text, too much damage, or loses too much to a rule by a guess."""
    tallies = {part.name: Tally.of(segments[part.name]) for part in parts}
    for part in parts:
        path = corpus_folder / QUARANTINE_NAME / f"{part.name}.jsonl"
        damage = write_quarantine(path, segments[part.name], part.number)
        listed = f"Found: {damage}. Each one is listed with file, place and reason in {path}."
        if part.is_main:
            whole = Tally.of(segment for each in parts if each.plan is part.plan for segment in segments[each.name])
            _require_undamaged(part, whole, tallies[part.name], listed, read[part.plan.name], options.max_damaged_share)
    if not options.accept_drops:
        of_source: Counter[str] = Counter()
        for part in parts:
            of_source[part.plan.name] += tallies[part.name].records_in
        found = [
            (part, rule, count)
            for part in parts
            if part.is_guessed
            for rule, count in tallies[part.name].dropped.items()
            if rule != "empty"
            and count > MOST_DROPPED_BY_GUESS * tallies[part.name].records_in
            and count > 0.01 * of_source[part.plan.name]  # not a few records of a small part
        ]
        if found:
            raise too_many_dropped(found, tallies, segments)


def _require_undamaged(
    part: SourcePart, whole: Tally, tally: Tally, listed: str, segments: list[Segment], most: float
) -> None:
    """Stop when what a source gave is nothing, nothing but rows without text, or too much damage."""
    plan, source, records_in = part.plan, part.plan.source, whole.records_in
    states = [segment.state for segment in segments]
    if not records_in:
        facts = report_fields(part, states)
        raise nothing_readable(source, facts["skipped_files"], facts["reading_notes"])
    damaged, without_text = tally.quarantined_by_reason.total(), tally.quarantined_by_reason["no_text_field"]
    fields = list(dict.fromkeys(field for state in states for field in state["unmapped_fields"]))
    if damaged == without_text == records_in:
        raise no_text_field(source, str(source.path), fields)
    unread_bytes = sum(segment.state["unread_bytes"] for segment in segments_of(part, segments))
    swallowed = tally.bytes_quarantined - unread_bytes
    if swallowed > SWALLOWING * damaged * whole.bytes_in / records_in:  # an unclosed quote in a table
        unread_bytes += swallowed
    unread_share = unread_bytes / max(plan.listing.size_bytes, 1)  # of what was compressed, more may be unread
    share = min(1.0, max(damaged / records_in, unread_share))
    if share > most:
        _forget_unreadable(plan, segments)
        sentences = [
            f"Source {source.name}: {damaged:,} of {records_in:,} records are damaged ({share:.2%}; at most {most:.2%} "
            f"is allowed)."
        ]
        if unread_bytes:
            sentences.append(f"After damaged places, {unread_bytes:,} bytes could not be read.")
        sentences.append(listed)
        if without_text and fields:
            sentences.append(
                f"Some records have no text field. If one of their fields ({', '.join(fields[:NAMED_FIELDS])}) is the "
                f"text, name it, for example {content_flag(fields[0])}."
            )
        sentences.append("Repair the input, or accept the loss with a larger --max-damaged-share.")
        raise BadInputError(" ".join(sentences))


def too_many_dropped(
    found: list[tuple[SourcePart, str, int]], tallies: Mapping[str, Tally], segments: Mapping[str, list[Segment]]
) -> BadInputError:
    """The error for rules that drop much of sources whose channel was guessed; it shows what they dropped."""
    lines = []
    for part, rule, count in found:
        share = count / tallies[part.name].records_in
        lines.append(
            f"  {part.name}: {rule} dropped {count:,} of {tallies[part.name].records_in:,} records ({share:.0%}) as "
            f"channel {part.channel}, such as:"
        )
        lines += [f"    {in_short(excerpt)}" for excerpt in dropped_excerpts(segments[part.name], rule)]
    sources = ", ".join(dict.fromkeys(part.plan.name for part, *_ in found))
    return BadInputError(
        f"A rule drops more than {MOST_DROPPED_BY_GUESS:.0%} of a source whose channel was guessed: the guess "
        "or the rule may be wrong. Nothing was written to the corpus; what was read is kept.\n"
        + "\n".join(lines)
        + (
            f"\nIf this is good text, name the channel of {sources} as NAME=PATH:CHANNEL (zh, en, code, auto for "
            "each document by its own text, or a name of yours), or loosen the rule. If it is bad text, run the "
            "same command with --accept-drops: it continues from here."
        )
    )


def _forget_unreadable(plan: SourcePlan, segments: list[Segment]) -> None:
    """Let the next run try again what the disk or the network refused: a new permission does not change a file."""
    if any(unit.format == UNREADABLE for unit in planned_units(plan)):
        shutil.rmtree(plan.folder, ignore_errors=True)  # how the source was cut is no longer true
    for segment in segments:
        states = segment.state.get(CHANNELS_KEY, {"": segment.state}).values()
        if any(not TRANSIENT.isdisjoint(state["tally"]["quarantined_by_reason"]) for state in states):
            shutil.rmtree(segment.folder.parent, ignore_errors=True)


def segments_of(part: SourcePart, read: list[Segment]) -> list[Segment]:
    """What was read of a source, as far as it belongs to one part of it."""
    if not part.plan.source.is_auto:
        return read
    parts = [(segment.folder / part.channel, segment.state[CHANNELS_KEY].get(part.channel)) for segment in read]
    return [Segment(folder, state) for folder, state in parts if state is not None]


def plan_in_words(plan: SourcePlan) -> str:
    """What was found and guessed, in a line."""
    parts = [f"{t(counted(len(plan.listing.files), 'file'))}, {human_bytes(plan.listing.size_bytes)}"]
    if plan.look.formats:
        parts.append(", ".join(map(t, plan.look.formats)))
    if plan.source.is_auto:
        channel = f"each document goes to the source of its channel, such as {plan.name}-zh: {plan.channel_reason}"
    elif plan.source.given_channel:
        channel = f"channel {plan.channel}"
    elif plan.channel_reason == NOTHING_SAMPLED:
        channel = "its channel is not known: no document could be sampled"
    else:
        channel = f"channel {plan.channel} (guessed: {plan.channel_reason})"
    parts.append(t(channel))
    parts += [mapping_in_words(mapping) for mapping in plan.look.mappings]
    if plan.template != TITLE_AND_TEXT or any(len(mapping) > 1 for mapping in plan.look.mappings):
        template = plan.template.replace("\n", "\\n")
        parts.append(t(f"training text {template}"))
    return f"{plan.name}: {'; '.join(parts)}"


def report_fields(part: SourcePart, states: list[dict[str, Any]]) -> dict[str, Any]:
    """What the report of a source says beside the counts; `states` are those of all segments of what was read."""
    plan = part.plan
    mappings: list[dict[str, str]] = []
    formats: dict[str, int] = {}
    notes = [f"{unit.file.name}: {unit.note}" for unit in planned_units(plan) if unit.note]
    skipped = {reason: len(names) for reason, names in plan.listing.skipped.items()}
    for state in states:
        mappings += [mapping for mapping in state["mappings"] if mapping not in mappings]
        notes += state["notes"]
        for name, count in state["formats"].items():
            formats[name] = formats.get(name, 0) + count
        for reason, count in state["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    given = plan.source.given_mapping
    return {
        "channel": part.channel,
        "channel_guessed": part.is_guessed,
        "channel_reason": FOUND_BY_DOCUMENT if plan.source.is_auto else plan.channel_reason,
        "kind": plan.source.kind,
        "mappings": mappings,
        "mapping_guessed": any(given.get(target) != raw for each in mappings for target, raw in each.items()),
        "formats": dict(sorted(formats.items())),
        "reading_notes": list(dict.fromkeys(notes))[:NOTED_FILES] if part.is_main else [],
        "input_files": len(plan.listing.files),
        "input_file_bytes": plan.listing.size_bytes,
        "skipped_files": dict(sorted(skipped.items())) if part.is_main else {},
    }


def skipped_names(plan: SourcePlan, states: list[dict[str, Any]], limit: int) -> dict[str, list[str]]:
    """The first names of files that were not read, by reason."""
    names = {reason: list(found) for reason, found in plan.listing.skipped.items()}
    for state in states:
        for reason, found in state["skipped_names"].items():
            names.setdefault(reason, []).extend(found)
    return {reason: found[:limit] for reason, found in sorted(names.items())}
