"""A conversation as the prompt of a model, in one of three ways:

- template: the layout the model was trained with, by the tokenizer's message marks or the folder's chat template.
- frame: the last question, set out as the text of the run writes questions (`data.question_frames`), or, where that is
  not known, in a common form.
- plain: the texts of the messages, one after the other, simply continued.

`auto` takes the template where the model is known to have seen it, else the frame of the run's own text; a model of
which neither is known is a base model, whose messages are continued.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.errors import UsageError, UserError
from zero2all.common.files import MANIFEST_NAME, read_json_object
from zero2all.infer.tools import CALL, THINK, Written, read_answer
from zero2all.tokenizer.chat import LEARNED_ROLE, ROLES, Dialogue, Message, own_template
from zero2all.tokenizer.template import ChatTemplate, folder_template, own_chat
from zero2all.train.saved_config import FINETUNE_FILE

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
    begun: str | None = None
    """How the answer begins in the prompt; None: it is text, without thoughts and calls."""
    with_calls: bool = False
    """Calls are looked for."""

    def read(self, answer: str, is_whole: bool = True) -> Written:
        """The parts of what was written after the prompt."""
        return Written(answer) if self.begun is None else read_answer(answer, is_whole, self.begun, self.with_calls)


@dataclass(frozen=True)
class ChatFormatChoice:
    """What `auto` takes for a model, and why."""

    how: str
    why: str


def chat_prompt(
    loaded: LoadedModel, messages: Sequence[Message], frame: str = "auto",
    tools: Sequence[Mapping[str, Any]] = (), thinking: bool | None = None,
) -> ChatPrompt:  # fmt: skip
    """The prompt after which the assistant's next message is to be written."""
    _check(messages, frame)
    how = choose(loaded).how if frame == "auto" else frame
    if how == "template":
        return _by_template(loaded, Dialogue(messages, tools, thinking))
    if tools or thinking or any(message.calls for message in messages):
        raise UsageError(f"Calls of functions and thoughts need the model's template; the frame is {how}.")
    if how == "plain":
        return _as_text(messages)
    return _in_frame(_own_frames(loaded) or USUAL_FRAMES, messages)


def choose(loaded: LoadedModel) -> ChatFormatChoice:
    """What `auto` means for this model."""
    tokenizer = loaded.tokenizer
    brought, own = _template_of(loaded), own_template(tokenizer)
    if brought is not None and brought.source != own:  # every vocabulary of ours has our own
        return ChatFormatChoice("template", "the model came with a chat template")
    has_marks = own is not None
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


def _by_template(loaded: LoadedModel, dialogue: Dialogue) -> ChatPrompt:
    template = _template_of(loaded) or own_chat(loaded.tokenizer)
    if dialogue.tools and not ("tools" in template.source and CALL in template.source):
        raise UsageError(f"The model's template has no functions that are called as {CALL}.")
    if dialogue.thinking and "enable_thinking" not in template.source:
        raise UsageError("The model's template has no switch for thinking.")
    ids = template.encode(dialogue)
    begun = f"{THINK}\n" if loaded.tokenizer.decode(ids[-8:]).rstrip().endswith(THINK) else ""
    is_marked = THINK in template.source or CALL in template.source
    begun_as = begun if is_marked else None
    return ChatPrompt(ids, (), template.end_ids, False, "template", begun_as, with_calls=bool(dialogue.tools))


def prompt_after(
    loaded: LoadedModel, prompt: ChatPrompt, ids: Sequence[int], results: Sequence[Message], thinking: bool | None
) -> ChatPrompt:
    """The prompt after an answer, of these ids, and what the functions that it called have answered."""
    template = _template_of(loaded) or own_chat(loaded.tokenizer)
    return replace(prompt, prompt=[*prompt.prompt, *ids, *template.encode_after(results, thinking)])


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
    if (loaded.folder / FINETUNE_FILE).is_file():
        return True
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
