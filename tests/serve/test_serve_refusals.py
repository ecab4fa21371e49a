"""Bad requests: the right status, OpenAI's error body, words that help; and the server goes on."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.common.errors import UserError
from zero2all.infer.load import LoadedModel
from zero2all.infer.text import TextRequest
from zero2all.serve import wire

from .conftest import MAX_LEN, Served

JSON = {"Content-Type": "application/json"}


def ask(served: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer; a body that is neither bytes nor pieces of them is sent as JSON."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)) as connection:
        raw = body if body is None or isinstance(body, bytes | Iterator) else json.dumps(body).encode()
        connection.request(method, path, raw, {**JSON, **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


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


def test_completions_refuse_what_they_do_not_understand(served):
    for fields, param, words in (
        ({"prompt": None}, "prompt", "got nothing"),
        ({"prompt": 7}, "prompt", "expected text"),
        ({"prompt": []}, "prompt", "no list is empty"),
        ({"prompt": [True]}, "prompt", "whole numbers"),
        ({"prompt": [10**6]}, None, "token id 1000000"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": "a" * 100_000, "echo": True, "logprobs": 20}, "echo", "fewer prompts"),
        ({"max_tokens": 0}, "max_tokens", "needs echo: true and logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens", "needs echo: true and logprobs"),
        ({"max_tokens": -1}, "max_tokens", "at least 0"),
        ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
        ({"temperature": True}, "temperature", "a number from 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"seed": 1 << 70}, "seed", "a whole number from -9223372036854775807 to 9223372036854775807"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "more than 128"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": ["x"] * 9}, "stop", "at most 8"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"temprature": 0.5}, "temprature", "Did you mean `temperature`?"),
        ({"temperature": 2.1, "top_k": -2}, "temperature", "top_k"),
        ({"frequency_penalty": False}, "frequency_penalty", "from -2 to 2"),
        ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {str(each): 1 for each in range(301)}}, "logit_bias", "at most 300"),
        ({"logit_bias": {"400": 1}}, None, "ids 0 to 319"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format", "json_object"),
        ({"grammar": "x", "response_format": {"type": "json_object"}}, "grammar", "give one of them"),
        ({"grammar": "root ::= ("}, None, "cannot be followed"),
        ({"grammar": "#" * 20_000}, None, "at most 16,384"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n, which is 3"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"best_of": 100, "prompt": ["a", "b"]}, "n", "more than 128"),
    ):
        error = refused(served, COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})
        assert words in error["message"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_embeddings_refuse_what_they_do_not_understand_and_name_the_text(served):
    for fields, param, words in (
        ({"input": None}, "input", "got nothing"),
        ({"input": {"text": "a"}}, "input", "expected text"),
        ({"input": ["a", None]}, "input", "expected text"),
        ({"input": ["a", 5]}, "input", "expected text"),
        ({"input": []}, "input", "no list is empty"),
        ({"input": [[5], []]}, "input", "no list is empty"),
        ({"input": [5.0]}, "input", "whole numbers"),
        ({"input": [[5], [10**6]]}, None, "input[1]: The prompt has the token id 1000000"),
        ({"input": ["a", "x" * MAX_LEN]}, None, f"input[1]: The prompt has {MAX_LEN + 1:,} tokens"),
        ({"input": ["a"] * 2049}, "input", "at most 2,048"),
        ({"input": ["a" * 700_000] * 2}, "input", "fewer texts"),
        ({"encoding_format": "hex"}, "encoding_format", "float, base64"),
        ({"encoding_format": ["float"]}, "encoding_format", "float, base64"),
        ({"dimensions": 16}, "dimensions", "have 32"),
        ({"stream": True}, "stream", "a field of this route"),
    ):
        error = refused(served, "/v1/embeddings", {"input": "a", **fields})
        assert words in error["message"]
        assert error["param"] == param
    assert refused(served, "/detokenize", {"tokens": [[5], [6]]})["param"] == "tokens"


def test_chats_refuse_what_they_do_not_understand(served):
    for fields, param, words in (
        ({"messages": "Hello"}, "messages", "a list of messages"),
        ({"continue_final_message": True}, "continue_final_message", "the role assistant"),
        ({"messages": []}, "messages", "a list of messages"),
        ({"messages": [{"role": "pirate", "content": "Arr"}]}, "messages", "messages[0] has another"),
        ({"messages": [USER, {"role": "user"}]}, "messages", "messages[1] has something else"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages", "`tool_calls`"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "calls with a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("{x}")]}]}, "messages", "the text of a JSON object"),
        ({"messages": [{"role": "assistant", "reasoning_content": 3}]}, "messages", "something else"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "no pictures"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "give one of them"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"frame": "golden"}, "frame", "template"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools", "tools[1] is none"),
        ({"tools": {}}, "tools", "tools[0] is none"),
        ({"tools": [TOOL], "frame": "plain"}, None, "need the model's template"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "auto, none"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs", "true or false"),
        ({"chat_template_kwargs": {"custom": 1}}, "chat_template_kwargs", "enable_thinking"),
    ):
        error = refused(served, CHAT, {"messages": [USER], **fields})
        assert words in error["message"]
        assert error["param"] == param


def test_fields_that_ask_for_nothing_are_accepted(served):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "n": 1, "stop": None}
    neutral |= {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False}
    dumped = {"role": "assistant", "content": "Hi", "tool_calls": None, "annotations": [], "refusal": None}
    body = {"messages": [USER, dumped, USER], "max_tokens": 1, **neutral}
    assert ask(served, "POST", CHAT, body)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_told_its_length_and_the_limit(served, stream):
    error = refused(served, COMPLETIONS, {"prompt": "x" * MAX_LEN, "stream": stream})
    assert re.search(rf"{MAX_LEN + 1:,} tokens.*{MAX_LEN:,}.*Shorten", error["message"])
    assert error["code"] == "context_length_exceeded"


def test_bodies_that_are_not_json_are_refused(served):
    for body, words in (
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b"[" * 100_000, "not JSON"),
        (b'{"temperature": NaN}', "not JSON"),
        (b'"text"', "a JSON object"),
    ):
        assert words in refused(served, COMPLETIONS, body)["message"]


def test_a_body_of_100_mb_is_refused_and_not_kept(served):
    process, chunk = psutil.Process(), b"x" * 1_000_000
    before = process.memory_info().rss
    size = {"Content-Length": "100000000"}
    status, answer = ask(served, "POST", COMPLETIONS, (chunk for _ in range(100)), **size)
    assert status == 413
    assert "100,000,000 bytes" in answer["error"]["message"]
    assert process.memory_info().rss - before < 50_000_000


def test_unknown_models_are_404(served, client):
    error = refused(served, COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`tiny`" in error["message"]
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")


CROSS = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}


def test_other_routes_methods_bodies_hosts_and_sites_are_refused(served):
    for method, path, headers, status, words in (
        ("GET", "/v1/images", {}, 404, ""),
        ("GET", COMPLETIONS, {}, 405, "POST"),
        ("POST", COMPLETIONS, {"Content-Type": "text/plain"}, 415, "application/json"),
        ("GET", "/v1/models", {"Host": "evil.example"}, 421, ""),
        ("POST", COMPLETIONS, CROSS, 403, ""),
    ):
        found, answer = ask(served, method, path, {"prompt": "a"} if method == "POST" else None, **headers)
        assert found == status
        assert words in answer["error"]["message"]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
NAME = st.text(max_size=8)
VALUES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAME, each, max_size=3))
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "assistant", "x"]), "content": VALUES})
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 400), min_size=1, max_size=4),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    **{"n": st.integers(1, 3), "stream": st.booleans(), "temperature": st.floats(0, 2)},
}


def bodies(names: Any) -> st.SearchStrategy[dict[str, Any]]:
    known = {name: USUAL.get(name, VALUES) | VALUES for name in (*names, *wire.NEUTRAL, *wire.IGNORED)}
    return st.lists(st.sampled_from(sorted(known)), max_size=5, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: known[name] for name in chosen}, optional={"strange": VALUES})
    )


CALLS = {wire.completion_call: wire.COMPLETION_FIELDS, wire.chat_call: wire.CHAT_FIELDS}
CALLS[lambda body, loaded, _: wire.embedding_call(body, loaded.model.config.hidden_size)] = wire.EMBEDDING_FIELDS


@pytest.mark.parametrize(("read", "names"), CALLS.items())
def test_any_body_is_read_or_refused(loaded: LoadedModel, read, names):
    @settings(max_examples=40, deadline=None)
    @given(body=VALUES | bodies(names))
    def try_one(body):
        with contextlib.suppress(wire.RefusedError, UserError):
            call = read(body, loaded, 100)
            assert call.requests
            assert all(isinstance(request, TextRequest) for request in call.requests)

    try_one()
