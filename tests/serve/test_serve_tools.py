"""Calls and thoughts in chats: OpenAI's own client gets them, whole or as a stream, and sends results back."""

import json
from typing import Any

import pytest

from tests.bigram import saying
from tests.serve.conftest import serving
from tests.serve.test_serve_refusals import ask as ask_raw

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLS = """
<tool_call>{"name": "add", "arguments": {"x": 1, "y": "二"}}</tool_call>
<tool_call>{"name": "f", "arguments": {}}</tool_call>"""
ANSWER = f"<think>\nI add.\n</think>\n\nLet me see.{CALLS}"
ASKED: list[Any] = [{"role": "user", "content": "1 + 2?"}]


@pytest.fixture(scope="module")
def own(loaded):
    """A server of its own: what its model says is told to it."""
    with serving(loaded) as served, served.client() as client:
        yield served, client


def ask(own, answer, *, messages=ASKED, stream=False, **fields):
    """What the client gets where the model writes this answer: (content, thought, calls, finish)."""
    served, client = own
    saying(served.model.service, answer)
    extra = {"frame": "template", **fields.pop("extra_body", {})}
    got = client.chat.completions.create(model="tiny", messages=messages, stream=stream, extra_body=extra, **fields)
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    calls = [call for part in parts for call in part.tool_calls or []]
    assert not stream or [call.index for call in calls] == list(range(len(calls))), "each call comes whole, once"
    thought = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    content = "".join(part.content or "" for part in parts) if stream else parts[0].content
    found = [(call.id, call.function.name, call.function.arguments) for call in calls]
    return content, thought, found, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_thought_text_and_calls_come_apart(own, stream):
    content, thought, calls, finish = ask(own, ANSWER, tools=[TOOL], stream=stream)
    assert (content, thought, finish) == ("Let me see.", "I add.", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [("add", {"x": 1, "y": "二"}), ("f", {})]
    assert len({number for number, _, _ in calls}) == 2
    assert ask(own, CALLS.lstrip(), tools=[TOOL], stream=stream)[0] == ("" if stream else None)


@pytest.mark.parametrize("stream", [False, True])
def test_without_functions_calls_are_text_and_what_does_not_parse_always_is(own, stream):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        content, _, calls, finish = ask(own, ANSWER, stream=stream, **fields)
        assert (content, calls, finish) == (f"Let me see.{CALLS}", [], "stop")
    broken = 'a\n<tool_call>{"name": }</tool_call> b <tool_cal'
    assert ask(own, broken, tools=[TOOL], stream=stream) == (broken, "", [], "stop")
    assert ask(own, ANSWER, extra_body={"frame": "plain"}, stream=stream)[0] == ANSWER, "no template: all is text"


def test_an_answer_that_is_cut_off_says_so(own):
    found = ask(own, ANSWER, tools=[TOOL], max_tokens=12)
    assert (found[0], found[2:]) == ("", ([], "length"))
    assert "I add.".startswith(found[1]) or found[1].startswith("I add.")


def test_results_and_thoughts_go_back_into_the_prompt(own, loaded):
    """As our template writes them: checked by the ids that the engine gets."""
    served, _ = own
    _, _, calls, _ = ask(own, ANSWER, tools=[TOOL])
    call = {"id": calls[0][0], "type": "function", "function": {"name": "add", "arguments": calls[0][2]}}
    told: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "3<|message_end|>"},
    ]
    seen = []
    submit = served.model.service.submit
    served.model.service.submit = lambda request, deliver: (seen.append(request.prompt), submit(request, deliver))[1]
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"truncation": "auto"}):
        assert ask(own, "3", messages=told, tools=[TOOL], extra_body=extra)[::3] == ("3", "stop")
    begun = [*ASKED, {"role": "assistant", "content": "It", "reasoning_content": "I add."}]
    found = ask(own, " is 3", messages=begun, extra_body={"continue_final_message": True})
    del served.model.service.submit
    assert found[:2] == (" is 3", "")
    texts = [loaded.tokenizer.decode(ids, skip_control=False) for ids in seen]
    assert texts[0] == texts[2]
    assert texts[0].count("<|message_end|>") == 1 + 3 + 1, "the name in the result is text"
    wrote = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": "二"}}</tool_call>'
    assert f"<think>\nI add.\n</think>\n\n{wrote}" in texts[0]
    assert texts[1] == texts[0] + "<think>\n\n</think>\n\n"
    assert texts[3].endswith("assistant\n<think>\nI add.\n</think>\n\nIt")


def test_the_calculator_of_the_page_takes_its_arguments_and_says_what_is_wrong(served):
    def tool(name: str, arguments: Any) -> tuple[int, Any]:
        status, answer = ask_raw(served, "POST", f"/v1/tools/{name}", arguments)
        return status, answer.get("content", "") if status == 200 else answer["error"]["message"]

    assert tool("calculator", {"expression": "6*7"}) == (200, "42")
    assert tool("calculator", {"expression": "6*"})[1].startswith("error: ")
    assert tool("shell", {"expression": "6*7"})[1] == "error: there is no function shell"
    assert tool("calculator", [1]) == (400, "The arguments of a function have to be a JSON object.")


def test_choices_have_calls_of_their_own(own):
    served, client = own
    saying(served.model.service, "3", CALLS)
    extra = {"frame": "template"}
    got = client.chat.completions.create(model="tiny", messages=ASKED, n=2, tools=[TOOL], extra_body=extra)
    assert sorted(len(choice.message.tool_calls or ()) for choice in got.choices) == [0, 2]
