"""Bad requests: the right status, OpenAI's error body, words that help; and the server goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

import openai
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.common.errors import UserError
from zero2all.infer.load import LoadedModel
from zero2all.infer.text import TextRequest
from zero2all.serve.wire import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    IGNORED,
    NEUTRAL,
    RefusedError,
    chat_call,
    completion_call,
)

from .conftest import MAX_LEN, Served

JSON = {"Content-Type": "application/json"}


def ask(
    served: Served, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, raw, {**JSON, **(headers or {})})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    found, answer = ask(served, "POST", path, body)
    assert found == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return dict(answer["error"])


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add"}}


def called(arguments):
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "got nothing"),
        ({"prompt": 7}, "prompt", "expected text"),
        ({"prompt": []}, "prompt", "no list is empty"),
        ({"prompt": [[1], []]}, "prompt", "no list is empty"),
        ({"prompt": ["a", 1]}, "prompt", "expected text"),
        ({"prompt": [True]}, "prompt", "whole numbers"),
        ({"prompt": [10**6]}, None, "token id 1000000"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo", "Ask for one"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": "many"}, "max_tokens", "got 'many', expected a whole number"),
        ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
        ({"temperature": True}, "temperature", "a number from 0 to 2"),
        ({"temperature": 2.1}, "temperature", "a number from 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"seed": 1 << 70}, "seed", "a whole number from -9223372036854775807 to 9223372036854775807"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "more than 128"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": ["x"] * 9}, "stop", "at most 8"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"temprature": 0.5}, "temprature", "Did you mean `temperature`?"),
        ({"messages": []}, "messages", "a field of this route"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "cannot do that"),
        ({"frequency_penalty": False}, "frequency_penalty", "cannot do that"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "Leave the field out"),
    ],
)
def test_completions_refuse_what_they_do_not_understand(served, fields, param, words):
    error = refused(served, COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})
    assert words in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": "Hello"}, "messages", "a list of messages"),
        ({"continue_final_message": True}, "continue_final_message", "the role assistant"),
        ({"messages": []}, "messages", "a list of messages"),
        ({"messages": [{"role": "pirate", "content": "Arr"}]}, "messages", "messages[0] has another"),
        ({"messages": [USER, {"role": "user"}]}, "messages", "messages[1] has something else"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages", "`tool_calls`"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "calls with a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("{x}")]}]}, "messages", "the text of a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("[1]")]}]}, "messages", "the text of a JSON object"),
        ({"messages": [{"role": "assistant", "reasoning_content": 3}]}, "messages", "something else"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "no pictures"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "give one of them"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"frame": "golden"}, "frame", "template"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools", "tools[1] is none"),
        ({"tools": {}}, "tools", "tools[0] is none"),
        ({"tools": [TOOL], "frame": "plain"}, None, "need the model's template"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "auto, none"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "cannot do that"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs", "true or false"),
        ({"chat_template_kwargs": {"custom": 1}}, "chat_template_kwargs", "enable_thinking"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot do that"),
    ],
)
def test_chats_refuse_what_they_do_not_understand(served, fields, param, words):
    error = refused(served, CHAT, {"messages": [USER], **fields})
    assert words in error["message"]
    assert error["param"] == param


def test_all_problems_are_told_at_once(served):
    message = refused(served, COMPLETIONS, {"prompt": "a", "temperature": -1, "top_p": 3, "strem": True})["message"]
    assert all(name in message for name in ("temperature", "top_p", "strem"))


def test_fields_that_ask_for_nothing_are_accepted(served):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "n": 1, "stop": None}
    neutral |= {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False}
    dumped = {"role": "assistant", "content": "Hi", "tool_calls": None, "annotations": [], "refusal": None}
    body = {"messages": [USER, dumped, USER], "max_tokens": 1, **neutral}
    assert ask(served, "POST", CHAT, body)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_told_its_length_and_the_limit(served, stream):
    error = refused(served, COMPLETIONS, {"prompt": "x" * MAX_LEN, "stream": stream})
    assert f"{MAX_LEN + 1:,} tokens" in error["message"]
    assert f"{MAX_LEN:,}" in error["message"]
    assert "Shorten" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a"', "not JSON"),
        (b"", "not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b"[" * 100_000, "not JSON"),
        (b'{"temperature": NaN}', "not JSON"),
        (b'"text"', "a JSON object"),
    ],
)
def test_bodies_that_are_not_json_are_refused(served, body, words):
    assert words in refused(served, COMPLETIONS, body)["message"]


def test_a_body_of_100_mb_is_refused_and_not_kept(served):
    process = psutil.Process()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
    before = process.memory_info().rss
    chunk = b"x" * 1_000_000
    connection.request("POST", COMPLETIONS, (chunk for _ in range(100)), {**JSON, "Content-Length": "100000000"})
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert answer.status == 413
    assert "100,000,000 bytes" in error["message"]
    assert process.memory_info().rss - before < 50_000_000


def test_another_kind_of_body_is_415(served):
    status, answer = ask(served, "POST", COMPLETIONS, b"prompt=a", {"Content-Type": "text/plain"})
    assert status == 415
    assert "application/json" in answer["error"]["message"]


def test_unknown_models_and_routes_are_404_and_wrong_methods_405(served, client):
    error = refused(served, COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`tiny`" in error["message"]
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")
    assert ask(served, "GET", "/v1/embeddings")[0] == 404
    status, answer = ask(served, "GET", COMPLETIONS)
    assert status == 405
    assert "POST" in answer["error"]["message"]


def test_other_hosts_and_other_sites_are_refused(served):
    assert ask(served, "GET", "/v1/models", headers={"Host": "evil.example"})[0] == 421
    cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    assert ask(served, "POST", COMPLETIONS, {"prompt": "a"}, cross)[0] == 403


def test_after_all_of_that_it_still_answers(served, client):
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].finish_reason == "length"
    assert ask(served, "GET", "/health")[1] == {"status": "ready", "running": 0, "waiting": 0}


# ---- whatever stands in a body: it is read, or refused in words ----


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "assistant", "x"]), "content": VALUES})
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 400), min_size=1, max_size=4),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
}


def bodies(names: Any) -> st.SearchStrategy[dict[str, Any]]:
    known = {name: USUAL.get(name, VALUES) | VALUES for name in (*names, *NEUTRAL, *IGNORED)}
    return st.lists(st.sampled_from(sorted(known)), max_size=5, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: known[name] for name in chosen}, optional={"strange": VALUES})
    )


@pytest.mark.parametrize(("read", "names"), [(completion_call, COMPLETION_FIELDS), (chat_call, CHAT_FIELDS)])
def test_any_body_is_read_or_refused(loaded: LoadedModel, read, names):
    @settings(max_examples=60, deadline=None)
    @given(body=VALUES | bodies(names))
    def try_one(body):
        with contextlib.suppress(RefusedError, UserError):
            call = read(body, loaded, 100)
            assert call.requests
            assert all(isinstance(request, TextRequest) for request in call.requests)

    try_one()
