"""What is told about a source beside its counts: what was found before reading it, and what reading it showed."""

from __future__ import annotations

from typing import Any

from zero2all.common.files import human_bytes
from zero2all.corpus.plan import Part, SourcePlan, planned_units
from zero2all.corpus.report import FOUND_BY_DOCUMENT, mapping_in_words
from zero2all.corpus.segments import Segment, segments_of_channel

NOTED_FILES = 20


def segments_of(part: Part, read: list[Segment]) -> list[Segment]:
    """What was read of a source, as far as it belongs to one part of it."""
    return segments_of_channel(read, part.channel) if part.plan.source.is_auto else read


def plan_in_words(plan: SourcePlan) -> str:
    """What was found and guessed, in a line."""
    files = f"{len(plan.listing.files):,} file{'' if len(plan.listing.files) == 1 else 's'}"
    parts = [f"{files}, {human_bytes(plan.listing.size_bytes)}"]
    if plan.look.formats:
        parts.append(" and ".join(plan.look.formats))
    if plan.source.is_auto:
        parts.append(
            f"each document goes to the source of its channel, {plan.name}-zh and so on: {plan.channel_reason}"
        )
    else:
        guessed = "" if plan.source.given_channel else f" (guessed: {plan.channel_reason})"
        parts.append(f"channel {plan.channel}{guessed}")
    parts += [mapping_in_words(mapping) for mapping in plan.look.mappings]
    return f"{plan.name}: {'; '.join(parts)}"


def report_fields(part: Part, states: list[dict[str, Any]]) -> dict[str, Any]:
    """What the report of a source says beside the counts; `states` are those of all segments of what was read."""
    plan = part.plan
    mappings: list[dict[str, str]] = []
    formats: dict[str, int] = {}
    notes = _planning_notes(plan)
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


def _planning_notes(plan: SourcePlan) -> list[str]:
    """What the readers of large files say about how these can be read."""
    notes = dict.fromkeys(f"{unit.file.name}: {unit.note}" for unit in planned_units(plan) if unit.note)
    return list(notes)[:NOTED_FILES]
