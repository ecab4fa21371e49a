"""Rows of others as conversations.

    messages    {"messages": [{"role", "content"}, …]}, also under `conversations`; `tools`, `tool_calls`, thoughts
    sharegpt    {"conversations": [{"from", "value"}, …]}, with `system` and `tools` beside it
    alpaca      {"instruction", "input", "output"}, with `system` and `history`; also {"question", "answer"}
    prompt      {"prompt", "completion"}, each a text or messages
    log         a row per message, with a column that names the conversation; without one a file is a conversation

Pairs of a chosen and a rejected answer to the same prompt:

    prompt        {"prompt", "chosen", "rejected"}, each a text or messages; or `instruction`, `question`
    context       {"conversations" or "messages": […], "chosen", "rejected"}, each a message or a text
    conversation  {"chosen": [messages], "rejected": [messages]}: the prompt is what both begin with, in whole messages

Prompts whose answers are judged by a reward: a conversation without its last answer, or one of the keys of a question;
what stands beside it (`answer`, `ground_truth`, `tests`, …) is the record that the reward is given.

Which form a row has is seen from its keys. Roles are never put into another order: a row whose roles are out of order,
or which has nothing to learn, is refused with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from zero2all.common import jsonio
from zero2all.corpus.readers.chats import LISTS, ROLE_KEYS, TEXT_KEYS, is_message
from zero2all.packed.pieces import ROLE_NAMES, without_nulls
from zero2all.tokenizer.chat import LEARNED_ROLE, ROLES, Dialogue, Message

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
FOLLOWS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Which roles may follow a role; None: the beginning."""
ASK_KEYS = ("prompt", "instruction", "question", "query")
PAIR_KEYS = ("chosen", "rejected")
GOLD_KEYS = ("answer", "ground_truth", "gt", "solution", "target", "label", "completion", "output", "response")
"""Under which a row with a prompt has the right answer."""
INSTRUCTION_KEYS = (("instruction", "output"), ("question", "answer"), ("query", "response"), ("prompt", "response"))


class RowError(ValueError):
    """A row that is no conversation to learn from."""

    def __init__(self, reason: str, detail: str) -> None:
        """`reason`: a name that is counted."""
        super().__init__(detail)
        self.reason = reason


class Sample(NamedTuple):
    """What is learned from a row: a conversation, or two that differ in the last answers."""

    dialogues: tuple[Dialogue, ...]
    prompt: int = 0
    """How many messages of it are not learned, whoever wrote them."""
    record: Mapping[str, Any] | None = None
    """What stands beside a prompt."""


def form_of(fields: Mapping[str, Any]) -> str:
    """Which form a row has: messages, sharegpt, alpaca, prompt, log; empty where it has none."""
    for name in LISTS:
        messages = _parsed(fields.get(name))
        if isinstance(messages, list) and messages and isinstance(messages[0], Mapping):
            return "sharegpt" if "from" in messages[0] else "messages"
    if all(key in fields for key in PAIR_KEYS):
        return ""
    if is_message(fields):
        return "log"
    if "prompt" in fields and "completion" in fields:
        return "prompt"
    return "alpaca" if any(ask in fields and answer in fields for ask, answer in INSTRUCTION_KEYS) else ""


def dialogue_of(fields: Mapping[str, Any], form: str) -> Dialogue:
    """The conversation in a row of this form. RowError where there is none."""
    readers: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
        "messages": _from_list,
        "sharegpt": _from_list,
        "alpaca": _from_alpaca,
        "prompt": _from_prompt,
    }
    if form not in readers:
        kind = "preference_pair" if all(key in fields for key in PAIR_KEYS) else "no_conversation"
        raise RowError(kind, f"fields: {', '.join(map(str, fields))}")
    return _dialogue(readers[form](fields), fields, form != "messages")


def pair_form(fields: Mapping[str, Any]) -> str:
    """Which form a pair has: prompt, context, conversation; empty where the row is none."""
    if not all(key in fields for key in PAIR_KEYS):
        return ""
    chosen = _parsed(fields["chosen"])
    first = chosen[0] if isinstance(chosen, list) and chosen else None
    if isinstance(first, Mapping) and ROLE_NAMES.get(name := _role_name(first)[1], name) != LEARNED_ROLE:
        return "conversation"
    if any(isinstance(_parsed(fields.get(name)), list) for name in LISTS):
        return "context"
    return "prompt" if any(key in fields for key in ASK_KEYS) else ""


