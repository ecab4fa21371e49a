"""With masks on, a secret stands nowhere in what a build leaves: no field, sample, report or list."""

from __future__ import annotations

import json
from pathlib import Path

from tests.corpus.corpus_helpers import HERE, plain_options, tree
from zero2all.corpus import Source, build_corpus
from zero2all.corpus.clean import Cleaner, default_config
from zero2all.corpus.clean.cleaner import mask_text
from zero2all.corpus.clean.config import Mask, build_config

# Made up for this test.
SECRETS = ("11010519491231002X", "13800138000", "AKIA" + "QEXAMPLEABCDEFGH", "someone@mail.example.com")
SECRET = f"see {' and '.join(SECRETS)} here"
MASKS = {"emails": True, "phones": True, "id_numbers": True, "keys": True}
PROSE = "It was the best of times, and it was the worst of times, as everybody in the town said of it. "


def test_no_field_sample_or_list_shows_a_secret(tmp_path: Path) -> None:
    record = {"title": SECRET, "category": SECRET, "desc": SECRET, "phone": 13800138000, SECRETS[1]: [{"deep": SECRET}]}
    rows = [json.dumps({**record, "text": f"{n} {PROSE * 3} {n} {SECRET}"}) for n in range(30)]
    rows.append(rows[7])  # a duplicate
    rows.append(json.dumps({**record, "text": f"short {SECRET}"}))
    rows.append(json.dumps({**record, "text": {"not": SECRET}}))
    rows.append('{"text": "cut off ' + SECRET)
    rows.append('{"text": "' + "x " * 93 + SECRETS[1] + " the excerpt of this ends inside the number")
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
    config = build_config("en", {"mask": {"keys": True}}, "clean", [])
    cleaned = Cleaner(config, "en").clean([f"{PROSE} {SECRETS[2]} {PROSE}"])[0]
    assert cleaned.text == mask_text(f"{PROSE} {SECRETS[2]} {PROSE}", Mask(keys=True))[0].strip()
    assert cleaned.masked == {"keys": 1}
