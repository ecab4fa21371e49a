"""Bits per byte against arithmetic by hand."""

import dataclasses
import gzip
import math

import pytest
import torch

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.records import iter_records, training_text
from zero2all.evals import perplexity
from zero2all.evals.options import read_text, text_files
from zero2all.evals.perplexity import Windows, file_bits_per_byte, held_out_rows, score_documents
from zero2all.evals.report import report_lines
from zero2all.infer.engine import Engine
from zero2all.packed.shard_format import packed_sources
from zero2all.track.reader import read_run
from zero2all.train.validate import all_rows, held_out_metrics, held_out_scores, open_valid_splits


def nats_of(loaded, text, stride=0):
    (found,) = score_documents(Engine(loaded), [text], Windows(loaded.window, stride))
    return found.nats, found.tokens


def bits_per_byte(loaded, corpus, max_bytes):
    return perplexity.held_out_bits_per_byte(Engine(loaded), Windows(loaded.window), corpus, max_bytes)


def nats_by_hand(loaded, ids, targets):
    with torch.no_grad():
        logits = loaded.model.logits(loaded.model(torch.tensor([ids])))[0].double()
    return sum(float(row.logsumexp(0) - row[target]) for row, target in zip(logits, targets, strict=True))


@pytest.mark.parametrize("length", [1, 64, 65, 128, 200])
def test_document_is_scored_in_windows_each_token_once_from_its_begin_to_its_end(trained, length):
    tokenizer, window = trained.tokenizer, trained.config.data.seq_len
    text = "d" * 200
    while len(tokenizer.encode_text(text)) > length - 1:
        text = text[:-1]
    ids = [tokenizer.begin_id, *tokenizer.encode_text(text), tokenizer.end_id]
    assert len(ids) == length + 1
    firsts = range(0, length, window)
    by_hand = sum(nats_by_hand(trained, ids[at:-1][:window], ids[at + 1 :][:window]) for at in firsts)
    nats, tokens = nats_of(trained, text)
    assert (tokens, nats) == (length, pytest.approx(by_hand, rel=1e-5))


def test_a_text_with_unknown_tokens_is_called_too_good(trained, monkeypatch):
    ids = trained.tokenizer.encode_text("kalomi")
    monkeypatch.setattr(trained.tokenizer, "unknown_id", ids[0])
    (score,) = score_documents(Engine(trained), ["kalomi"], Windows(trained.window))
    assert score.unknown_tokens == ids.count(ids[0])
    for unknown in (score.unknown_tokens, 0):
        values = {**score.summary(), "gzip_bits_per_byte": 1.0, "unknown_tokens": unknown}
        lines = report_lines({"run": "r", "step": 1, "held_out": {}, "documents": {"en": values}})
        assert any("are <unk>" in line for line in lines) == (unknown > 0)


