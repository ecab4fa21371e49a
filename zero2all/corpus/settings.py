"""How a corpus is built: all options, and a whole build in one YAML file with the names of the command line:

    sources:
      news: raw/news.json:zh                      # PATH[:CHANNEL[:KIND]]
      qa: {path: raw/qa, kind: baike2018qa}
      own: {path: raw/own.parquet, channel: en, map: {content: body}, training_text: "{title}\\n{content}"}
    options: {format: jsonl.zst, valid_share: 0.005}
    clean: {too_short: {min_chars: 20}, zh: {digits: {max_share: 0.3}}}
    dedup: {near: all, jaccard: 0.8}
    quality: {model: quality, min_score: 0.3}
    engine: {workers: 8}

Paths are relative to the folder of the file. Dotted overrides (`--dedup.near off`) come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zero2all.common.engine import EngineConfig
from zero2all.common.errors import UsageError
from zero2all.common.schema import Problem, apply_overrides, build, nearest_hint
from zero2all.common.yamlio import read_yaml
from zero2all.corpus.clean.config import RULES, CleanConfig, build_config, merged
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.listing import is_url
from zero2all.corpus.quality import QualityConfig
from zero2all.corpus.readers import ReaderLimits, TextBy
from zero2all.corpus.shard_files import SHARD_FORMATS, ShardFormat
from zero2all.corpus.sources import KINDS, Source, find_kind, parse_source

SECTIONS = ("sources", "options", "clean", "dedup", "quality", "engine")
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class BuildOptions:
    """How a corpus is built."""

    format: ShardFormat = "jsonl"
    """How shards are written: jsonl, jsonl.zst, parquet or txt."""
    shard_bytes: int = 200_000_000
    """Largest size of a shard, measured as lines of JSON."""
    valid_share: float = 0.01
    """Share of the kept records held out as valid, chosen by digest. A source of at least 20 records holds out at
    least one, a smaller one none. 0: nothing is held out."""
    max_damaged_share: float = 0.01
    """The build stops when a larger share of a source's records, or of its bytes, is damaged."""
    accept_drops: bool = False
    """Go on when a rule drops more than a fifth of a source whose channel was guessed; otherwise the build stops."""
    max_record_bytes: int = 32_000_000
    """A JSON line, JSON object or whole-file document above this size is quarantined without being read."""
    split_text_above_bytes: int = 1_000_000
    """A plain text file above this size is cut into documents; below, it is one document."""
    text_piece_bytes: int = 8_000
    """Documents cut from a long text have 1 to 4 times this many bytes."""
    text_by: Literal["auto", "line", "blank line", "file"] = "auto"
    """What one document of a plain text is. auto: the file, or above `split_text_above_bytes` pieces of it."""
    unit_bytes: int = 32_000_000
    """About how many raw bytes a worker takes at a time."""
    rules: Literal["default", "none"] = "default"
    """default: each channel has the rules `zero2all.corpus.clean` gives it; none: texts are repaired, empty ones
    dropped, and only the rules switched on under `clean` judge them."""
    clean: dict[str, Any] = field(default_factory=dict)
    """Settings of rules, such as {"too_short": {"min_chars": 20}}; under the name of a channel, for that one only."""
    dedup: DedupConfig = field(default_factory=DedupConfig)
    """How duplicates are found."""
    quality: QualityConfig = field(default_factory=QualityConfig)
    """How texts that the rules keep are judged."""

    def problems(self) -> list[str]:
        """Everything wrong with these options, one sentence each."""
        found = []
        if self.format not in SHARD_FORMATS:
            found.append(f"format is {self.format}; expected {', '.join(SHARD_FORMATS)}")
        if self.rules not in ("default", "none"):
            found.append(f"rules is {self.rules}; expected default or none")
        if self.text_by not in tuple(TextBy):
            found.append(f"text_by is {self.text_by}; expected {', '.join(TextBy)}")
        if not 0 <= self.valid_share <= 0.5:
            found.append(f"valid_share is {self.valid_share}; expected 0 to 0.5")
        if not 0 <= self.max_damaged_share <= 1:
            found.append(f"max_damaged_share is {self.max_damaged_share}; expected 0 to 1")
        names = ("shard_bytes", "max_record_bytes", "split_text_above_bytes", "text_piece_bytes", "unit_bytes")
        found += [f"{name} is {getattr(self, name)}; expected at least 1" for name in names if getattr(self, name) < 1]
        return found + self.dedup.problems() + self.quality.problems() + [str(each) for each in self.clean_problems()]

    @property
    def limits(self) -> ReaderLimits:
        """What the readers must respect."""
        names = ("max_record_bytes", "split_text_above_bytes", "text_piece_bytes", "unit_bytes")
        return ReaderLimits(**{name: getattr(self, name) for name in names}, text_by=TextBy(self.text_by))

    def signing(self, channel: str) -> dict[str, Any]:
        """The part of the dedup settings that decides what ingest writes."""
        return {"near": self.dedup.near, "shingle": asdict(self.dedup.shingle(channel))}

    def clean_config(self, channel: str) -> CleanConfig:
        """The rules for one channel."""
        problems: list[Problem] = []
        config = self._built(channel, problems)
        if config is None or problems:
            raise AssertionError(f"the rules should have been checked before: {problems}")
        return config

    def clean_problems(self) -> list[Problem]:
        """What is wrong with the settings of the rules."""
        problems: list[Problem] = []
        channels = [name for name in self.clean if name not in RULES] or ["en"]
        for channel in channels:
            if self.clean.get(channel) is not None and not isinstance(self.clean[channel], Mapping):
                expected = f"a mapping of rules; there is no rule named `{channel}`, so it is read as a channel"
                problems.append(Problem(f"clean.{channel}", self.clean[channel], expected))
            else:
                self._built(channel, problems)
        return list({str(problem): problem for problem in problems}.values())

    def _built(self, channel: str, problems: list[Problem]) -> CleanConfig | None:
        values: dict[str, Any] = {}
        if self.rules == "none":
            kept_on = ("repair", "mask", "kinds", "empty")
            values = {name: {"on": False} for name in RULES if name not in kept_on}
        for name, settings in self.clean.items():
            if name in RULES:
                values[name] = merged(values.get(name), settings)
        for name, settings in (self.clean.get(channel) or {}).items():
            values[name] = merged(values.get(name), settings)
        return build_config(channel, values, "clean", problems)


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
    encoding: str | None = None
    """Of its files that are not UTF-8 and have no byte order mark; None: found file by file."""
    training_text: str | None = None
    """Template of the text that a model sees, such as "{title}\\n{desc}\\n{content}"; None: by what the source has."""


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
    training_text: str | None = None,
    encoding: str | None = None,
) -> BuildSettings:
    """Settings from sources named on the command line or one YAML file, `flags` by section, and overrides on top;
    `training_text` and `encoding` for every source that has none of its own."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: list[Source] = []
    yaml_files = [word for word in words if word.lower().endswith(YAML_SUFFIXES) and "=" not in word]
    for word in yaml_files:
        if values:
            raise UsageError(f"Give one YAML file, not several ({', '.join(yaml_files)}).")
        values = _read_yaml(Path(word))
        quality = values.get("quality")
        if isinstance(quality, dict) and isinstance(quality.get("filter"), str):
            quality["filter"] = str(_placed(quality["filter"], Path(word).parent))
        sources += _sources_of(values.pop("sources", None), Path(word).parent, problems)
    sources += [parse_source(word, mapping) for word in words if word not in yaml_files]
    if mapping and yaml_files:
        sources = [replace(source, mapping={**(source.mapping or {}), **mapping}) for source in sources]
    sources = [
        replace(source, training_text=source.training_text or training_text, encoding=source.encoding or encoding)
        for source in sources
    ]
    for section, settings in (flags or {}).items():
        given = {name: value for name, value in settings.items() if value is not None}
        if given:
            values[section] = {**(values.get(section) or {}), **given}
    apply_overrides(values, list(overrides), problems)
    options, engine = _build_sections(values, problems)
    if problems:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise UsageError("The settings of the build have problems; nothing was started.\n" + lines)
    return BuildSettings(sources, options, engine)


def _build_sections(values: dict[str, Any], problems: list[Problem]) -> tuple[BuildOptions, EngineConfig]:
    problems += [
        Problem(str(name), value, "no such section", nearest_hint(str(name), SECTIONS))
        for name, value in values.items()
        if name not in SECTIONS
    ]
    given = values.get("options") or {}
    options = {**given} if isinstance(given, Mapping) else given
    for section in ("clean", "dedup", "quality"):
        if section in values and isinstance(options, dict):
            options[section] = values[section] if values[section] is not None else {}
    found: list[Problem] = []
    built = build(BuildOptions, options, "options", found)
    if isinstance(options, dict) and isinstance(options.get("clean"), Mapping):
        found += BuildOptions(clean=dict(options["clean"])).clean_problems()
    named = tuple(f"options.{section}" for section in ("clean", "dedup", "quality") if section in values)
    problems += [  # under the name they were given
        replace(each, field=each.field.removeprefix("options.")) if each.field.startswith(named) else each
        for each in found
    ]
    engine = build(EngineConfig, values.get("engine"), "engine", problems)
    return built or BuildOptions(), engine or EngineConfig()


def _sources_of(entries: Any, folder: Path, problems: list[Problem]) -> list[Source]:
    if not isinstance(entries, Mapping) or not entries:
        problems.append(
            Problem("sources", entries, "a mapping of names to paths, or to path, channel, kind, map and training_text")
        )
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
        path, mapping = _placed(built.path, folder), built.map or None
        found.append(Source(str(name), path, built.channel, mapping, kind, built.encoding, built.training_text))
    return found


def _placed(path: str, folder: Path) -> Path | str:
    return path if is_url(path) else folder / Path(path).expanduser()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}. Give a source as NAME=PATH, or a build as a YAML file.") from None
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
