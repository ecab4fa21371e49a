"""Chat templates: small Jinja programs that lay a conversation out as text, and the ids of that text.

The text is that of Hugging Face, byte by byte, with one difference: names of control tokens that a message spells stay
text. Each is replaced, before the template runs, by its number between two characters that occur nowhere else; the text
is then cut at the control tokens that are left, and the names are put back into the pieces. All other text reaches the
template as it is, because templates look at it (Qwen's drop the thoughts of old answers).

Counted in the loss is what the assistant writes: what stands in `{% generation %}`, or, in a template without that tag,
the text of its messages and the control token after it. The borders are two characters that are cut out like names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json_object, read_regular
from zero2all.tokenizer.chat import LEARNED_ROLE, Dialogue, Message, own_template, require_marks
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.save import CHAT_TEMPLATE_NAME, CONFIG_NAME

if TYPE_CHECKING:
    from jinja2 import Environment

LARGEST_TEMPLATE_BYTES = 1 << 20
PRIVATE_CHARACTERS = range(0xF0000, 0xFFFF0)
"""Unicode gives them no meaning; one that no message contains stands around the numbers of names."""
OPEN, CLOSE = "\U000ffffc", "\U000ffffd"
"""Borders of what counts in the loss. Where a message spells one, it is treated like the name of a control token."""
TEMPLATE_DAY = datetime(2024, 7, 26)
"""What templates that write the date take for today where data is laid out: the same row gives the same text."""


class TemplateError(UsageError):
    """A conversation that a template cannot lay out."""


class ChatPart(NamedTuple):
    """A stretch of a conversation that is encoded by itself."""

    text: str
    """The name of a control token, or text."""
    is_control: bool
    counts: bool
    """Whether it counts in the loss."""


class ChatTemplate:
    """A template, with the tokenizer it is for."""

    def __init__(self, source: str, tokenizer: Tokenizer, place: str) -> None:
        self.source, self.tokenizer, self._place = source, tokenizer, place
        self._has_tag = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._render = _compiled(source, place)
        names = [*tokenizer.control, OPEN, CLOSE]
        self._cuts = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))  # the longer first
        self._names = names
        self._longest = max(map(len, names))
        cuts = [(name[:at], name[at:]) for name in names for at in range(1, len(name))]
        self._begins = re.compile(f"(?:{'|'.join(sorted({re.escape(first) for first, _ in cuts}))})\\Z")
        self._ends = re.compile("|".join(sorted({re.escape(last) for _, last in cuts})))
        by_id = {number: name for name, number in tokenizer.control.items()}
        ids = {"bos_token": tokenizer.begin_id, "eos_token": tokenizer.end_id, "pad_token": tokenizer.pad_id}
        self._roles = {role: "" if number is None else by_id[number] for role, number in ids.items()}
        self._dropped: dict[tuple[Any, ...], list[int]] = {}
        self.end_ids = self._find_end()

    # ---- prompts --------------------------------------------------------------------------------------------------

    def encode(self, dialogue: Dialogue) -> list[int]:
        """The ids of a conversation, up to where the assistant is to write."""
        mark, values = self._without_names(_values(dialogue))
        return self._ids(self._text(values, ask=True), mark)

    def encode_after(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """The ids that follow an answer which the model has written: its end, `messages`, and up to where the assistant
        is to write again. The ids of the answer stay as they are; encoded from its text they might be others."""
        answer = _unused_character(list(_strings([message.values() for message in messages])))
        asked = Dialogue([Message("user", "?"), Message(LEARNED_ROLE, answer), *messages], thinking=thinking)
        if self._dropped_messages(asked):
            raise TemplateError("The template leaves out what a tool has answered.")
        mark, values = self._without_names(_values(asked))
        return self._ids(self._text(values, ask=True).partition(answer)[2], mark)

    def _ids(self, text: str, mark: str) -> list[int]:
        plain = text.replace(OPEN, "").replace(CLOSE, "")
        if mark not in text and (ids := self.tokenizer.encode_marked(plain)) is not None:
            # A normalizer may have made a name of what was none: of full-width letters, say.
            found = [number for number in ids if number in self.tokenizer.control_ids]
            if found == [self.tokenizer.control[name] for name in self._cuts.findall(plain)]:
                return ids
        return self.ids_of(list(self._parts(plain, mark)))

    def ids_of(self, parts: Sequence[ChatPart]) -> list[int]:
        """The ids of parts."""
        control, encode = self.tokenizer.control, self.tokenizer.encode_text
        return [i for part in parts for i in ([control[part.text]] if part.is_control else encode(part.text))]

    # ---- data -----------------------------------------------------------------------------------------------------

    def parts(self, dialogue: Dialogue) -> list[ChatPart]:
        """A conversation that is to be learned, with what counts in the loss. TemplateError where the template cannot
        lay it out, leaves out a message, or does not show what the assistant wrote."""
        if dropped := self._dropped_messages(dialogue):
            numbers = ", ".join(str(number + 1) for number in dropped)
            raise TemplateError(f"The template leaves out what message {numbers} says.")
        mark, values = self._without_names(_values(dialogue))
        text = self._text(values, today=TEMPLATE_DAY)
        if not self._has_tag:
            text = self._with_borders(dialogue, values, text)
        parts = list(self._parts(text, mark))
        return parts if self._has_tag else _with_ends(parts)

    def prompt_parts(self, dialogue: Dialogue) -> list[ChatPart]:
        """A conversation up to where the assistant is to write; nothing of it counts. TemplateError as in `parts`."""
        if dropped := self._dropped_messages(dialogue):
            raise TemplateError(f"The template leaves out what message {dropped[0] + 1} says.")
        mark, values = self._without_names(_values(dialogue))
        text = self._text(values, ask=True, today=TEMPLATE_DAY)
        return [part._replace(counts=False) for part in self._parts(text, mark)]

    def text(self, dialogue: Dialogue) -> str:
        """A conversation as text. Equal to Hugging Face's."""
        return "".join(part.text for part in self.parts(dialogue))

    def _with_borders(self, dialogue: Dialogue, values: dict[str, Any], text: str) -> str:
        """The text of a template without the tag, with borders around the texts of the assistant."""
        answers = [message for message in dialogue.messages if message.role == LEARNED_ROLE]
        if any(message.thought or message.calls for message in answers):
            raise TemplateError(
                "The template does not mark what the assistant writes ({% generation %}), and the conversation has "
                "thoughts or calls."
            )
        said = sum(bool(message.text.strip()) for message in answers)
        for strips in (False, True):  # most templates trim
            messages = [
                {**message, "content": _bordered(message["content"], strips)}
                if message["role"] == LEARNED_ROLE
                else message
                for message in values["messages"]
            ]
            bordered = self._text({**values, "messages": messages}, today=TEMPLATE_DAY)
            borders = re.sub(f"[^{OPEN}{CLOSE}]", "", bordered)
            if bordered.replace(OPEN, "").replace(CLOSE, "") == text and borders == (OPEN + CLOSE) * said:
                return bordered
        raise TemplateError("The template changes what the assistant wrote, so that it cannot be found in the text.")

    def _dropped_messages(self, dialogue: Dialogue) -> list[int]:
        """Which messages have a text that the template leaves out. That depends on the roles, not on what is said."""
        messages = dialogue.messages
        shape = (
            *((m.role, bool(m.text), bool(m.thought), bool(m.calls)) for m in messages),
            bool(dialogue.tools),
            dialogue.thinking,
        )
        if shape not in self._dropped:
            kinds = len(PRIVATE_CHARACTERS)
            signs = [chr(PRIVATE_CHARACTERS[n % kinds]) if message.text else "" for n, message in enumerate(messages)]
            values = _values(dialogue)
            values["messages"] = [
                {**each, "content": sign} for each, sign in zip(values["messages"], signs, strict=True)
            ]
            text = self._text(values, today=TEMPLATE_DAY)
            self._dropped[shape] = [number for number, sign in enumerate(signs) if sign not in text]
        return self._dropped[shape]

    # ---- text -----------------------------------------------------------------------------------------------------

    def _text(self, values: Mapping[str, Any], ask: bool = False, today: datetime | None = None) -> str:
        """What the template makes of a conversation."""
        given = {"documents": None, "strftime_now": (today or datetime.now()).strftime, **self._roles, **values}
        try:
            return self._render(add_generation_prompt=ask, **given)
        except Exception as error:  # it is a program of others and may raise anything
            roles = ", ".join(str(message["role"]) for message in values["messages"])
            raise TemplateError(
                f"The chat template in {self._place} cannot lay out this conversation: {str(error)[:300]} (roles: "
                f"{roles}). Change the messages, or talk to the model with a plain frame (--frame frame)."
            ) from error

    def _parts(self, text: str, mark: str) -> Iterator[ChatPart]:
        """A text, cut at the control tokens and at the borders; where messages spell some, their names stay text."""
        place, counts = 0, False
        for found in self._cuts.finditer(text):
            if found.start() > place:
                yield ChatPart(self._with_names(text[place : found.start()], mark), False, counts)
            if found[0] in (OPEN, CLOSE):
                counts = found[0] == OPEN
            else:
                yield ChatPart(found[0], True, counts)
            place = found.end()
        if place < len(text):
            yield ChatPart(self._with_names(text[place:], mark), False, counts)

    def _without_names(self, values: Any) -> tuple[str, Any]:
        """A character that stands for nothing else, and the values with numbers for the names of control tokens, and a
        border where a text begins or ends like one."""
        mark = _unused_character(list(_strings(values)))

        def replaced(value: Any) -> Any:
            if isinstance(value, str):
                return self._without_names_in(value, mark)
            if isinstance(value, Mapping):  # templates know keys and roles by name
                return {
                    self._numbered(key, mark): each if key == "role" else replaced(each) for key, each in value.items()
                }
            return [replaced(each) for each in value] if isinstance(value, list | tuple) else value

        return mark, replaced(values)

    def _numbered(self, text: str, mark: str) -> str:
        return self._cuts.sub(lambda found: f"{mark}{self._names.index(found[0])}{mark}", text)

    def _without_names_in(self, text: str, mark: str) -> str:
        text = self._numbered(text, mark)
        inner = text.strip()  # most templates trim
        if self._begins.search(inner[-self._longest :]):
            text = text.replace(inner, f"{inner}{mark}{mark}")
        if self._ends.match(inner):
            text = text.replace(inner, f"{mark}{mark}{inner}")
        return text

    def _with_names(self, text: str, mark: str) -> str:
        """The text as the messages had it."""
        text = re.sub(f"{mark}([0-9]+){mark}", lambda found: self._names[int(found[1])], text)
        return text.replace(mark, "")

    def _find_end(self) -> tuple[int, ...]:
        """The control token that the template puts after an answer; none where it does not show."""
        answer = _unused_character([])
        try:
            text = self._text(_values(Dialogue([Message("user", "?"), Message(LEARNED_ROLE, answer)])))
        except UsageError:
            return ()
        found = self._cuts.match(text.partition(answer)[2].lstrip().lstrip(CLOSE).lstrip())
        return () if found is None else (self.tokenizer.encode_control(found[0]),)


