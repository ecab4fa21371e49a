"""Sources: what the user named, which channel it belongs to, and which raw field is the text.

Fields are recognised by name, file by file, from the first rows; a raw field may lie inside another, as `doc.text`. A
kind, such as `baike2018qa`, is a known public data set: it brings the fields and the channel with it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.records import QUESTION_AND_ANSWER, TITLE_AND_TEXT, template_fields, template_problem
from zero2all.corpus.channels import AUTO, CHANNELS, channel_name
from zero2all.corpus.listing import is_url, readable_name
from zero2all.corpus.readers.encodings import encoding_problem
from zero2all.corpus.record import Document

FIELD_NAMES = {
    "content": "content text body article document answer response output completion code markdown passage story "
    "messages conversations paragraphs",
    "title": "title name headline subject question instruction prompt path file_path filename file_name",
    "category": "category topic datatype label type section",
    "desc": "desc description summary abstract",
}
"""Where each part of a record is looked for, best first; upper and lower case are the same."""

ANSWER_NAMES = frozenset({"answer", "response", "output", "completion"})
"""Raw fields whose text answers a question: what `desc` holds is then part of the question."""

PEEKED_ROWS = 20
"""How many first rows of a file tell the mapping of all its rows."""

NAME_PATTERN = re.compile(r"\w[\w.-]*")
RESERVED_NAMES = frozenset({"quarantine", "sources.json", "report.json", "report.html", "clusters.jsonl"})
CHANNEL_PATTERN = re.compile(r"\w[\w-]*")


@dataclass(frozen=True)
class KnownDataSet:
    """A known data set."""

    channel: str | None
    """None: guessed from the text."""
    mapping: Mapping[str, str]
    asks_in_desc: bool = False
    """Whether `desc` belongs to the question that the text answers."""


_WIKIPEDIA = {"content": "text", "title": "title"}
_ARTICLE = {"content": "content", "title": "title", "desc": "desc"}

KINDS = {
    "baike2018qa": KnownDataSet(
        "zh", {"content": "answer", "title": "title", "category": "category", "desc": "desc"}, True
    ),
    "news2016zh": KnownDataSet("zh", _ARTICLE),
    "webtext2019zh": KnownDataSet("zh", {**_ARTICLE, "category": "topic"}, True),
    "wikipedia_cn": KnownDataSet("zh", _WIKIPEDIA),
    "wikipedia_en": KnownDataSet("en", _WIKIPEDIA),
    "Zhihu-KOL": KnownDataSet("zh", {"content": "RESPONSE", "title": "INSTRUCTION"}),
    "WuDaoCorpus2.0": KnownDataSet("zh", {"content": "content", "title": "title", "category": "dataType"}),
    "github-python": KnownDataSet("code", {"content": "content", "title": "path"}),
    "conversation": KnownDataSet(None, {"content": "messages"}),
    "sharegpt": KnownDataSet(None, {"content": "conversations"}),
}
"""Known data sets by name: what `NAME=PATH:CHANNEL:KIND` and `kind:` in YAML accept."""

MESSAGE_TEXTS = ("content", "value")
"""What a message of a chat calls its text."""

KIND_SPELLINGS = {"new2016zh": "news2016zh", "wudao": "WuDaoCorpus2.0", "wudaocorpus": "WuDaoCorpus2.0"}
"""Other spellings under which the sets are met."""


def find_kind(name: str) -> str | None:
    """The name of a known data set as `KINDS` spells it; None when there is none like it."""
    lowered = name.lower()
    by_lower = {known.lower(): known for known in KINDS}
    return by_lower.get(lowered) or KIND_SPELLINGS.get(lowered)


@dataclass(frozen=True)
class Source:
    """One named input of the corpus."""

    name: str
    """Folder name under `corpus/` and `data_src` of its records."""
    path: Path | str
    """A file, or a folder that is read with everything below it. A text with `://` in it is an address for fsspec."""
    channel: str | None = None
    """zh, en, code, …: the group its loss is reported under. auto: found for each document, and the source is split
    into `NAME-zh`, `NAME-en`, … None: guessed for the whole source from samples of the text, and said."""
    mapping: Mapping[str, str] | None = None
    """Record field -> raw field, such as {"content": "body"}. None or a missing entry: guessed by name."""
    kind: str | None = None
    """Name of a known data set in `KINDS`, which brings its mapping and channel. None: nothing is known of it."""
    encoding: str | None = None
    """Of its files that are not UTF-8 and have no byte order mark. None: found file by file."""
    training_text: str | None = None
    """Template of the text that a model sees, over title, desc and content. None: `choose_template`."""

    def __post_init__(self) -> None:
        """`ZH` is `zh`, however it was given."""
        if self.channel is not None:
            object.__setattr__(self, "channel", channel_name(self.channel))

    @property
    def is_remote(self) -> bool:
        """Whether the path is an address that fsspec opens."""
        return is_url(self.path)

    @property
    def location(self) -> str:
        """The path in full."""
        return str(self.path) if self.is_remote else readable_name(str(Path(self.path).resolve()))

    @property
    def given_mapping(self) -> dict[str, str]:
        """What is mapped before anything is guessed: the mapping of the kind, and the user's own on top."""
        return {**(KINDS[self.kind].mapping if self.kind else {}), **(self.mapping or {})}

    @property
    def given_channel(self) -> str | None:
        """The user's channel, or else that of the kind."""
        return self.channel or (KINDS[self.kind].channel if self.kind else None)

    @property
    def is_auto(self) -> bool:
        """Whether it is split by the channel of each document."""
        return self.given_channel == AUTO

    @property
    def possible_names(self) -> list[str]:
        """The names under which it may stand in the corpus."""
        return [part_name(self.name, channel) for channel in CHANNELS] if self.is_auto else [self.name]


