"""Rows of others become conversations, whatever their form; what is none is refused with its reason."""

import json

import pytest

from zero2all.corpus.readers.chats import log_key
from zero2all.finetune.dialogues import RowError, dialogue_of, form_of, log_dialogue
from zero2all.tokenizer.chat import Message

ASKED = [Message("user", "q"), Message("assistant", "a")]
CALL = {"name": "add", "arguments": {"x": 1}}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FORMS = {
    "messages": {"messages": TURNS},
    "other names": {"conversations": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]},
    "messages as text": {"messages": json.dumps(TURNS)},
    "parts": {"messages": [TURNS[0] | {"content": [{"type": "text", "text": "q"}]}, {"role": "ai", "content": "a"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "question": {"question": "q", "answer": "a", "id": 3},
    "completion": {"prompt": "q", "completion": "a"},
    "completion of messages": {"prompt": TURNS[:1], "completion": TURNS[1:]},
}


def read(row):
    return dialogue_of(row, form_of(row))


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_usual_form_is_understood(row):
    assert list(read(row).messages) == ASKED


def test_alpaca_joins_its_input_and_learns_its_history():
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["hi", "hello"]]}
    said = [Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "hello")]
    assert list(read(row).messages) == [*said, Message("user", "Add\n1 2"), Message("assistant", "3")]


def test_tools_calls_thoughts_and_the_switch_are_kept():
    call = {"type": "function", "function": CALL, "id": None}
    messages = [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "a", "tool_calls": None},
    ]
    tools = json.dumps([{"name": "add", "description": None}])
    found = read({"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}})
    assert found.messages[1] == Message("assistant", "", "hm", ({"type": "function", "function": CALL},))
    assert (found.tools, found.thinking) == ([{"name": "add"}], False)
    sharegpt = [("human", "q"), ("function_call", json.dumps(CALL)), ("observation", "3"), ("gpt", "a")]
    found = read({"conversations": [{"from": who, "value": text} for who, text in sharegpt]})
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].calls == (CALL,)


def messages(*roles, **texts):
    return {"messages": [{"role": role, "content": texts.get(role, role)} for role in roles]}


def test_what_is_no_conversation_has_a_reason():
    for row, reason in (
        (messages("user"), "no_assistant_turn"),
        (messages("user", "assistant", assistant=" \n"), "empty_answer"),
        (messages("assistant", "user"), "roles_out_of_order"),
        (messages("user", "assistant", "tool"), "roles_out_of_order"),
        (messages("user", "assistant", "system"), "roles_out_of_order"),
        (messages("user", "robot"), "unknown_role"),
        (messages("user", "assistant", assistant=[{"type": "image_url"}]), "not_text"),
        ({"messages": [TURNS[0], "a"]}, "message_not_understood"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": ["x"]}]}, "call_not_understood"),
        (FORMS["messages"] | {"tools": "add"}, "tools_not_understood"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history_not_understood"),
        ({"instruction": "q", "output": 3}, "not_text"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference_pair"),
        ({"text": "plain"}, "no_conversation"),
    ):
        with pytest.raises(RowError) as refused:
            read(row)
        assert refused.value.reason == reason


def test_rows_of_a_log_are_one_conversation():
    said = (("Customer", "q"), ("Agent", "a"))
    rows = [{"conversation": 7, "sender": who, "message": text} for who, text in said]
    assert [form_of(row) for row in rows] == ["log", "log"]
    assert log_key(rows[0]) == "7"
    assert list(log_dialogue(rows).messages) == ASKED