@lru_cache(maxsize=8)
def own_chat(tokenizer: Tokenizer) -> ChatTemplate:
    """Our own template for a tokenizer. UsageError where it has no marks."""
    source = own_template(tokenizer)
    if source is None:
        require_marks(tokenizer)
    assert source is not None, "it has the marks"
    return ChatTemplate(source, tokenizer, "zero2all")


@lru_cache(maxsize=8)
def folder_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in a folder with a tokenizer; None where there is none."""
    path = folder / CHAT_TEMPLATE_NAME
    try:
        source = read_regular(path, LARGEST_TEMPLATE_BYTES).decode("utf-8")
        return ChatTemplate(source, tokenizer, str(path))
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"The chat template {path} cannot be read ({error}). Fetch the folder again.") from error
    path = folder / CONFIG_NAME
    declared = read_json_object(path, "Fetch it again.").get("chat_template") if path.is_file() else None
    if isinstance(declared, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in declared if isinstance(each, dict)}
        declared = named.get("default")
    if declared is None:
        return None
    if not isinstance(declared, str):
        raise BadInputError(f"chat_template in {path} is a {type(declared).__name__}; expected the text of a template.")
    return ChatTemplate(declared, tokenizer, str(path))


def chat_of(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in a folder with a tokenizer, else our own."""
    return folder_template(folder, tokenizer) or own_chat(tokenizer)


