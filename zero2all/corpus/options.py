"""How a corpus is built: sizes, shares, output format, cleaning and dedup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from zero2all.common.schema import Problem
from zero2all.corpus.clean.config import RULES, CleanConfig, build_config, merged
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.readers import Limits, TextBy
from zero2all.corpus.shards import SHARD_FORMATS, ShardFormat


@dataclass(frozen=True)
class BuildOptions:
    """How a corpus is built."""

    format: ShardFormat = "jsonl"
    """How shards are written: jsonl, jsonl.zst, parquet or txt."""
    shard_bytes: int = 200_000_000
    """A shard ends before its records, as lines of JSON, would weigh more than this."""
    valid_share: float = 0.01
    """Share of the kept records held out as valid, chosen by digest. A source of at least 20 records holds out at
    least one, a smaller one none. 0: nothing is held out."""
    max_damaged_share: float = 0.01
    """The build stops when a larger share of a source's records, or of its bytes, is damaged."""
    accept_drops: bool = False
    """Go on when a rule drops more than a fifth of a source whose channel was guessed; otherwise the build stops."""
    max_record_bytes: int = 32_000_000
    """A JSON line, JSON object or whole-file document above this size goes to quarantine unread."""
    split_text_above_bytes: int = 1_000_000
    """A plain text file above this size is cut into documents; below, it is one document."""
    text_piece_bytes: int = 8_000
    """Documents cut from a long text have 1 to 4 times so many bytes."""
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
        return found + self.dedup.problems() + [str(problem) for problem in self.clean_problems()]

    @property
    def limits(self) -> Limits:
        """What the readers must respect."""
        return Limits(
            max_record_bytes=self.max_record_bytes,
            split_text_above_bytes=self.split_text_above_bytes,
            text_piece_bytes=self.text_piece_bytes,
            unit_bytes=self.unit_bytes,
            text_by=TextBy(self.text_by),
        )

    def signing(self, channel: str) -> dict[str, Any]:
        """The part of the dedup settings that decides what ingest writes."""
        dedup = self.dedup
        shingle = asdict(dedup.shingle(channel)) if dedup.near != "off" else None
        return {"shingle": shingle, "line_min_chars": dedup.line_min_chars if dedup.lines else None}

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
                expected = f"a mapping of rules; `{channel}` is taken for a channel, as no rule has that name"
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
