"""A conversation as the prompt of a model, in one of three ways:

- template: the layout the model was trained with, by the tokenizer's message marks or the folder's chat template.
- frame: the last question, set out as the text of the run writes questions (`data.question_frames`), or, where that is
  not known, in a common form.
- plain: the texts of the messages, one after the other, simply continued.

`auto` takes the template where the model is known to have seen it, else the frame of the run's own text; a model of
which neither is known is a base model, whose messages are continued.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.common.files import MANIFEST_NAME, read_json_object, read_regular
from zero2all.tokenizer.chat import LEARNED_ROLE, ROLES, Message, chat_template, encode_chat, mark_id
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.save import CHAT_TEMPLATE_NAME, CONFIG_NAME

if TYPE_CHECKING:
    from zero2all.infer.load import LoadedModel

FRAMES = ("auto", "template", "frame", "plain")
HAN = re.compile(r"[\u3400-\u9fff\U00020000-\U0003ffff]")
USUAL_FRAMES = {"en": "Q: {question}\nA: {answer}", "zh": "问：{question}\n答：{answer}"}
WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class ChatPrompt:
    """What to give the model, and where its answer ends (beside the tokenizer's own ends)."""

    prompt: str | list[int]
    stop: tuple[str, ...]
    end_ids: tuple[int, ...]
    heal: bool
    how: str
    """template, frame or plain."""


@dataclass(frozen=True)
class ChatFormatChoice:
    """What `auto` takes for a model, and why."""

    how: str
    why: str


def chat_prompt(loaded: LoadedModel, messages: Sequence[Message], frame: str = "auto") -> ChatPrompt:
    """The prompt after which the assistant's next message is to be written."""
    _check(messages, frame)
    how = choose(loaded).how if frame == "auto" else frame
    if how == "template":
        return _by_template(loaded, messages)
    if how == "plain":
        return _as_text(messages)
    return _in_frame(_own_frames(loaded) or USUAL_FRAMES, messages)


def choose(loaded: LoadedModel) -> ChatFormatChoice:
    """What `auto` means for this model."""
    tokenizer = loaded.tokenizer
    if _template_of(loaded) is not None:
        return ChatFormatChoice("template", "the model came with a chat template")
    has_marks = chat_template(tokenizer) is not None
    learned = _learned_conversations(loaded) if has_marks else False
    if learned:
        return ChatFormatChoice("template", "the run was trained on conversations")
    if _own_frames(loaded):
        return ChatFormatChoice("frame", "the text that this model was trained on asks in this form")
    if learned is None:
        return ChatFormatChoice(
            "plain", "whether the model was trained on conversations is not known; if it was, switch to `template`"
        )
    return ChatFormatChoice(
        "plain", "this is a base model, which continues your text; /frame sets it out as questions and answers"
    )


def _check(messages: Sequence[Message], frame: str) -> None:
    if frame not in FRAMES:
        raise UsageError(f"The frame is {frame!r}; expected one of {', '.join(FRAMES)}.")
    if not messages:
        raise UsageError("The conversation has no messages. It needs at least one.")
    for message in messages:
        if message.role not in ROLES:
            raise UsageError(f"A message has the role {message.role!r}. The roles are {', '.join(ROLES)}.")


# ---- template -------------------------------------------------------------------------------------------------


def _by_template(loaded: LoadedModel, messages: Sequence[Message]) -> ChatPrompt:
    template = _template_of(loaded)
    if template is not None:
        return ChatPrompt(template.encode(messages), (), template.end_ids, heal=False, how="template")
    ids = encode_chat(loaded.tokenizer, messages, ask=True).ids
    return ChatPrompt(ids, (), (mark_id(loaded.tokenizer, "message_end"),), heal=False, how="template")


def _template_of(loaded: LoadedModel) -> ChatTemplate | None:
    """That of the model's folder, or of the tokenizer that was imported into its workspace."""
    if loaded.folder is None:  # made in memory
        return None
    folder = loaded.folder if loaded.config is None else loaded.folder.parent.parent / "tokenizer"
    return folder_template(folder, loaded.tokenizer)


def _learned_conversations(loaded: LoadedModel) -> bool | None:
    """Whether sources that the run has read contain conversations; None where that cannot be seen any more."""
    config = loaded.config
    if config is None or loaded.folder is None:
        return None
    packed = Path(config.data.packed) if config.data.packed else loaded.folder.parent.parent / "packed"
    mixtures = [config.data.mixture]
    mixtures += [stage.mixture or config.data.mixture for stage in config.stages if stage.from_step <= loaded.step]
    if any(mixture is None for mixture in mixtures):
        return _has_conversations(packed, None)
    read = frozenset(name for mixture in mixtures for name, weight in (mixture or {}).items() if weight)
    return _has_conversations(packed, read)


@lru_cache(maxsize=8)
def _has_conversations(packed: Path, read: frozenset[str] | None) -> bool | None:
    """Whether packed sources (those named in `read`, or of a channel that is; None: all) contain conversations."""
    found = None
    for path in packed.glob(f"*/train/{MANIFEST_NAME}"):
        try:
            manifest = read_json_object(path)
        except (UserError, OSError):
            continue
        if read is None or manifest.get("source") in read or manifest.get("channel") in read:
            found = bool(manifest.get("conversations")) or bool(found)
    return found


# ---- plain text -----------------------------------------------------------------------------------------------


def _own_frames(loaded: LoadedModel) -> dict[str, str]:
    """How the text of the run writes a question and its answer, by language; empty where that is not known."""
    return (loaded.config.data.question_frames if loaded.config else None) or {}


def _in_frame(frames: dict[str, str], messages: Sequence[Message]) -> ChatPrompt:
    """The last question alone, as text asks it: with earlier turns before it, the quickstart model answers worse.
    The end of the line ends the answer."""
    system = [message.text for message in messages if message.role == "system"]
    question = next((message.text for message in reversed(messages) if message.role == "user"), "")
    frame = frames.get("zh" if _is_chinese(question) else "en", next(iter(frames.values())))
    asked = frame.removesuffix("{answer}").replace("{question}", question)
    return ChatPrompt("\n".join([*system, asked]), ("\n",), (), heal=True, how="frame")


def _is_chinese(text: str) -> bool:
    """Whether there are more Chinese characters than words of other scripts."""
    characters = len(HAN.findall(text))
    return characters > len(WORD.findall(HAN.sub(" ", text)))


def _as_text(messages: Sequence[Message]) -> ChatPrompt:
    """The assistant's texts continue what stands before them; every other message begins on a line of its own."""
    text = ""
    for message in messages:
        if text and message.role != LEARNED_ROLE and not text.endswith("\n"):
            text += "\n"
        text += message.text
    return ChatPrompt(text, (), (), heal=True, how="plain")


# Chat templates of Hugging Face folders: small Jinja programs that lay a conversation out as text.
#
# In the text the names of control tokens become their ids; the rest is encoded as text. No message may set a control
# token: a name that a message spells is replaced before the template runs, by its number between two characters that
# occur nowhere else; the text is then cut at the control tokens that are left, and the names put back into the pieces.
# All other text reaches the template as it is, because templates look at it (Qwen's drop the thoughts of old answers).


LARGEST_TEMPLATE_BYTES = 1 << 20
PRIVATE_CHARACTERS = range(0xF0000, 0xFFFFE)
"""Unicode gives them no meaning; one that no message contains stands around the numbers of names."""


class ChatTemplate:
    """The template of one folder, with the tokenizer it is for."""

    def __init__(self, source: str, tokenizer: Tokenizer, place: str) -> None:
        self._tokenizer, self._place = tokenizer, place
        self._render = _compiled(source, place)
        names = sorted(tokenizer.control, key=len, reverse=True)  # of two that begin alike, the longer
        self._cuts = re.compile("|".join(map(re.escape, names)))
        self._control = list(tokenizer.control)
        by_id = {number: name for name, number in tokenizer.control.items()}
        ids = {"bos_token": tokenizer.begin_id, "eos_token": tokenizer.end_id, "pad_token": tokenizer.pad_id}
        self._names = {role: "" if number is None else by_id[number] for role, number in ids.items()}
        self.end_ids = self._find_end()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the assistant is to write."""
        mark = _unused_character([message.text for message in messages])
        text = self._text([(message.role, self._without_names(message.text, mark)) for message in messages], ask=True)
        if mark not in text and (ids := self._tokenizer.encode_marked(text)) is not None:
            # A normalizer may have made a name of what was none: of full-width letters, say.
            found = [number for number in ids if number in self._tokenizer.control_ids]
            if found == [self._tokenizer.control[name] for name in self._cuts.findall(text)]:
                return ids
        return self._in_pieces(text, mark)

    def _in_pieces(self, text: str, mark: str) -> list[int]:
        """The ids of a text, cut at the control tokens; where messages spell some, their names stay text."""
        ids: list[int] = []
        place = 0
        for found in self._cuts.finditer(text):
            ids += self._tokenizer.encode_text(self._with_names(text[place : found.start()], mark))
            ids.append(self._tokenizer.encode_control(found[0]))
            place = found.end()
        return ids + self._tokenizer.encode_text(self._with_names(text[place:], mark))

    def _text(self, messages: Sequence[tuple[str, str]], ask: bool) -> str:
        """What the template makes of messages (role, text)."""
        values = [{"role": role, "content": text} for role, text in messages]
        try:
            return self._render(messages=values, add_generation_prompt=ask, tools=None, documents=None, **self._names)
        except Exception as error:  # it is a program of others and may raise anything
            raise UsageError(
                f"The chat template in {self._place} cannot lay out this conversation: {str(error)[:300]} (roles: "
                f"{', '.join(role for role, _ in messages)}). Change the messages, or talk to the model with a plain "
                f"frame (--frame frame)."
            ) from error

    def _without_names(self, text: str, mark: str) -> str:
        """The text with numbers for the names of control tokens, and a border where it begins or ends like one."""
        text = self._cuts.sub(lambda found: f"{mark}{self._control.index(found[0])}{mark}", text)
        inner = text.strip()  # most templates trim
        if any(inner.endswith(name[:length]) for name in self._control for length in range(1, len(name))):
            text = text.replace(inner, f"{inner}{mark}{mark}")
        if any(inner.startswith(name[length:]) for name in self._control for length in range(1, len(name))):
            text = text.replace(inner, f"{mark}{mark}{inner}")
        return text

    def _with_names(self, text: str, mark: str) -> str:
        """The text as the messages had it."""
        text = re.sub(f"{mark}([0-9]+){mark}", lambda found: self._control[int(found[1])], text)
        return text.replace(mark, "")

    def _find_end(self) -> tuple[int, ...]:
        """The control token that the template puts after an answer; none where it does not show."""
        answer = _unused_character([])
        try:
            text = self._text([("user", "?"), (LEARNED_ROLE, answer)], ask=False)
        except UsageError:
            return ()
        found = self._cuts.match(text.partition(answer)[2].lstrip())
        return () if found is None else (self._tokenizer.encode_control(found[0]),)


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


def _unused_character(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    unused = next((chr(number) for number in PRIVATE_CHARACTERS if chr(number) not in used), None)
    if unused is None:
        raise UsageError("The messages contain every private character of Unicode. Remove some of them.")
    return unused


def _compiled(source: str, place: str) -> Callable[..., str]:
    """The template as a function, with what transformers gives templates, in a sandbox."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UsageError(
            "This model has a chat template, and reading it needs the package jinja2: `pip install jinja2`. Without "
            "it, talk to the model with a plain frame (--frame frame)."
        ) from error

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    # Marks what an assistant wrote, for training; jinja2 alone does not know this tag.
    source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", source)
    source = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)
    try:
        return environment.from_string(source).render
    except TemplateError as error:
        raise BadInputError(
            f"The chat template in {place} is damaged ({error}). Repair it, or talk to the model with a plain frame "
            f"(--frame frame)."
        ) from error


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own, without escapes for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