def test_bits_per_byte_of_a_channel_is_all_bits_over_all_bytes(trained, trained_workspace):
    report = bits_per_byte(trained, trained_workspace.corpus, 10**9)
    assert set(report) == {"zh", "en"}
    texts = [training_text(record) for record in iter_records(trained_workspace.corpus, "zh", "valid")]
    nats = sum(nats_of(trained, text)[0] for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert report["zh"]["documents"] == len(texts) > 1
    assert report["zh"]["bytes"] == size
    assert report["zh"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size)
    gzip_bytes = len(gzip.compress("".join(texts).encode(), 9)) - 18  # without header and checksum
    assert report["zh"]["gzip_bits_per_byte"] == pytest.approx(gzip_bytes * 8 / size, rel=0.01)
    limited = bits_per_byte(trained, trained_workspace.corpus, 1)["zh"]
    assert (limited["documents"], limited["bytes"]) == (1, len(texts[0].encode())), "whole documents, at least one"


def splits_of(workspace):
    return open_valid_splits(workspace.packed, packed_sources(workspace.packed))


def test_held_out_loss_is_the_one_that_training_recorded_at_this_checkpoint(trained, trained_workspace):
    run = trained_workspace.run(trained.name)
    found = held_out_rows(trained, splits_of(trained_workspace), run)
    metrics = read_run(run).series
    assert set(found) == {"zh", "en"}
    for channel, values in found.items():
        assert values["loss"] == metrics[f"eval/valid/loss/{channel}"].value[-1]
        assert values["bits_per_byte"] == metrics[f"eval/valid/bpb/{channel}"].value[-1]
    together = all_rows(found)
    assert together["loss"] == pytest.approx(metrics["eval/valid/loss"].value[-1])
    assert together["bits_per_byte"] == pytest.approx(metrics["eval/valid/bpb"].value[-1])
    assert together["tokens"] == found["zh"]["tokens"] + found["en"]["tokens"]


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_checkpoint_without_validation_is_scored_the_same_way(trained, trained_workspace, tmp_path, document_mask):
    data = dataclasses.replace(trained.config.data, document_mask=document_mask)
    config = dataclasses.replace(trained.config, data=data)
    splits = splits_of(trained_workspace)
    expected = held_out_metrics(held_out_scores(trained.model, splits, config))
    found = held_out_rows(dataclasses.replace(trained, config=config), splits, tmp_path)
    for channel in ("en", "zh"):
        assert found[channel]["loss"] == expected[f"eval/valid/loss/{channel}"]
    assert all_rows(found)["loss"] == pytest.approx(expected["eval/valid/loss"])


@pytest.mark.parametrize("stride", [1, 3, 10])
def test_sliding_windows_score_each_token_once_with_context(stride):
    for tokens in (2, 10, 11, 12, 40):
        scored = []
        for number, (first, start, end) in enumerate(Windows(10, stride).cut(tokens)):
            assert end - first <= 11
            assert number == 0 or start - first >= 10 - stride
            scored += range(start, end)
        assert scored == list(range(1, tokens))
    for wrong in (-1, 65):
        with pytest.raises(UsageError, match=r"windows of 64 tokens .*from 1 to 64"):
            Windows(64, wrong)


def test_stride_gives_later_tokens_the_context_that_windows_without_overlap_take_from_them(trained):
    text = "The capital of France is Paris. The answer is Paris. " * 12
    ids = [trained.tokenizer.begin_id, *trained.tokenizer.encode_text(text), trained.tokenizer.end_id]
    by_hand = sum(  # causal: what a window's head costs does not depend on what follows
        nats_by_hand(trained, ids[first : end - 1], ids[first + 1 : end])
        - (nats_by_hand(trained, ids[first : start - 1], ids[first + 1 : start]) if start - 1 > first else 0.0)
        for first, start, end in Windows(trained.window, 16).cut(len(ids))
    )
    slid, tokens = nats_of(trained, text, 16)
    assert tokens == len(ids) - 1 > 2 * trained.window
    assert slid == pytest.approx(by_hand, rel=1e-4)
    assert slid != pytest.approx(nats_of(trained, text)[0], rel=1e-3)


def test_loss_by_position_is_that_of_the_tokens_with_so_many_before_them(trained):
    (score,) = score_documents(Engine(trained), ["中国的首都是北京。" * 30], Windows(trained.window))
    buckets = score.summary()["by_position"]
    places = [(bucket["from"], bucket["to"]) for bucket in buckets]
    assert (places[:3], places[-1]) == ([(1, 1), (2, 3), (4, 7)], (64, 64)), "a window has 64 tokens"
    assert sum(bucket["tokens"] for bucket in buckets) == score.tokens
    assert sum(bucket["tokens"] * bucket["loss"] for bucket in buckets) == pytest.approx(score.nats)
    assert buckets[-1]["loss"] < buckets[0]["loss"]


def test_files_and_folders_are_scored_one_by_one_and_what_is_no_text_is_named(trained, tmp_path):
    folder = tmp_path / "mine"
    (folder / ".git").mkdir(parents=True)
    data = {"a.txt": "中国的首都是北京。".encode(), "b.md": b"The capital of France is Paris. " * 20, "none.txt": b""}
    data |= {"picture.png": b"\x89PNG\0\0", "latin.txt": "Züge".encode("latin-1"), ".git/config": b"hidden"}
    for name, content in data.items():
        (folder / name).write_bytes(content)
    alone = tmp_path / "alone.txt"
    alone.write_text("The answer is Rome.")
    files = text_files([folder, alone, folder / "a.txt", alone])
    found, skipped = file_bits_per_byte(Engine(trained), Windows(trained.window), files, 400)
    assert list(found) == ["mine/a.txt", "mine/b.md", "alone.txt"]
    nats, tokens = nats_of(trained, "中国的首都是北京。")
    assert found["mine/a.txt"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / 27)
    assert (found["mine/a.txt"]["tokens"], found["mine/b.md"]["bytes"]) == (tokens, 400)
    assert [values["is_whole"] for values in found.values()] == [True, False, True]
    why = {"latin.txt": "is not UTF-8", "none.txt": "is empty", "picture.png": "is not text (it has zero bytes)"}
    assert skipped == {f"mine/{name}": reason for name, reason in why.items()}
    with pytest.raises(BadInputError, match=r"no text file .*absent, nor a folder"):
        text_files([tmp_path / "absent"])


def test_a_limit_of_bytes_never_cuts_a_character_and_leaves_one_at_least(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é中𝄞", encoding="utf-8")
    for limit, text in ((1, "é"), (2, "é"), (4, "é"), (5, "é中"), (8, "é中"), (9, "é中𝄞")):
        assert read_text(path, limit) == (text, limit == 9)
    path.write_text("é中", encoding="utf-16")
    assert "iconv" in read_text(path, 9)
