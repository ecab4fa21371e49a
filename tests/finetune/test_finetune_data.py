"""Files of conversations become packed rows; every row is kept or left out by a reason, and named."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zero2all.common.errors import BadInputError
from zero2all.finetune.data import DataOptions, pack_conversations
from zero2all.packed.shard_format import open_split
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.template import chat_of


def row(number):
    return {"messages": [{"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": f"a {number}"}]}


def lines(path, rows):
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in rows))
    return path


def left_out(folder):
    return [json.loads(line) for line in (folder / "left_out.jsonl").read_text().splitlines()]


def documents(folder, split="train", source="chat"):
    opened = open_split(folder, source, split)
    tokens, mask = opened.read(0, opened.tokens), opened.read_mask(0, opened.tokens)
    starts = np.concatenate([each.astype(int) for each in (opened.docs[n] for n in range(len(opened.docs)))])
    return list(zip(np.split(tokens, starts[1:]), np.split(mask, starts[1:]), strict=True))


@pytest.fixture
def packed(trained_workspace, tmp_path):
    """A function that packs files; returns the report and the folder."""

    def pack(*paths, seq_len=64, valid_share=0.0):
        folder = tmp_path / "out"
        return pack_conversations(paths, trained_workspace.tokenizer, folder, DataOptions(seq_len, valid_share)), folder

    return pack


def test_every_format_gives_the_same_conversations(packed, tmp_path, trained_workspace):
    source = tmp_path / "raw"
    source.mkdir()
    lines(source / "a.jsonl", [row(1)])
    (source / "b.json").write_text(json.dumps([row(2), row(3)], indent=1))
    pq.write_table(pa.Table.from_pylist([row(4), {**row(5), "extra": "x"}]), source / "c.parquet")
    (source / "d.csv").write_text("instruction,output\nq 6,a 6\n")
    said = "1,user,q 7\n2,user,q 8\n1,assistant,a 7\n2,assistant,a 8\n"
    (source / "log.csv").write_text(f"conversation,role,message\n{said}")
    talk = '[{""role"": ""user"", ""content"": ""q 11""}, {""from"": ""gpt"", ""value"": ""a 11""}]'
    (source / "e.csv").write_text(f'id,message\n1,"{talk}"\n')
    (source / "one.json").write_text(json.dumps(row(9)["messages"], indent=1))
    lines(source / "two.jsonl", row(10)["messages"])
    report, folder = packed(source)
    assert (report["read"], report["kept"], report["left_out"]) == (11, 11, {})
    assert report["forms"] == {"messages": 6, "alpaca": 1, "log": 8}
    tokenizer = load_tokenizer(trained_workspace.tokenizer)
    template = chat_of(trained_workspace.tokenizer, tokenizer)
    found = {tuple(ids.tolist()): mask.tolist() for ids, mask in documents(folder, "train")}
    for number in range(1, 12):
        parts = template.parts(Dialogue([Message("user", f"q {number}"), Message("assistant", f"a {number}")]))
        counts = [int(part.counts) for part in parts for _ in template.ids_of([part])]
        assert found[tuple(template.ids_of(parts))] == counts
    assert report["learned_tokens"]["train"] == sum(map(sum, found.values()))


def test_bad_rows_are_counted_named_and_the_rest_goes_on(packed, tmp_path):
    asked, said = row(1)["messages"]
    talks = [[asked], [asked, said | {"content": ""}], [said, asked], [asked | {"content": "word " * 200}, said]]
    bad = [*({"messages": talk} for talk in talks), '{"messages": [{"role"\n', row(1)]
    report, folder = packed(lines(tmp_path / "chats.jsonl", [row(1), *bad, row(2)]))
    reasons = ("no_assistant_turn", "empty_answer", "roles_out_of_order", "duplicate", "too_long")
    assert {name: report["left_out"][name] for name in reasons} == dict.fromkeys(reasons, 1)
    assert report["read"] == 8 == report["kept"] + sum(report["left_out"].values())
    assert report["kept"] == 2
    named = left_out(folder)
    assert len(named) == 6
    assert all(each["file"] == "chats.jsonl" and each["place"].startswith("byte") for each in named)
    assert report["examples"]["roles_out_of_order"].startswith("chats.jsonl, byte")


def test_a_template_that_drops_messages_is_named_with_the_record(trained_workspace, tmp_path):
    tokenizer = shutil.copytree(trained_workspace.tokenizer, tmp_path / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    path = lines(tmp_path / "chats.jsonl", [row(1)])
    with pytest.raises(BadInputError, match=r"nothing to learn from .* template 1"):
        pack_conversations([path], tokenizer, tmp_path / "out", DataOptions(64))
    [named] = left_out(tmp_path / "out")
    assert (named["file"], named["place"], named["reason"]) == ("chats.jsonl", "byte 0", "template")
    assert "leaves out what message 1 says" in named["detail"]


def test_what_is_held_out_stays_so_when_data_is_added(packed, tmp_path):
    path = lines(tmp_path / "chats.jsonl", map(row, range(200)))
    _, folder = packed(path, valid_share=0.2)
    before = {bytes(ids) for ids, _ in documents(folder, "valid")}
    lines(path, map(row, range(400)))
    report, folder = packed(path, valid_share=0.2)
    train, after = ({bytes(ids) for ids, _ in documents(folder, split)} for split in ("train", "valid"))
    assert 20 < len(before) < 60
    assert before < after
    assert not train & after
    assert len(train) + len(after) == report["kept"] == 400


def test_work_that_is_done_is_not_done_again(packed, tmp_path):
    path = lines(tmp_path / "chats.jsonl", map(row, range(5)))
    report, folder = packed(path)
    stamp = (folder / "chat/train/manifest.json").stat().st_mtime_ns
    assert packed(path)[0] == report
    assert (folder / "chat/train/manifest.json").stat().st_mtime_ns == stamp
    (folder / "chat/train/tokens-00000.bin").unlink()
    assert packed(path)[0] == report
    assert len(documents(folder, "train")) == 5
