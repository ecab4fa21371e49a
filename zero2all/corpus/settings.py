"""A whole build in one YAML file, with the same names as on the command line:

    sources:
      news: raw/news.json:zh                      # PATH[:CHANNEL[:KIND]]
      qa: {path: raw/qa, kind: baike2018qa}
      own: {path: raw/own.parquet, channel: en, map: {content: body}}
    options: {format: jsonl.zst, valid_share: 0.005}
    clean: {too_short: {min_chars: 20}, zh: {digits: {max_share: 0.3}}}
    dedup: {near: all, jaccard: 0.8}
    engine: {workers: 8}

Paths are relative to the folder of the file. Dotted overrides (`--dedup.near off`) come on top, and every problem is
told at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero2all.common.engine import EngineConfig
from zero2all.common.errors import UsageError
from zero2all.common.schema import Problem, apply_overrides, build, nearest_hint
from zero2all.common.yamlio import read_yaml
from zero2all.corpus.listing import is_url
from zero2all.corpus.options import BuildOptions
from zero2all.corpus.sources import KINDS, Source, find_kind, parse_source

SECTIONS = ("sources", "options", "clean", "dedup", "engine")
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class SourceEntry:
    """A source as YAML gives it."""

    path: str
    """A file or a folder, relative to the folder of the YAML file."""
    channel: str | None = None
    """zh, en, code, …; None: that of the kind, or guessed."""
    kind: str | None = None
    """A known data set."""
    map: dict[str, str] = field(default_factory=dict)
    """Record field -> raw field."""


@dataclass(frozen=True)
class BuildSettings:
    """Everything `build_corpus` is told."""

    sources: list[Source]
    options: BuildOptions
    engine: EngineConfig


def load_settings(
    words: Sequence[str],
    overrides: Sequence[str] = (),
    mapping: Mapping[str, str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> BuildSettings:
    """Settings from sources named on the command line or one YAML file, `flags` by section, and overrides on top."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: list[Source] = []
    yaml_files = [word for word in words if word.lower().endswith(YAML_SUFFIXES) and "=" not in word]
    for word in yaml_files:
        if values:
            raise UsageError(f"Give one YAML file, not several ({', '.join(yaml_files)}).")
        values = _read_yaml(Path(word))
        sources += _sources_of(values.pop("sources", None), Path(word).parent, problems)
    sources += [parse_source(word, mapping) for word in words if word not in yaml_files]
    if mapping and yaml_files:
        sources = [replace(source, mapping={**(source.mapping or {}), **mapping}) for source in sources]
    for section, settings in (flags or {}).items():
        given = {name: value for name, value in settings.items() if value is not None}
        if given:
            values[section] = {**(values.get(section) or {}), **given}
    apply_overrides(values, list(overrides), problems)
    options, engine = _build_sections(values, problems)
    if problems:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise UsageError(f"The settings of the build have problems; nothing was started.\n{lines}")
    return BuildSettings(sources, options, engine)


def _build_sections(values: dict[str, Any], problems: list[Problem]) -> tuple[BuildOptions, EngineConfig]:
    problems += [
        Problem(str(name), value, "no such section", nearest_hint(str(name), SECTIONS))
        for name, value in values.items()
        if name not in SECTIONS
    ]
    given = values.get("options") or {}
    options = {**given} if isinstance(given, Mapping) else given
    for section in ("clean", "dedup"):
        if section in values and isinstance(options, dict):
            options[section] = values[section] if values[section] is not None else {}
    found: list[Problem] = []
    built = build(BuildOptions, options, "options", found)
    if isinstance(options, dict) and isinstance(options.get("clean"), Mapping):
        found += BuildOptions(clean=dict(options["clean"])).clean_problems()
    named = tuple(f"options.{section}" for section in ("clean", "dedup") if section in values)
    problems += [  # under the name they were given
        replace(each, field=each.field.removeprefix("options.")) if each.field.startswith(named) else each
        for each in found
    ]
    engine = build(EngineConfig, values.get("engine"), "engine", problems)
    return built or BuildOptions(), engine or EngineConfig()


def _sources_of(entries: Any, folder: Path, problems: list[Problem]) -> list[Source]:
    if not isinstance(entries, Mapping) or not entries:
        problems.append(Problem("sources", entries, "a mapping of names to paths, or to path, channel, kind and map"))
        return []
    found = []
    for name, entry in entries.items():
        place = f"sources.{name}"
        if isinstance(entry, str):
            found.append(parse_source(f"{name}={_placed(entry, folder)}"))
            continue
        built = build(SourceEntry, entry, place, problems)
        if built is None or built.path is None:
            continue
        kind = None
        if built.kind is not None:
            kind = find_kind(built.kind)
            if kind is None:
                problems.append(
                    Problem(f"{place}.kind", built.kind, "a known data set", nearest_hint(built.kind, KINDS))
                )
        found.append(Source(str(name), _placed(built.path, folder), built.channel, built.map or None, kind))
    return found


def _placed(path: str, folder: Path) -> Path | str:
    return path if is_url(path) else folder / Path(path).expanduser()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}. A source is given as NAME=PATH; a build as a YAML file.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    values = _with_text_keys(values)
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {type(values).__name__}; expected sections: {', '.join(SECTIONS)}.")
    return values


def _with_text_keys(values: Any) -> Any:
    """YAML 1.1 reads the names `on` and `off` as true and false; as names they are meant as they stand."""
    if isinstance(values, dict):
        words = {True: "on", False: "off"}
        return {words[key] if isinstance(key, bool) else key: _with_text_keys(value) for key, value in values.items()}
    return [_with_text_keys(value) for value in values] if isinstance(values, list) else values
