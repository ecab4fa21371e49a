"""What cannot be read is named, counted and weighed; masked secrets stand in nothing that a build leaves."""

import bz2
import gzip
import json
import os
import random
from pathlib import Path

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options, tree
from tests.corpus.readers.reader_samples import PACKS, parquet
from zero2all.common.errors import BadInputError, DiskError
from zero2all.common.files import read_json, write_json
from zero2all.corpus import Source, build_corpus, summary_notes
from zero2all.corpus import finish as finish_module
from zero2all.corpus.clean.cleaner import Cleaner, mask_text
from zero2all.corpus.clean.config import Mask, build_config, default_config
from zero2all.corpus.readers import streams as streams_module
from zero2all.corpus.readers import units as plan_module


def lines(count: int, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return b"".join(json.dumps({"text": f"{n} {rng.random()} {rng.random()}"}).encode() + b"\n" for n in range(count))


def damaged(data: bytes) -> bytes:
    at = len(data) // 5
    return data[:at] + bytes(40) + data[at + 40 :]


def test_what_lies_behind_damage_in_a_compressed_stream_counts_as_lost(tmp_path, build, quarantined):
    (tmp_path / "a.jsonl.bz2").write_bytes(damaged(bz2.compress(lines(20_000), 1)))
    lost = r"1 of [\d,]+ records are damaged .* After damaged places, [\d,]{6,} bytes could not be read"
    with pytest.raises(BadInputError, match=lost) as caught:
        build(tmp_path / "a.jsonl.bz2")
    share = float(str(caught.value).partition("are damaged (")[2].partition("%")[0])
    assert 60 < share <= 85, "damaged after a fifth"
    assert quarantined()[0]["reason"] == "damaged_compression"
    assert build(tmp_path / "a.jsonl.bz2", max_damaged_share=0.9)["records_kept"] > 1000


def test_what_a_tar_loses_behind_a_damaged_header_counts_as_lost(tmp_path, build):
    whole = PACKS[".tar"]({f"{number}.jsonl": lines(300, number) for number in range(10)})
    third = whole.index(b"2.jsonl\0")
    broken = whole[:third] + random.Random(1).randbytes(len(whole) - third)
    for name, data in {"a.tar": broken, "a.tar.gz": gzip.compress(broken)}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInputError, match=r"1 of 601 records are damaged .*places, 1[0-9]{2},"):
            build(tmp_path / name)
        assert build(tmp_path / name, max_damaged_share=1)["records_kept"] == 600


@pytest.mark.parametrize("unit", [1_000_000, 20_000], ids=["small file", "large file"])
def test_unreadable_file_stops_the_build_and_is_tried_again(tmp_path, build, kept, quarantined, monkeypatch, unit):
    (tmp_path / "raw").mkdir()
    for name in "abc":
        (tmp_path / f"raw/{name}.jsonl").write_bytes(lines(1000, ord(name)))
    opened = plan_module.open_input

    def refuse(file):
        if file.name == "b.jsonl":
            raise PermissionError(13, "Permission denied", str(file.path))
        return opened(file)

    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "open_input", refuse)
        with pytest.raises(BadInputError, match=r"1 of 2,001 records.*\(33\.\d+%.*unreadable \(first in b.jsonl"):
            build(tmp_path / "raw", unit_bytes=unit)
        assert [(line["file"], line["reason"]) for line in quarantined()] == [("b.jsonl", "unreadable")]
    report = build(tmp_path / "raw", unit_bytes=unit)
    assert (report["records_kept"], report["quarantined"]) == (3000, 0), "it can be read now, and nothing else changed"
    assert [record["id"] for record in kept()] == list(range(3000))


def test_full_disk_of_temporary_files_is_no_damage_of_the_input(tmp_path, build, monkeypatch):
    rows = [{"text": f"{n} {random.Random(n).randbytes(300).hex()}"} for n in range(1000)]
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(parquet(rows)))
    with monkeypatch.context() as patch:
        patch.setattr(streams_module.tempfile, "TemporaryFile", lambda: open("/dev/full", "wb"))  # noqa: SIM115
        with pytest.raises(DiskError, match="disk for temporary files"):
            build(tmp_path / "a.parquet.gz")
    assert build(tmp_path / "a.parquet.gz")["records_kept"] == 1000


def test_file_names_that_are_not_utf8_are_read_and_named(tmp_path, build, quarantined):
    (folder := tmp_path / "raw").mkdir()
    try:
        (folder / os.fsdecode(b"\xff\xfe.jsonl")).write_bytes(lines(300) + b"{bad\n")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert build(folder)["records_kept"] == 300
    assert quarantined()[0]["file"] == r"\xff\xfe.jsonl"