def pair_of(fields: Mapping[str, Any], form: str) -> Sample:
    """The chosen and the rejected conversation of a row. RowError where there is no pair to learn from."""
    if not form:
        raise RowError("no_pair", f"fields: {', '.join(map(str, fields))}")
    before = [] if form == "conversation" else _from_list(fields) if form == "context" else _asked(fields)
    whole = [[*before, *messages_of(fields[key], LEARNED_ROLE)] for key in PAIR_KEYS]
    shared = before or [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False))]
    if whole[0] == whole[1]:
        raise RowError("equal_answers", f"both: {whole[0][-1].text[:80]!r}" if whole[0] else "")
    for key, messages in zip(PAIR_KEYS, whole, strict=True):
        role = messages[len(shared)].role if len(messages) > len(shared) else "nobody"
        if role != LEARNED_ROLE:
            detail = f"after the prompt ({len(shared)} messages) `{key}` has one of {role}"
            raise RowError("no_assistant_turn", detail)
    pair = [_dialogue(messages, fields, messages[0].role != "system") for messages in whole]
    return Sample(tuple(pair), len(shared) + len(pair[0].messages) - len(whole[0]))


def prompt_form(fields: Mapping[str, Any]) -> str:
    """Which form a prompt has: messages, prompt; empty where the row is none."""
    if any(isinstance(_parsed(fields.get(name)), list) for name in LISTS):
        return "messages"
    return "prompt" if any(key in fields for key in ASK_KEYS) else ""


def prompt_of(fields: Mapping[str, Any], form: str, needs: Sequence[str] = ()) -> Sample:
    """The prompt in a row, with its record: the other fields, `prompt` (the last message) and, where it is known, the
    right `answer`. RowError where there is no prompt, or its record lacks one of `needs`."""
    if not form:
        raise RowError("no_prompt", f"fields: {', '.join(map(str, fields))}")
    messages = _from_list(fields) if form == "messages" else _asked(fields)
    record = {str(key): value for key, value in fields.items() if key not in (*LISTS, *ASK_KEYS, "tools")}
    gold = next((fields[key] for key in GOLD_KEYS if fields.get(key) is not None), None)
    while messages and messages[-1].role == LEARNED_ROLE:  # the answer that a set for SFT has
        gold = gold if gold is not None else messages[-1].text or None
        messages.pop()
    if not messages or messages[-1].role == "system":
        raise RowError("no_prompt", "there is no message to answer")
    dialogue = _beside(messages, fields, form != "messages")
    in_order(dialogue)
    record |= {"prompt": messages[-1].text} | ({} if gold is None else {"answer": gold})
    if missing := [name for name in needs if record.get(name) is None]:
        raise RowError(f"no_{missing[0]}", f"fields: {', '.join(map(str, fields))}")
    return Sample((dialogue,), len(messages), record)


def _dialogue(messages: list[Message], fields: Mapping[str, Any], with_system: bool) -> Dialogue:
    """A conversation to learn from, with what stands beside it."""
    return checked(_beside(messages, fields, with_system))


def _beside(messages: list[Message], fields: Mapping[str, Any], with_system: bool) -> Dialogue:
    """The conversation with what stands beside it."""
    if with_system and isinstance(system := fields.get("system"), str) and system.strip():
        messages = [Message("system", system), *messages]
    tools = _parsed(fields.get("tools")) or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("tools_not_understood", f"`tools` is {str(tools)[:80]!r}, expected a list of objects")
    options = fields.get("chat_template_kwargs")
    thinking = options.get("enable_thinking") if isinstance(options, Mapping) else None
    return Dialogue(messages, [without_nulls(tool) for tool in tools], thinking)


def log_dialogue(rows: Sequence[Mapping[str, Any]]) -> Dialogue:
    """The conversation of rows that are a message each."""
    return checked(Dialogue([message_of(row) for row in rows]))


def checked(dialogue: Dialogue) -> Dialogue:
    """The dialogue, unless its roles are out of order or there is nothing to learn from it."""
    in_order(dialogue)
    messages = dialogue.messages
    answers = [message for message in messages if message.role == LEARNED_ROLE]
    if not answers:
        raise RowError("no_assistant_turn", f"roles: {', '.join(message.role for message in messages)}")
    empty = next((n for n, each in enumerate(answers, 1) if not each.text.strip() and not each.calls), None)
    if empty is not None:
        raise RowError("empty_answer", f"answer {empty} of {len(answers)}")
    return dialogue