def part_name(name: str, channel: str) -> str:
    """What the documents of one channel of an `auto` source are called."""
    return f"{name}-{channel}"


def parse_source(text: str, mapping: Mapping[str, str] | None = None) -> Source:
    """Read `NAME=PATH[:CHANNEL[:KIND]]`; the channel may be left empty when a kind follows.

    A path that exists as given is taken whole, colons and all.
    """
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise UsageError(
            f"'{text}' does not name a source. Write NAME=PATH, NAME=PATH:CHANNEL or NAME=PATH:CHANNEL:KIND, for "
            f"example news=data/news.jsonl:zh or qa=data/qa.json::baike2018qa; PATH is a file or a folder. Kinds: "
            f"{', '.join(KINDS)}."
        )
    if _exists(rest):
        return Source(name, _place(rest), None, mapping)
    head, colon, tail = rest.rpartition(":")
    if not colon or not head or not (CHANNEL_PATTERN.fullmatch(tail) or find_kind(tail)):
        return Source(name, _place(rest), None, mapping)
    front, second_colon, middle = head.rpartition(":")
    if second_colon and front and not _exists(head):
        kind = find_kind(tail)
        if (not middle or CHANNEL_PATTERN.fullmatch(middle)) and (kind or _exists(front)):
            return Source(name, _place(front), middle or None, mapping, kind or tail)
    return Source(name, _place(head), tail, mapping)


def _exists(text: str) -> bool:
    return not is_url(text) and Path(text).expanduser().exists()


def _place(text: str) -> Path | str:
    return text if is_url(text) else Path(text).expanduser()


def source_from_path(path: Path, channel: str | None = None) -> Source:
    """A source named after its file or folder: `data/My news.jsonl` -> `My_news`."""
    name = re.sub(r"[^\w.-]+", "_", path.expanduser().resolve().name.split(".")[0]).strip("_.-") or "data"
    return Source(f"{name}_data" if name in RESERVED_NAMES else name, path.expanduser(), channel)


