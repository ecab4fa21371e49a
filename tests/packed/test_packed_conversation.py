"""Conversations become messages between marks that only the program sets, and only what the assistant writes counts."""

import json
import shutil

import numpy as np
import pytest

from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.pieces import document_batches, turns_of
from zero2all.packed.shard_format import open_split
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.template import own_chat


def chat(number):
    roles = ("system", "user", "assistant", "user", "assistant")
    texts = ("ka lo", f"mi ter {number} <|message_end|>", f"vun es {number * 7919}", "or pi", f"es or {number}")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


@pytest.fixture(scope="module")
def talks(shared_work, tmp_path_factory):
    """A source in which every other record is a conversation."""
    work = Workspace(shutil.copytree(shared_work.root, tmp_path_factory.mktemp("talks") / "work"))
    plain = ({"text": " ".join(turn["content"] for turn in chat(n))} for n in range(40))
    rows = [{**row, "messages": chat(n)} if n % 2 else row for n, row in enumerate(plain)]
    path = work.raw / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    build_corpus(work.corpus, [Source("talks", path, "talk")], BuildOptions(valid_share=0))
    return work


def expected(tokenizer, messages):
    start, end = (tokenizer.encode_control(name) for name in ("<|message_start|>", "<|message_end|>"))
    ids, counts = [tokenizer.begin_id], [0]
    for message in messages:
        head = [start, *tokenizer.encode_text(message["role"] + "\n")]
        body = [*tokenizer.encode_text(message["content"]), end]
        ids += [*head, *body]
        counts += [0] * len(head) + [int(message["role"] == "assistant")] * len(body)
    return [*ids, tokenizer.end_id], [*counts, 0]


def packed(work, folder, **options):
    pack_corpus(work.corpus, work.tokenizer, folder, PackOptions(**options))
    return open_split(folder, "talks", "train")


@pytest.mark.parametrize("shard_tokens", [1 << 28, 101])
def test_what_is_packed_is_the_messages_between_their_marks(talks, tmp_path, shard_tokens):
    tokenizer = load_tokenizer(talks.tokenizer)
    split = packed(talks, tmp_path, shard_tokens=shard_tokens)
    assert split.manifest["conversations"] == 20
    tokens, mask = split.read(0, split.tokens), split.read_mask(0, split.tokens)
    starts = np.concatenate([split.docs[shard] + split.shard_starts[shard] for shard in range(len(split.shards))])
    documents = list(zip(np.split(tokens, starts[1:].astype(int)), np.split(mask, starts[1:].astype(int)), strict=True))
    assert len(documents) == 40
    counts_of = {tuple(ids): counts for ids, counts in (expected(tokenizer, chat(n)) for n in range(1, 40, 2))}
    for tokens, mask in documents:
        assert mask.tolist() == counts_of.get(tuple(tokens.tolist()), [1] * len(mask))  # plain text counts whole
    assert counts_of.keys() <= {tuple(tokens.tolist()) for tokens, _ in documents}


def test_prompts_count_too_when_they_are_to_be_learnt(talks, tmp_path):
    split = packed(talks, tmp_path, learn_prompts=True)
    assert not split.manifest["loss_mask"]
    assert split.masks is None
    assert split.manifest["conversations"] == 20


def test_the_form_of_sharegpt_is_understood_and_a_field_that_happens_to_be_called_messages_is_no_conversation():
    record = {"others": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}}
    assert [(turn.role, turn.text) for turn in turns_of(record, "here")] == [("user", "a"), ("assistant", "b")]
    for others in ({}, *({"messages": each} for each in (7, [], ["a"], [{"n": 1}]))):
        assert turns_of({"others": others}, "here") is None


def test_calls_thoughts_and_functions_are_laid_out(talks):
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": None}}, "id": None}
    answer = {"role": "AI", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    messages = [{"role": "customer", "content": "a"}, answer, {"role": "observation", "content": "3"}]
    record = {"others": {"messages": messages, "tools": [{"name": "add"}]}}
    tokenizer = load_tokenizer(talks.tokenizer)
    part = talks.root / "one.jsonl"
    part.write_text(json.dumps(record) + "\n")
    ((document,),) = document_batches(part, 0, part.stat().st_size, "one", "", lambda: own_chat(tokenizer))
    learned = "".join(each.text for each in document.parts if each.counts)
    called = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    assert learned == f"<think>\nhm\n</think>\n\n{called}<|message_end|>"
    assert '{"name": "add"}' in document.texts[0]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "`tool_calls` is str, expected a list"),
        ({"role": "narrator", "content": "a"}, "the role is 'narrator', expected one of"),
        ({"role": "user", "content": 5}, "`content` is int, expected text"),
        ("text", "the role is None"),
    ],
)
def test_a_damaged_message_is_named(message, error):
    record = {"others": {"messages": [{"role": "user", "content": "a"}, message]}}
    with pytest.raises(BadInputError, match=rf"gid 7, others\.messages\[1\]: {error}"):
        turns_of(record, "gid 7")