def in_order(dialogue: Dialogue) -> None:
    """RowError where the roles are out of order."""
    messages = dialogue.messages
    for number, (before, role) in enumerate(pairwise([None, *(message.role for message in messages)]), 1):
        if role not in FOLLOWS[before] or (
            role == "tool" and before == LEARNED_ROLE and not messages[number - 2].calls
        ):
            raise RowError("roles_out_of_order", f"message {number} is of {role}, after {before or 'nothing'}")


# ---- forms ----------------------------------------------------------------------------------------------------


def _from_list(fields: Mapping[str, Any]) -> list[Message]:
    found = (_parsed(fields.get(name)) for name in LISTS)
    return [message_of(each) for each in next(each for each in found if isinstance(each, list) and each)]


def _from_alpaca(fields: Mapping[str, Any]) -> list[Message]:
    ask, answer = next(keys for keys in INSTRUCTION_KEYS if all(key in fields for key in keys))
    asked = [_text(fields.get(ask), ask), _text(fields.get("input") or "", "input")]
    turns = [*_history(fields.get("history")), ("\n".join(filter(None, asked)), _text(fields.get(answer), answer))]
    return [Message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def _history(value: Any) -> Iterator[tuple[str, str]]:
    for pair in _parsed(value) or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("history_not_understood", f"`history` has {str(pair)[:80]!r}, expected [question, answer]")
        yield _text(pair[0], "history"), _text(pair[1], "history")


def _from_prompt(fields: Mapping[str, Any]) -> list[Message]:
    return [*messages_of(fields["prompt"]), *messages_of(fields["completion"], LEARNED_ROLE)]


def _asked(fields: Mapping[str, Any]) -> list[Message]:
    asked = next(fields[key] for key in ASK_KEYS if key in fields)
    if not isinstance(given := fields.get("input"), str) or not given.strip():
        return messages_of(asked)
    return [Message("user", f"{_text(asked, 'prompt')}\n{given}")]


def messages_of(value: Any, role: str = "user") -> list[Message]:
    """The messages of a list, or the one of a mapping or a text, which is of this role."""
    value = _parsed(value)
    if isinstance(value, Mapping):
        return [message_of(value)]
    return list(map(message_of, value)) if isinstance(value, list) else [Message(role, _text(value, role))]


def message_of(values: Any) -> Message:
    """A message as others write one. RowError where it is none."""
    if not isinstance(values, Mapping):
        raise RowError("message_not_understood", f"a message is {type(values).__name__}, expected role and content")
    said, name = _role_name(values)
    role = ROLE_NAMES.get(name, name)
    if role not in ROLES:
        raise RowError("unknown_role", f"{said!r}, expected one of {', '.join(ROLES)}")
    key = next((key for key in TEXT_KEYS if key in values), None)
    calls = _calls(values.get("tool_calls"))
    if name == "function_call":
        calls, text = _calls([_parsed(values.get(key or ""))]), ""
    else:
        value = values.get(key) if key else None
        text = "" if value is None and calls else _text(value, key or "content")
    thought = next((values[key] for key in THOUGHT_KEYS if values.get(key)), "")
    return Message(role, text, _text(thought, "reasoning_content"), calls)


def _role_name(values: Mapping[str, Any]) -> tuple[Any, str]:
    said = next((values[key] for key in ROLE_KEYS if values.get(key) is not None), None)
    return said, str(said).strip().lower()


def _calls(value: Any) -> tuple[Mapping[str, Any], ...]:
    calls = _parsed(value) or []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or inner.get("arguments") is None:
            raise RowError("call_not_understood", f"{str(call)[:80]!r}, expected a name and arguments")
    return tuple(without_nulls(call) for call in calls)


def _text(value: Any, key: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    raise RowError("not_text", f"`{key}` is {type(value).__name__}, expected text")


def _parsed(value: Any) -> Any:
    """What JSON in a text says: columns of CSV files and of older sets hold lists as text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return jsonio.loads(value.encode())
        except ValueError:
            return value
    return value


def texts_of(dialogue: Dialogue) -> Iterable[str]:
    """What its messages say."""
    return (message.text for message in dialogue.messages)