def parse_mapping(text: str) -> dict[str, str]:
    """Read `content=text,title=name`: record field = raw field, which may have blanks and commas in it."""
    mapping = {}
    for part in re.split(r",(?=\s*\w+\s*=)", text):
        target, equals, raw = part.partition("=")
        if not equals or target.strip() not in FIELD_NAMES or not raw.strip():
            raise UsageError(
                f"'{part}' in the field mapping '{text}' is not understood. Write FIELD=RAW pairs with commas between "
                f"them, for example content=body,title=headline; FIELD is one of {', '.join(FIELD_NAMES)}."
            )
        mapping[target.strip()] = raw.strip()
    return mapping


def content_flag(raw: str) -> str:
    """The flag that names the text field, as it must be typed."""
    return f"--map {shlex.quote(f'content={raw}')}"


def source_problems(sources: Sequence[Source]) -> list[str]:
    """Everything wrong with how the sources are named, one sentence each."""
    problems = []
    names = [source.name for source in sources]
    if not sources:
        problems.append("no source was given; give at least one as NAME=PATH")
    problems += [f"the source name {name} is used twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    parts = [name for source in sources if source.is_auto for name in source.possible_names]
    problems += [
        f"the source name {name} is also the name of a part of a source whose channel is {AUTO}"
        for name in dict.fromkeys([*names, *parts])
        if name in parts and names.count(name) + parts.count(name) > 1
    ]
    for source in sources:
        if not NAME_PATTERN.fullmatch(source.name) or ".partial-" in source.name:
            problems.append(f"'{source.name}' cannot be a source name: use letters, digits, '_', '-' and '.'")
        if source.name in RESERVED_NAMES:
            problems.append(f"'{source.name}' is a name the corpus folder uses itself; choose another")
        if source.channel is not None and not CHANNEL_PATTERN.fullmatch(source.channel):
            problems.append(f"'{source.channel}' cannot be a channel name: use letters, digits, '_' and '-'")
        if source.kind is not None and source.kind not in KINDS:
            problems.append(f"'{source.kind}' is not a kind of source; known are {', '.join(KINDS)}")
        trouble = template_problem(source.training_text) if source.training_text is not None else None
        if trouble:
            problems.append(f"the training text {source.training_text!r} cannot be used: {trouble}")
        if source.encoding is not None and (trouble := encoding_problem(source.encoding)):
            problems.append(
                f"'{source.encoding}' cannot be an encoding: {trouble}; try gb18030, big5, shift_jis, euc_jp, cp949, "
                "cp1251 or cp1252"
            )
        unknown = sorted(set(source.mapping or {}) - set(FIELD_NAMES))
        if unknown:
            problems.append(
                f"source {source.name} maps {', '.join(unknown)}; only {', '.join(FIELD_NAMES)} can be mapped"
            )
    return problems


def guess_mapping(rows: Sequence[Mapping[str, Any]], given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Record field -> raw field for rows like these; None when no field holds the text.

    A text field that was given and is not in these rows is guessed: files of one source may differ.
    """
    with_text = dict.fromkeys(key for row in rows for key, value in row.items() if _holds_text(value))
    by_lower_name: dict[str, str] = {}
    for key in with_text:
        by_lower_name.setdefault(key.lower(), key)
    mapping = {target: raw for target, raw in (given or {}).items() if any(has_field(row, raw) for row in rows)}
    for target, names in FIELD_NAMES.items():
        if target in mapping or (target in (given or {}) and target != "content"):
            continue
        for name in names.split():
            raw = by_lower_name.get(name)
            if raw is not None and raw not in mapping.values():
                mapping[target] = raw
                break
    return mapping if "content" in mapping else None


def choose_template(source: Source, mappings: Sequence[Mapping[str, str]]) -> str:
    """The template of a source's training text: the one given, or by what its files have (`mappings`).

    UsageError when the one given names a field that no file has.
    """
    found = set().union(*mappings) if mappings else {"title", "content"}  # texts that are no rows may have a title
    if source.training_text is not None:
        missing = [field for field in template_fields(source.training_text) if field not in found]
        if missing:
            raise UsageError(
                f"Source {source.name}: the training text {source.training_text!r} names {{{missing[0]}}}, but no file "
                f"of the source has that field (it has {', '.join(sorted(found))}). Say which raw field it is with "
                f"--map {missing[0]}=RAW, or leave it out of --training-text."
            )
        return source.training_text
    is_answer = any(mapping["content"].split(".")[-1].lower() in ANSWER_NAMES for mapping in mappings)
    asks = is_answer or (source.kind is not None and KINDS[source.kind].asks_in_desc)
    return QUESTION_AND_ANSWER if asks and "desc" in found else TITLE_AND_TEXT


def longest_first(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields of these rows, with those inside others as `doc.text`; the one with the most text comes first."""
    chars: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            inner = value.items() if isinstance(value, Mapping) else ()
            for each, text in ((name, value), *((f"{name}.{key}", text) for key, text in inner)):
                chars[each] = chars.get(each, 0) + (len(text) if isinstance(text, str) else 0)
    return sorted(chars, key=lambda name: -chars[name])


def has_field(fields: Mapping[str, Any], raw: str) -> bool:
    """Whether a row has a field of this name, or one inside another: `doc.text` is `text` in `doc`."""
    return raw in fields or _holder(fields, raw) is not None


def _holder(fields: Mapping[str, Any], raw: str) -> list[str] | None:
    """The names that lead to a nested field, the last one its own; None when it is not there."""
    path = raw.split(".")
    value: Any = fields
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return path if len(path) > 1 else None


def _unnested(fields: dict[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """`fields` with the nested fields that are mapped moved to the top, under their dotted names."""
    for raw in mapping.values():
        path = None if raw in fields else _holder(fields, raw)
        if path is None:
            continue
        inner = fields
        for name in path[:-1]:
            inner[name] = dict(inner[name])
            inner = inner[name]
        fields[raw] = inner.pop(path[-1])
    return fields


def apply_mapping(fields: Mapping[str, Any], mapping: Mapping[str, str]) -> Document:
    """Put raw fields in their places. Raises KeyError without the text field, ValueError when it is not text.

    `others` holds what the file gave, which JSON may not know; see `record.encode_record`.
    """
    rest = dict(fields)
    if mapping["content"] not in rest or any("." in raw for raw in mapping.values()):
        rest = _unnested(rest, mapping)
    content = rest.pop(mapping["content"])
    if type(content) is not str:
        if _is_conversation(content):
            rest[mapping["content"]] = content  # packing lays the messages out; cleaning and dedup see their texts
        content = _as_text(content)
    title = _taken(rest, mapping["title"]) if "title" in mapping else ""
    category = _taken(rest, mapping["category"]) if "category" in mapping else ""
    if "desc" in mapping and _is_list_of_text(rest.get(mapping["desc"])):
        rest[mapping["desc"]] = _as_text(rest[mapping["desc"]])
    desc = _taken(rest, mapping["desc"]) if "desc" in mapping else ""
    return Document(content, title, category, desc, rest)


def _taken(rest: dict[str, Any], raw: str) -> str:
    """A short text taken out of the raw fields, where it is one."""
    value = rest.get(raw)
    if type(value) is str:  # almost always
        del rest[raw]
        return value
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return ""
    del rest[raw]
    return str(value)


def _holds_text(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or (bool(value) and _is_list_of_text(value)) or _is_conversation(value)


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_conversation(value: Any) -> bool:
    """Whether this is a list of messages, each an object with who speaks and what is said."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and any(f in one for f in MESSAGE_TEXTS) for one in value)
    )


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if _is_list_of_text(value):
        return "\n".join(value)
    if _is_conversation(value):
        return "\n".join(str(next(one[name] for name in MESSAGE_TEXTS if name in one) or "") for one in value)
    if isinstance(value, bytes):
        return value.decode("utf-8")  # UnicodeDecodeError is a ValueError
    raise ValueError(f"the text field holds {type(value).__name__}")
