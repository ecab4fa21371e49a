"""Answers that follow a schema or a grammar; and what keeps servers busy."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from zero2all.infer import grammar
from zero2all.infer.engine import Engine
from zero2all.infer.job import Request

PERSON = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "北京"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "age"],
    "additionalProperties": False,
}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
USER: Any = [{"role": "user", "content": "Who?"}]


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(model="tiny", prompt="Hello", max_tokens=60, extra_body=fields)


def test_a_chat_answers_with_json_of_the_schema_and_ends_there_in_streams_too(client):
    fields: Any = {"model": "tiny", "messages": USER, "response_format": SCHEMA, "seed": 3, "max_tokens": 60, "n": 3}
    answer = client.chat.completions.create(**fields)
    for choice in answer.choices:
        found = json.loads(choice.message.content)
        assert (choice.finish_reason, set(found)) == ("stop", {"city", "age"})
        assert found["city"] in ("Paris", "北京")
        assert 0 <= found["age"] <= 99
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_a_grammar_and_json_objects(client):
    (choice,) = complete(client, grammar='root ::= [0-9]{3} "-" [a-c]+ "x"').choices
    assert re.match(r"[0-9]{3}-[a-c]*", choice.text)
    for number in range(3):
        (choice,) = complete(client, grammar='root ::= "yes" | "no" [0-9]', seed=number, logprobs=0).choices
        assert re.fullmatch("yes|no[0-9]", choice.text)
        assert choice.finish_reason == "stop"
    (choice,) = complete(client, response_format={"type": "json_object"}).choices
    assert choice.text.startswith("{")


def test_other_rows_of_the_batch_write_what_they_write_alone(client, served):
    alone = complete(client, temperature=1, seed=5).choices[0].text
    with ThreadPoolExecutor(3) as pool:
        bound = [pool.submit(complete, client, response_format={"type": "json_object"}, seed=each) for each in (1, 2)]
        assert pool.submit(complete, client, temperature=1, seed=5).result().choices[0].text == alone
    assert all(each.result().choices[0].text.startswith("{") for each in bound)
    assert not served.model.service.engine.grammars._child._read, "nothing is kept of what has ended"


@pytest.mark.parametrize(
    "bomb",
    [
        {"response_format": {"type": "json_object", "schema": {"type": "integer", "multipleOf": 99_999_999}}},
        {"grammar": 'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x"{1000}'},
        {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    ],
)
def test_a_bomb_is_refused_within_its_time_and_the_server_goes_on(client, bomb):
    begun = time.monotonic()
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, **bomb)
    assert refusal.value.type == "invalid_request_error"
    assert time.monotonic() - begun < 30, "seconds on a quiet machine"
    (choice,) = complete(client, grammar='root ::= "yes"').choices
    assert choice.text == "yes"


def test_an_answer_whose_process_dies_goes_on_in_a_new_one_and_a_late_one_fails_alone(loaded, monkeypatch):
    engine = Engine(loaded)
    job = engine.submit(Request([loaded.tokenizer.begin_id], 40, grammar=("regex", "[ab]{30}")))
    while len(job.new_ids) < 3:
        engine.step()
    engine.grammars._child.stop()
    while job.finish is None:
        engine.step()
    assert re.fullmatch("[ab]{30}", loaded.tokenizer.decode(job.new_ids))
    late = engine.submit(Request([loaded.tokenizer.begin_id], 40, grammar=("regex", "[ab]{30}")))
    other = engine.submit(Request([loaded.tokenizer.begin_id], 5))
    monkeypatch.setattr(grammar, "MASK_SECONDS", -1.0)
    while other.finish is None:
        engine.step()
    assert (late.finish, other.finish) == ("grammar", "length")
    assert "too large" in late.error
    engine.grammars.close()