def _values(dialogue: Dialogue) -> dict[str, Any]:
    values: dict[str, Any] = {"messages": [message.values() for message in dialogue.messages]}
    values["tools"] = list(dialogue.tools) or None
    return values if dialogue.thinking is None else {**values, "enable_thinking": dialogue.thinking}


def _bordered(text: str, strips: bool) -> str:
    if not text.strip():
        return text
    inner = text.strip() if strips else text
    return text.replace(inner, f"{OPEN}{inner}{CLOSE}", 1)


def _with_ends(parts: Sequence[ChatPart]) -> list[ChatPart]:
    """The control token that ends an answer counts, too."""
    before = [None, *parts]
    return [
        part._replace(
            counts=part.counts or (part.is_control and last is not None and last.counts and not last.is_control)
        )
        for last, part in zip(before, parts, strict=False)
    ]


def _strings(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from (text for pair in values.items() for each in pair for text in _strings(each))
    elif isinstance(values, list | tuple):
        yield from (text for each in values for text in _strings(each))


def _unused_character(texts: Sequence[str]) -> str:
    unused = next((sign for sign in map(chr, PRIVATE_CHARACTERS) if not any(sign in text for text in texts)), None)
    if unused is None:
        raise UsageError("The messages contain every private character of Unicode. Remove some of them.")
    return unused


def _compiled(source: str, place: str) -> Callable[..., str]:
    """The template as a function, with what transformers gives templates, in a sandbox."""
    try:
        from jinja2 import TemplateError as JinjaError
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UsageError(
            "This model has a chat template, and reading it needs the package jinja2: `pip install jinja2`. Without "
            "it, talk to the model with a plain frame (--frame frame)."
        ) from error

    class Generation(Extension):
        """`{% generation %}`: borders around what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

        def _between(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise JinjaError(message)

    environment: Environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(source).render
    except JinjaError as error:
        raise BadInputError(
            f"The chat template in {place} is damaged ({error}). Repair it, or talk to the model with a plain frame "
            f"(--frame frame)."
        ) from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own, without escapes for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
