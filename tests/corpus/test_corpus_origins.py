"""Every item's raw file can be found again, and chats come through with their messages."""

from __future__ import annotations

import json
import zipfile

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from zero2all.common.records import ORIGINS_NAME, iter_records
from zero2all.corpus import Source, build_corpus


def origins(corpus, source):
    return [json.loads(line) for line in (corpus / source / ORIGINS_NAME).read_bytes().splitlines()]


def test_each_stretch_of_items_names_its_file_or_archive_member(tmp_path, monkeypatch):
    from zero2all.corpus import segment_writer

    monkeypatch.setattr(segment_writer, "SEGMENT_ITEMS", 3)
    monkeypatch.setattr(segment_writer, "BATCH_RECORDS", 2)
    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [json.dumps({"text": f"This is document number {n}, which is like no other."}) for n in range(12)]
    (raw / "a.jsonl").write_text("\n".join(rows[:4]) + '\n{"text": \n')
    (raw / "b.jsonl").write_text("\n".join(rows[4:9]))
    with zipfile.ZipFile(raw / "c.zip", "w") as archive:
        archive.writestr("inner/d.jsonl", "\n".join(rows[9:11]))
        archive.writestr("inner/e.jsonl", rows[11])
    build_corpus(tmp_path / "corpus", [Source("s", raw)], plain_options(max_damaged_share=1.0), HERE)
    found = origins(tmp_path / "corpus", "s")
    assert [line["first"] for line in found] == [0, 5, 10, 12]  # the damaged line counts
    assert [line["file"] for line in found] == ["a.jsonl", "b.jsonl", "c.zip/inner/d.jsonl", "c.zip/inner/e.jsonl"]


@pytest.mark.parametrize(
    ("field", "role", "text"), [("messages", "role", "content"), ("conversations", "from", "value")]
)
def test_chats_keep_their_messages_and_are_cleaned_by_their_texts(tmp_path, field, role, text):
    chats = [
        {field: [{role: "user", text: f"What is {n} plus {n}?"}, {role: "assistant", text: f"It is {2 * n}."}], "id": n}
        for n in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    report = build_corpus(tmp_path / "corpus", [Source("c", tmp_path / "chats.jsonl")], plain_options(), HERE)
    assert report["sources"]["c"]["mappings"] == [{"content": field}]
    records = list(iter_records(tmp_path / "corpus", "c", "train"))
    assert records[3]["content"] == "What is 3 plus 3?\nIt is 6."
    assert records[3]["others"] == {field: chats[3][field], "id": 3}
