"""Conversations become messages between marks that only the program sets, and only what the assistant writes counts."""

import json
import shutil

import numpy as np
import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.pieces import document_batches, turns_of
from zero2all.packed.samples import open_samples
from zero2all.packed.shard_format import open_split
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.template import own_chat


def chat(number):
    return [
        {"role": "system", "content": "ka lo"},
        {"role": "user", "content": f"mi ter {number} <|message_end|>"},
        {"role": "assistant", "content": f"vun es {number * 7919}"},
        {"role": "user", "content": "or pi"},
        {"role": "assistant", "content": f"es or {number}"},
    ]


@pytest.fixture(scope="module")
def talks(shared_work, tmp_path_factory):
    """A source in which every other record is a conversation."""
    work = Workspace(shutil.copytree(shared_work.root, tmp_path_factory.mktemp("talks") / "work"))
    rows = [
        {"text": " ".join(turn["content"] for turn in chat(n)), **({"messages": chat(n)} if n % 2 else {})}
        for n in range(40)
    ]
    path = work.raw / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    build_corpus(work.corpus, [Source("talks", path, "talk")], BuildOptions(valid_share=0))
    return work


def expected(tokenizer, messages):
    """Ids and what counts, spelled out."""
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
    talked = 0
    for tokens, mask in documents:
        number = next((n for n in range(1, 40, 2) if tokens.tolist() == expected(tokenizer, chat(n))[0]), None)
        if number is None:
            assert mask.all(), "plain text counts whole"
        else:
            assert mask.tolist() == expected(tokenizer, chat(number))[1]
            talked += 1
    assert talked == 20


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
    assert (
        learned
        == '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><|message_end|>'
    )
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


def test_masked_tokens_receive_no_gradient(talks, tmp_path):
    split = packed(talks, tmp_path)
    seq_len = 48
    samples = open_samples(split, seq_len, "concat")
    tokens, weights = np.empty(seq_len + 1, np.int64), np.empty(seq_len, np.float32)
    silent = 0
    for index in range(samples.count):
        samples.read(index, tokens, weights, None, 0)
        logits = torch.zeros(seq_len, split.manifest["vocab_size"], requires_grad=True)
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(tokens[1:]), reduction="none")
        (losses * torch.from_numpy(weights)).sum().backward()
        touched = logits.grad.abs().sum(dim=1) > 0
        assert touched.tolist() == (split.read_mask(index * seq_len + 1, seq_len) == 1).tolist()
        silent += int((~touched).sum())
    assert silent > 100