def test_leftover_of_a_killed_writer_does_not_get_into_the_corpus(tmp_path, build, monkeypatch):
    written = finish_module.write_shard

    def and_leave_something(path, *rest):
        count = written(path, *rest)
        path.with_name(f"{path.name}.partial-1").write_bytes(b"half")  # process 1 is always alive
        return count

    monkeypatch.setattr(finish_module, "write_shard", and_leave_something)
    (tmp_path / "a.jsonl").write_bytes(lines(100))
    build(tmp_path / "a.jsonl")
    assert not list((tmp_path / "corpus").rglob("*.partial-*"))
    assert not [name for name in read_json(tmp_path / "corpus/one/manifest.json")["files"] if "partial" in name]


def test_kept_build_gives_its_clusters_to_every_format(tmp_path, build):
    (tmp_path / "a.jsonl").write_bytes(lines(100) + lines(100))
    clusters, sources = [], [Source("a", tmp_path / "a.jsonl", "en")]
    for shard_format in ("jsonl", "parquet", "jsonl"):
        build_corpus(tmp_path / "corpus", sources, plain_options(format=shard_format), HERE, keep_build=True)
        clusters.append((tmp_path / "corpus/clusters.jsonl").read_bytes())
    assert clusters[0].count(b"\n") == 100
    assert clusters == clusters[:1] * 3
    write_json(tmp_path / "corpus/sources.json", {"one": 0, "two": 0})
    with pytest.raises(BadInputError, match="a number of its own"):
        build(tmp_path / "a.jsonl")


def test_text_named_json_and_bad_bytes_are_read_counted_and_said(tmp_path, build, kept):
    (tmp_path / "raw").mkdir()
    words = "Plain words in a file that somebody gave a wrong name.\n" * 20
    (tmp_path / "raw/a.json").write_text(words)
    (tmp_path / "raw/b.json.gz").write_bytes(gzip.compress(words.upper().encode()))
    (tmp_path / "raw/c.txt").write_bytes(words.lower().encode() * 2 + b"\xfe\n")
    report = build(tmp_path / "raw")
    assert (report["records_kept"], report["quarantined"]) == (3, 0)
    assert report["formats"] == {"text": 3}
    assert report["replaced"] == {"characters": 1, "records": 1}
    notes = "\n".join(summary_notes({"sources": {"one": report}, "options": {"valid_share": 0}, "notes": []}))
    for name in ("a.json", "b.json.gz"):
        assert f"one: {name}: read as plain text: the name says JSON, but the file holds none" in notes
    assert "one: 1 character in 1 record could not be decoded and became U+FFFD" in notes
    assert kept()[2]["content"].endswith("\ufffd")


# Made up for this test.
SECRETS = ("11010519491231002X", "13800138000", "AKIA" + "QEXAMPLEABCDEFGH", "someone@mail.example.com")
SECRET = f"see {' and '.join(SECRETS)} here"
MASKS = {"emails": True, "phones": True, "id_numbers": True, "keys": True}
PROSE = "It was the best of times, and it was the worst of times, as everybody in the town said of it. "


def test_no_field_sample_or_list_shows_a_secret(tmp_path: Path) -> None:
    record = {"title": SECRET, "category": SECRET, "desc": SECRET, "phone": 13800138000, SECRETS[1]: [{"deep": SECRET}]}
    rows = [json.dumps({**record, "text": f"{n} {PROSE * 3} {n} {SECRET}"}) for n in range(30)]
    rows += [rows[7], *(json.dumps({**record, "text": text}) for text in (f"short {SECRET}", {"not": SECRET}))]
    rows += ['{"text": "cut off ' + SECRET, '{"text": "' + "x " * 93 + SECRETS[1] + " the excerpt ends in the number"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    clean = {"mask": MASKS, "too_short": {"on": True, "min_chars": 150}}
    options = plain_options(max_damaged_share=0.5, clean=clean)
    report = build_corpus(tmp_path / "corpus", [Source("a", tmp_path / "a.jsonl", "en")], options, HERE, True)
    source = report["sources"]["a"]
    assert source["dropped"].keys() >= {"duplicate", "too_short"}
    assert source["quarantined"] == 3
    assert source["masked"]["keys"] == 31 * 5, "in the text and four fields of every record that passed cleaning"
    for name, data in tree(tmp_path / "corpus").items():
        for secret in (*SECRETS, SECRETS[1][:7]):
            assert secret.encode() not in data, f"{secret} stands in {name}"
    assert b"<tel>" in (tmp_path / "corpus/quarantine/a.jsonl").read_bytes()


def test_without_masks_other_fields_are_left_as_they_are() -> None:
    cleaner = Cleaner(default_config("en"))
    assert not cleaner.masks
    assert cleaner.mask({"phone": 13800138000, "a": [SECRET]}) == {"phone": 13800138000, "a": [SECRET]}


def test_the_scan_does_not_overlook_a_key_without_digits() -> None:
    text = f"{PROSE} {SECRETS[2]} {PROSE}"
    (cleaned,) = Cleaner(build_config("en", {"mask": {"keys": True}}, "clean", []), "en").clean([text])
    assert (cleaned.text, cleaned.masked) == (mask_text(text, Mask(keys=True))[0].strip(), {"keys": 1})
