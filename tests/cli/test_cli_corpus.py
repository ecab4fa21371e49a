"""What `z2a corpus show` and `rules` print."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def work(raw, tmp_path_factory):
    """A corpus with a title over two lines, a long text, and texts that rules drop."""
    from zero2all.cli import main

    folder = tmp_path_factory.mktemp("corpus-words")
    rows = [json.loads(line) for line in (raw / "en.jsonl").read_text(encoding="utf-8").splitlines()][:30]
    rows[0] = {"title": "two\nlines \u202e", "text": rows[0]["text"]}
    rows += [{"text": "Total 12345 67890 " * 60}, {"text": rows[1]["text"]}]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = f"own={folder / 'own.jsonl'}:en"
    assert main(["corpus", "build", source, "--work", str(folder / "w"), "--valid-share", "0"]) == 0
    return folder / "w"


def test_show_cuts_texts_only_when_asked_or_on_a_terminal(work, z2a):
    whole = z2a("corpus", "show", "own", "--count", "1", "--work", work).out
    assert whole.startswith("══ own: training text {title}\\n{content}\n── gid 0  two")
    assert " … (" not in whole
    cut = z2a("corpus", "show", "own", "--count", "1", "--chars", "20", "--work", work).out
    _, heading, text, *_ = cut.splitlines()
    assert heading.isprintable(), "a title cannot break the line or command the terminal"
    assert len(text.partition(" … (")[0]) == 20
    assert "more characters; --chars" in text


def test_show_dropped_prints_what_the_rule_measured_and_which_record_was_kept(work, z2a):
    digits = z2a("corpus", "show", "--dropped", "digits", "--work", work).out
    assert "══ own: 1 dropped by digits\n── gid 30, own.jsonl, byte " in digits
    assert "characters, digit_share 0.6667, prose_share " in digits
    assert " …\n" in digits
    cut = z2a("corpus", "show", "--dropped", "digits", "--chars", "5", "--work", work).out
    assert len(cut.splitlines()[2]) == len("12345 …")
    copies = z2a("corpus", "show", "--dropped", "duplicate", "--work", work).out
    assert "kept for it: gid 1\n" in copies
    assert z2a("corpus", "show", "--dropped", "mojibake", "--work", work).out == "mojibake dropped nothing.\n"


def test_show_dropped_says_so_when_nothing_was_dropped(raw, tmp_path, z2a):
    z2a(
        "corpus",
        "build",
        f"en={raw / 'en.jsonl'}:en",
        "--work",
        tmp_path,
        "--options.rules",
        "none",
        "--dedup.near",
        "off",
    )
    assert z2a("corpus", "show", "--dropped", "--work", tmp_path).out == "Nothing was dropped from en.\n"


def test_show_finds_a_record_by_its_gid(work, z2a):
    ended = z2a("corpus", "show", "--gid", "1", "--work", work)
    assert ended.code == 0
    assert ended.out.startswith("── gid 1  own, train")
    ended = z2a("corpus", "show", "--gid", "30", "--work", work)
    assert ended.code == 2
    assert "No record with gid 30 was kept" in ended.err


def test_rules_are_listed_with_the_settings_of_the_channel(z2a):
    out = z2a("corpus", "rules", "zh").out
    assert "--clean.zh.digits.on false" in out
    lines = out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("  too_short "))
    assert lines[place + 1].split() == ["min_chars", "10"]
    assert any(line.startswith("  long_lines") and "(off)" in line for line in lines)
    assert "\x1b" not in out
