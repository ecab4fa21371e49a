"""A sample shown is the one the loader reads, with its documents and where they came from; and the figures add up."""

import json
import re

import numpy as np
import pytest

from zero2all.common.errors import UsageError
from zero2all.common.records import iter_records, training_text
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.config import DataConfig
from zero2all.packed.loader import read_batch
from zero2all.packed.mixture import open_training_data
from zero2all.packed.shard_format import open_split
from zero2all.packed.show import Origins, packed_stats, sample_at, split_sample
from zero2all.packed.stages import Stage
from zero2all.packed.writer import pack_corpus
from zero2all.tokenizer import load_tokenizer

SEQ_LEN = 64


def open_data(work):
    stages = [Stage("main", 0, None, SEQ_LEN), Stage("late", 40 * SEQ_LEN, {"zh": 1.0}, 32)]
    return open_training_data(work.packed, DataConfig(seq_len=SEQ_LEN), stages)


def test_what_is_shown_at_a_position_is_what_the_loader_reads_there(shared_work):
    data = open_data(shared_work)
    for position in (0, 7, 39, 40, 55):
        shown = sample_at(data, position, shared_work.corpus)
        token = position * SEQ_LEN if position < 40 else 40 * SEQ_LEN + (position - 40) * 32
        row = read_batch(data, token, 1).tokens[0]
        assert np.concatenate([document.tokens for document in shown.documents]).tolist() == row.tolist()
        assert shown.stage == ("main" if position < 40 else "late")
        assert f"position {position}" in shown.heading()


def test_documents_decode_to_the_records_they_came_from(shared_work):
    tokenizer = load_tokenizer(shared_work.tokenizer)
    records = {record["gid"]: record for record in iter_records(shared_work.corpus, "zh", "train")}
    split = open_split(shared_work.packed, "zh", "train")
    for index in range(10):
        shown = split_sample(split, index, SEQ_LEN, "concat", shared_work.corpus)
        assert shown.documents
        for document in shown.documents:
            record = records[document.origin.gid]
            assert document.origin.ordinal == record["id"]
            assert tokenizer.decode(document.tokens.tolist()).strip("\ufffd") in training_text(record)
            assert document.origin.part == shared_work.corpus / "zh/train/part-00000.jsonl"
            raw = json.loads((shared_work.raw / "zh.jsonl").read_text().splitlines()[document.origin.item])
            assert document.origin.file == str(shared_work.raw / "zh.jsonl")
            assert raw["text"] == record["content"]


def test_the_raw_file_of_a_source_of_many_files_follows_from_the_list_of_origins(work, texts):
    folder = work.raw / "many"
    folder.mkdir()
    for number in range(3):
        rows = [json.dumps({"title": f"t{number}", "text": text}) for text in texts["novels"][number * 30 :][:30]]
        (folder / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    build_corpus(work.corpus, [Source("many", folder, "en")], BuildOptions(valid_share=0))
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    gid = open_split(work.packed, "many", "train").gid_of(50)
    found = Origins(work.corpus).find("many", "train", gid)
    assert (found.file, found.item, found.title) == (str(folder / "1.jsonl"), 20, "t1")
    (work.corpus / "many/origins.jsonl").unlink()  # a corpus that somebody made by hand
    unknown = Origins(work.corpus).find("many", "train", gid)
    assert re.match(r"item 50 of \S+ \(files: 3\); ", unknown.in_words())


def test_padding_and_what_does_not_count_are_marked(by_hand, tmp_path, shared_work):
    tokenizer = load_tokenizer(shared_work.tokenizer)
    made = by_hand(tmp_path, {"talk": [20] * 9}, masked=["talk"], vocab_size=tokenizer.vocab_size)
    split = open_split(made.packed, "talk", "train")
    build_best_fit(split, 49)
    shown = split_sample(split, 0, 49, "best_fit", tmp_path)
    assert [len(document.tokens) for document in shown.documents] == [20, 20, 10]
    assert [document.number is None for document in shown.documents] == [False, False, True]
    second = shown.documents[1]
    start = int(made.starts["talk"][second.number])
    assert second.counted[1:].tolist() == made.masks["talk"][start + 1 : start + 20].tolist()
    assert second.text(tokenizer).count("⟦") == second.text(tokenizer).count("⟧") > 1


def test_without_the_corpus_samples_are_still_shown_and_one_that_is_not_there_is_refused(shared_work):
    split = open_split(shared_work.packed, "zh", "train")
    shown = split_sample(split, 0, SEQ_LEN, "concat", shared_work.root / "nowhere")
    assert all(document.origin is None for document in shown.documents)
    with pytest.raises(UsageError, match=r"has \d+ samples of 64 \+ 1 tokens, so there is no sample 9,999"):
        split_sample(split, 9999, SEQ_LEN, "concat", shared_work.corpus)


def test_the_figures_add_up(work):
    build_best_fit(open_split(work.packed, "zh", "train"), SEQ_LEN)
    stats = packed_stats(work.packed, SEQ_LEN, open_data(work), 60 * SEQ_LEN)
    for row in stats["sources"]:
        split = open_split(work.packed, row["source"], row["split"])
        assert row["tokens"] == split.tokens
        assert sum(row["length_histogram"].values()) == row["documents"] == split.manifest["documents"]
        concat = row["packing"]["concat"]
        assert concat["samples"] * SEQ_LEN + concat["lost_tokens"] == max(0, split.tokens - 1)
        borders = np.append(split.docs[0].astype(int), split.tokens)
        crossing = (borders[:-1] // SEQ_LEN != (borders[1:] - 1) // SEQ_LEN).mean()
        assert concat["documents_cut_share"] == pytest.approx(crossing)
    zh = next(row for row in stats["sources"] if (row["source"], row["split"]) == ("zh", "train"))
    best = zh["packing"]["best_fit 64"]
    assert best["samples"] * (SEQ_LEN + 1) - best["lost_tokens"] >= zh["tokens"]
    assert sum(channel["share"] for channel in stats["channels"].values()) == pytest.approx(1)
    english = [row for row in stats["sources"] if (row["channel"], row["split"]) == ("en", "train")]
    assert stats["channels"]["en"]["tokens"] == sum(row["tokens"] for row in english)
    assert sum(source["read"] for source in stats["budget"]["sources"].values()) == 60 * SEQ_LEN
