"""report.html: the report as a page, read by a parser."""

import base64
import hashlib
import random
import re
from html.parser import HTMLParser

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from zero2all.corpus import Source, build_corpus
from zero2all.corpus.report import check_identity
from zero2all.corpus.report_html import report_html

HOSTILE = '</pre></details><script>document.title="owned"</script><img src=x onerror="document.title=1">'
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that every tag is closed, and keeps tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words += data


def text_of(seed: int) -> str:
    words = random.Random(seed).choices(["river", "stone", "letter", "garden", "winter", "market"], k=40)
    return f"{seed} {' '.join(words)}"


def test_page_stands_alone_and_escapes_what_it_shows(tmp_path, write_lines):
    """Of a corpus whose texts, titles and damaged lines do their worst."""
    rows = [{"title": HOSTILE, "text": f"{HOSTILE} {text_of(n)}"} for n in range(40)]
    dropped = [{"text": f"{HOSTILE}{n}"} for n in range(3)]
    path = write_lines("a.jsonl", [{"text": "中文的内容。" * 40}, *rows, *dropped, b"{bad <b>"])
    options = plain_options(max_damaged_share=0.1, min_chars=120)
    build_corpus(tmp_path / "corpus", [Source("小说", path)], options, HERE)
    page = (tmp_path / "corpus/report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;document.title" in page
    found = Page(page)
    assert not {"img", "link", "iframe"} & set(found.tags)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == found.tags.count("script") == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "src"]
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")
    assert not re.search(r"https?://|@import|url\(", page)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert ("content", policy) in found.attributes, "only ours may run"
    assert "中文的内容。" in found.words
    assert "invalid_json" in found.words


def source_report(**changes):
    report = {
        "records_in": 10, "records_kept": 7, "dropped": {"digits": 2}, "quarantined": 1,
        "quarantined_by_reason": {"invalid_json": 1}, "bytes_in": 960, "bytes_kept": 700, "bytes_repaired": 50,
        "bytes_dropped": {"digits": 200}, "bytes_quarantined": 10,
        "private_use": {"records": 2, "mapped": 3, "removed": 4}, "masked": {"emails": 3},
        "train_records": 6, "valid_records": 1, "channel": "en", "channel_guessed": True, "channel_reason": "why",
        "kind": None, "mappings": [{"content": "text"}], "mapping_guessed": True, "formats": {"csv": 1, "text": 2},
        "reading_notes": ["a.gz: gzip cannot be split"], "input_files": 3, "input_file_bytes": 5000,
        "skipped_files": {"binary": 2}, "length_histogram": {"64": 5, "256": 2},
        "scripts": {"latin": {"records": 7, "bytes": 700}}, "examples": {"kept": ["kept text"], "dropped": {}},
    }  # fmt: skip
    return {**report, **changes}


def whole_report(sources):
    for name, source in sources.items():
        check_identity(name, source)
    names = ("records_in", "records_kept", "quarantined", "bytes_in", "bytes_kept", "train_records", "valid_records")
    totals = {name: sum(source[name] for source in sources.values()) for name in names}
    dropped = {rule: count for source in sources.values() for rule, count in source["dropped"].items()}
    report = {"inputs": "0123456789abcdef", "options": {"format": "jsonl", "clean": {}, "dedup": {"near": "off"}}}
    report |= {"notes": ["near duplicates were not looked for"], "totals": {**totals, "dropped": dropped}}
    return {**report, "sources": sources}


def test_page_shows_both_identities_in_figures_and_says_so_when_a_sum_is_wrong():
    words = Page(report_html(whole_report({"a": source_report(), "b": source_report()}))).words
    assert "20 in = 14 kept + 4 dropped + 2 quarantined ✓ adds up" in words
    assert "1,920 in = 1,400 kept + 400 dropped + 20 quarantined + 100 repaired ✓ adds up" in words
    report = whole_report({"a": source_report()})
    report["sources"]["a"]["records_kept"] = 6
    assert "10 in = 6 kept + 2 dropped + 1 quarantined ✗ does not add up" in Page(report_html(report)).words


def test_page_follows_the_language(monkeypatch):
    monkeypatch.setenv("Z2A_LANG", "zh")
    facts = {"channel_reason": "sampled documents: 9; 100% en", "examples": {"kept": [], "dropped": {}}}
    facts["reading_notes"] = ["a.tar: a tar is read by one worker; resuming skips what was read"]
    facts["replaced"] = {"characters": 2, "records": 1}
    report = whole_report({"a": source_report(**facts), "b": source_report(**facts)})
    report["notes"] = ["near duplicates were not looked for: train may hold changed copies and parts of valid records"]
    page = Page(report_html(report))
    shown = [page.words, *(value or "" for name, value in page.attributes if name in ("title", "aria-label"))]
    assert [found[0] for text in shown for found in re.finditer(r"[a-z]{2,}(?: [a-z]+){2,}", text)] == []
    assert ("lang", "zh") in page.attributes
    assert "20 读入 = 14 保留 + 4 丢弃 + 2 隔离 ✓ 吻合" in page.words


def test_page_has_everything_the_report_says_of_a_source():
    words = Page(report_html(whole_report({"a": source_report()}))).words
    facts = [
        "3 files (1 csv, 2 text), 5.0 KB on disk",
        "2 binary",
        "en (guessed: why)",
        "content from 'text' (guessed)",
    ]
    facts += ["7 of 10 records, 100 B of text each on average", "3 emails", "gzip cannot be split", "dedup.near"]
    facts += ["Too large a share of digits", "corpus/quarantine/a.jsonl", "near duplicates were not looked for"]
    for fact in (*facts, "0123456789abcdef"):
        assert fact in words, fact


@pytest.mark.parametrize("count", [1, 2])
def test_page_is_whole_for_any_number_of_sources(count):
    page = report_html(whole_report({f'<{number}>&"': source_report(channel="<b>") for number in range(count)}))
    found = Page(page)
    assert found.words.count("256 B–512 B2 · 28.6%") == count
    assert '<0>&"' in found.words, "names and channels are text, not tags"
    assert "<b>" in found.words
    targets = {value for name, value in found.attributes if name == "id"}
    assert {value[1:] for name, value in found.attributes if name == "href"} == targets
    assert len(targets) == count
    assert ("Dropped, by rule and source" in found.words) == (count > 1)


def test_page_of_a_source_of_which_nothing_was_kept():
    nothing = {"records_kept": 0, "train_records": 0, "valid_records": 0, "bytes_kept": 0, "length_histogram": {}}
    dropped = {"dropped": {"digits": 9}, "bytes_dropped": {"digits": 900}, "scripts": {}}
    examples = {"kept": [], "dropped": {"digits": ["1 2 3", ""]}}
    words = Page(report_html(whole_report({"a": source_report(**nothing, **dropped, examples=examples)}))).words
    assert words.count("nothing was kept") == 2
