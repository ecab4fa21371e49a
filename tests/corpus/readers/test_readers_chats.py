"""Messages in rows of their own become conversations, in whatever file, and wherever reading was interrupted."""

import json
from unittest.mock import patch

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from tests.corpus.readers.reader_samples import damaged_of, read_all, rows_of, units_of
from zero2all.common.records import iter_records
from zero2all.corpus import Source, build_corpus
from zero2all.corpus.readers import ReaderLimits, read_unit

CHATS = ReaderLimits(chats=True)


def talk(number):
    return [{"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": f"a {number}, ä"}]


def csv(names, rows):
    quoted = [[f'"{str(value).replace(chr(34), chr(34) * 2)}"' for value in row] for row in [names, *rows]]
    return "".join(f"{','.join(row)}\n" for row in quoted)


SAID = [(n, talk(n)[place]) for place in range(2) for n in range(3)]
MIXED = csv(("conversation", "sender", "message"), [(n, each["role"], each["content"]) for n, each in SAID])
FILES = {
    "mixed.csv": (MIXED, 3),
    "one.json": (json.dumps(talk(0), indent=1), 1),
    "one.jsonl": ("".join(json.dumps({"from": m["role"], "text": m["content"]}) + "\n" for m in talk(0)), 1),
    "cells.csv": (csv(("id", "message"), [(n, json.dumps(talk(n))) for n in range(3)]), 3),
    "rows.jsonl": ("".join(json.dumps({"conversations": talk(n), "system": ""}) + "\n" for n in range(3)), 3),
}


@pytest.mark.parametrize("name", FILES)
def test_conversations_of_every_kind_of_file(tmp_path, name):
    text, count = FILES[name]
    (tmp_path / name).write_text(text)
    items = read_all(tmp_path / name, CHATS)
    found = [[{k: m[k] for k in ("role", "content")} for m in item.fields["messages"]] for item in items]
    assert found == [talk(n) for n in range(count)]
    (unit,) = units_of(tmp_path / name, CHATS)
    for place, item in enumerate(items):
        rest = list(read_unit(unit, CHATS, lambda _: None, item.cursor))
        assert [each.fields for each in rest] == [each.fields for each in items[place + 1 :]]


def test_a_log_that_is_too_long_for_memory_ends_conversations_and_names_what_came_later(tmp_path):
    (tmp_path / "log.csv").write_text(MIXED)
    with patch("zero2all.corpus.readers.chats.MOST_HELD_CHARS", 40):
        items = read_all(tmp_path / "log.csv", CHATS)
    assert sum(len(row["messages"]) for row in rows_of(items)) + len(damaged_of(items)) == 6
    assert {each.reason for each in damaged_of(items)} == {"conversation_ended"}


def test_a_corpus_of_the_kind_conversation_joins_messages_over_units(tmp_path):
    (tmp_path / "log.csv").write_text(MIXED)
    source = Source("chat", tmp_path / "log.csv", "en", kind="conversation")
    build_corpus(tmp_path / "corpus", [source], plain_options(unit_bytes=60, valid_share=0), HERE)
    found = [record["others"]["messages"] for record in iter_records(tmp_path / "corpus", "chat", "train")]
    assert sorted(messages[1]["content"] for messages in found) == [f"a {n}, ä" for n in range(3)]
