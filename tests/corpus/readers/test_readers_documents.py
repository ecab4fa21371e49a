"""Pages, books, articles and dumps become text with its structure; what is around the text is left out and counted."""

import gzip
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from tests.corpus.readers.reader_samples import damaged_of, essence, read_all, rows_of, units_of, zip_of
from zero2all.corpus.readers import Format, ReaderLimits, read_unit, sniff
from zero2all.corpus.readers.markup import latex, wikitext
from zero2all.corpus.readers.pages import read_page

# ruff: noqa: E501 - small documents

WORDS = "It was a long day, and everybody in the house was glad when the evening came at last. "
SITE = f"""<!DOCTYPE html><html lang="en"><head><title>A long day | The Site</title></head><body>
<nav><a href="/">Home</a></nav><div class="cookie-banner"><p>We use cookies, and you will have to live with it.</p></div>
<div class="content"><h1>A long day</h1><p class="byline">By Ann</p><p>{WORDS * 4}</p><h2>List</h2>
<ul><li>one<ol><li>inner</li></ol></li><li>two <code>x</code></li></ul>
<table><tr><th>Name</th><th>Age</th></tr><tr><td>A|nn</td><td>3</td></tr></table>
<pre><code class="language-py">def f():
    return 1</code></pre><p>Then <math><semantics><mi>x</mi><annotation encoding="application/x-tex">x^2</annotation>
</semantics></math> was found.</p><h2>Nothing below</h2></div>
<div class="related"><a href="/b">Another</a><p>{WORDS}</p></div><footer>{WORDS}</footer></body></html>"""
SITE_TEXT = f"""{(WORDS * 4).strip()}

## List

- one
  1. inner
- two `x`

| Name | Age |
|---|---|
| A\\|nn | 3 |

```py
def f():
    return 1
```

Then $x^2$ was found."""
DOCBOOK = """<?xml version="1.0"?><!DOCTYPE chapter [<!ENTITY a "&a2;&a2;"><!ENTITY x SYSTEM "file:///etc/passwd">]>
<chapter xmlns="http://docbook.org/ns/docbook" xml:lang="fr"><title>Les tableaux</title><para>Un &x;&a;mot&nbsp;: &eacute;t&#233;.</para>
<section><title>Usage</title><itemizedlist><listitem><para>un</para></listitem></itemizedlist></section></chapter>"""
WORD = """<?xml version="1.0"?><w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>
<w:p><w:pPr><w:pStyle w:val="Title"/></w:pPr><w:r><w:t>Report</w:t></w:r></w:p>
<w:p><w:pPr><w:pStyle w:val="2"/></w:pPr><w:r><w:t>Part</w:t></w:r></w:p>
<w:p><w:r><w:t>Some </w:t></w:r><w:r><w:t>words.</w:t></w:r></w:p></w:body></w:document>"""


def warc_record(kind: str, body: bytes, url: str = "http://a.b/c") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def http(body: bytes, kind: str = "text/html", *more: str, status: int = 200) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} OK", f"Content-Type: {kind}", *more, "\r\n"]).encode() + body


PACKED = gzip.compress(SITE.encode())
WARC = b"".join(
    [
        warc_record("warcinfo", b"x"),
        warc_record("response", http("<p>Grüße aus Köln.</p>".encode("latin-1"), "text/html; charset=ISO-8859-1")),
        warc_record("response", http(b"\x89PNG", "image/png")),
        warc_record("response", http(b"<p>gone</p>", status=404)),
        warc_record(
            "response",
            http(b"%x\r\n%s\r\n0\r\n\r\n" % (len(PACKED), PACKED), "text/html", "Content-Encoding: gzip", "Transfer-Encoding: chunked"),
        ),
        warc_record("response", http(b"\xce\xb2\xcf", "text/html", "Content-Encoding: br")),
        b"garbage\r\n",
        warc_record("conversion", b"Nur Text."),
    ]
)  # fmt: skip
DUMP = (
    "<mediawiki><siteinfo/>"
    + "".join(
        f"<page><title>T{n}</title><ns>{n % 2}</ns>{'<redirect />' if n == 2 else ''}<revision><text>old</text></revision>"
        f"<revision><text xml:space='preserve'>'''Bold''' &amp;lt; {n}</text></revision></page>\n"
        for n in range(5)
    )
    + "</mediawiki>"
).encode()  # fmt: skip


def test_of_a_page_the_main_text_remains_with_its_structure():
    assert read_page(SITE.encode()) == ("A long day", SITE_TEXT, "en")


def test_a_page_of_old_tables_is_no_table():
    bar = "<a href=a>one</a> | <a href=b>two</a>"
    page = f"<body><table><tr><td>{bar}</td><td><table><tr><td>{WORDS * 4}</td></tr></table></td></tr></table></body>"
    assert read_page(page.encode()).content == (WORDS * 4).strip()


@pytest.mark.parametrize("page", [b"", b"<", b"<html></html>", b"\0\0", b"<p><b>x</p></b>", b"</div></table>"])
def test_broken_markup_is_no_error(page: bytes):
    assert len(read_page(page).content) <= 1


@pytest.mark.parametrize(
    ("name", "data", "title", "content"),
    [
        ("a.html", SITE.encode(), "A long day", SITE_TEXT),
        ("a.txt", SITE.encode("utf-16"), "A long day", SITE_TEXT),
        ("b.htm", '<meta charset="gbk"><title>标题_网站</title><p>这是一段中文文字。'.encode("gbk"), "标题", "这是一段中文文字。"),
        ("c.xml", DOCBOOK.encode(), "Les tableaux", "Un xamot : été.\n\n### Usage\n\n- un"),
        ("d.md", b"---\ntitle: 'A b'\nx: 1\n---\n\nText.\n", "A b", "Text.\n"),
        ("e.md", b"---\nA line between rules.\n---\n", "", "---\nA line between rules.\n---\n"),
        ("f.docx", zip_of({"word/document.xml": WORD.encode(), "word/styles.xml": b"<a/>"}), "Report", "## Part\n\nSome words."),
        ("g.docx", zip_of({"word/document.xml": WORD.encode()}, zipfile.ZIP_STORED), "Report", "## Part\n\nSome words."),
        ("h.epub", zip_of({"mimetype": b"x", "s.css": b"p{}", "c.xhtml": SITE.encode()}), "A long day", SITE_TEXT),
    ],
)  # fmt: skip
def test_one_document_a_file_and_no_file_name_in_it(tmp_path: Path, name: str, data: bytes, title: str, content: str):
    (tmp_path / name).write_bytes(data)
    [row] = rows_of(read_all(tmp_path / name))
    assert (row["title"], row["content"]) == (title, content)


def test_a_page_in_a_warc_is_read_and_the_rest_is_counted(tmp_path: Path):
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(WARC))
    skipped: list[tuple[str, str]] = []
    items = read_all(tmp_path / "a.warc.gz", skipped=skipped)
    assert [row["content"] for row in rows_of(items)] == ["Grüße aus Köln.", SITE_TEXT, "Nur Text."]
    assert rows_of(items)[0]["others"]["url"] == "http://a.b/c"
    assert [item.reason for item in damaged_of(items)] == ["unknown_compression", "damaged_warc"]
    assert [reason for reason, _ in skipped] == ["warc warcinfo", "warc response, no page", "warc response, not 200"]


def test_a_dump_of_mediawiki_gives_the_last_revision_of_its_articles(tmp_path: Path):
    (tmp_path / "a.xml").write_bytes(DUMP)
    skipped: list[tuple[str, str]] = []
    rows = rows_of(read_all(tmp_path / "a.xml", skipped=skipped))
    assert [(row["title"], row["content"]) for row in rows] == [("T0", "Bold < 0"), ("T4", "Bold < 4")]
    assert [name for _, name in skipped] == ["T1", "T2", "T3"]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.xml", "a.epub", "a.html"])
def test_reading_goes_on_behind_every_item_and_a_cut_file_is_said(tmp_path: Path, name: str):
    pages = {f"{n}.xhtml": SITE.encode() for n in range(3)}
    data = {
        "a.warc": WARC,
        "a.warc.gz": gzip.compress(WARC),
        "a.xml": DUMP,
        "a.epub": zip_of(pages),
        "a.html": SITE.encode(),
    }
    (tmp_path / name).write_bytes(data[name])
    [unit] = units_of(tmp_path / name)
    limits = ReaderLimits()
    items = list(read_unit(unit, limits, lambda _: None))
    for place, item in enumerate(items):
        rest = list(read_unit(unit, limits, lambda _: None, item.cursor))
        assert [essence(each) for each in rest] == [essence(each) for each in items[place + 1 :]]
    if name in ("a.warc", "a.warc.gz", "a.xml"):
        (tmp_path / name).write_bytes(data[name][: len(data[name]) - 40])
        assert damaged_of(read_all(tmp_path / name))[-1].ends_file


def test_what_is_not_read_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["zero2all.corpus.readers.sniff"], "find_spec", lambda _: None)
    stored = zip_of({"xl/workbook.xml": b"<a>text</a>" * 99}, zipfile.ZIP_STORED)
    files = {"a.pdf": (b"%PDF-1.7\n", Format.NEEDS_PYPDF, "pip install"), "a.xlsx": (stored, Format.BINARY, "convert")}
    for name, (data, format_, words) in files.items():
        (tmp_path / name).write_bytes(data)
        [unit] = units_of(tmp_path / name)
        assert unit.format is format_
        assert words in unit.note


def test_a_pdf_gives_its_text_or_says_that_it_has_none(tmp_path: Path):
    pytest.importorskip("pypdf")
    for name, words in {"text.pdf": b"(Some words.) Tj", "scan.pdf": b""}.items():
        stream = b"BT /F1 12 Tf 72 720 Td " + words + b" ET"
        objects = [
            b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>/MediaBox[0 0 612 792]>>",
            b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream), b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        ]  # fmt: skip
        body, places = b"%PDF-1.4\n", []
        for number, each in enumerate(objects, 1):
            places.append(len(body))
            body += b"%d 0 obj%s endobj\n" % (number, each)
        table = b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
        end = b"trailer<</Root 1 0 R/Size 6>>\nstartxref\n%d\n%%%%EOF" % len(body)
        (tmp_path / name).write_bytes(body + table + end)
    assert [row["content"] for row in rows_of(read_all(tmp_path / "text.pdf"))] == ["Some words."]
    assert [item.reason for item in damaged_of(read_all(tmp_path / "scan.pdf"))] == ["no_text_layer"]


@pytest.mark.parametrize(
    ("head", "name", "expected"),
    [
        (b"<?xml version='1.0'?><!-- x --><svg/>", "a.xml", Format.TEXT),
        (b"<p align=center>Read me</p>\n", "a.md", Format.TEXT),
        (b"<?php echo 1;", "a.php", Format.TEXT),
        (b"\\documentclass{article}", "a.tex", Format.LATEX),
        (b"<!---->" * 9000, "a.xml", Format.TEXT),
    ],
)
def test_markup_is_known_by_its_beginning(head: bytes, name: str, expected: Format):
    assert sniff(head, name).format is expected


def test_wikitext():
    text = """{{Info|a={{b|c}}}}'''Go''' is a [[board game|game]] for {{lang|en|two}}.<ref name="x">R {{c}}</ref> <math>x<y</math>
[[File:a.png|thumb|A [[board]]]]
== List ==
* one
*# two
{| class="wikitable"
! Name !! Age
|-
| style="x" | Ann || 3
|}
<source lang="py">
a["b"]
</source>
== References ==
{{reflist}}"""
    table = "| Name | Age |\n|---|---|\n| Ann | 3 |"
    assert (
        wikitext(text) == f'Go is a game for two. $x<y$\n\n## List\n\n- one\n  1. two\n\n{table}\n\n```py\na["b"]\n```'
    )


def test_latex_stays_latex_without_what_is_around_its_text():
    page = latex(r"""\usepackage{x}\title{On \emph{Sets}}\begin{document}
\section{Intro} We show $a_i > 0$ and 50\%~\cite{x}. % no
% nor this
\begin{tikzpicture}\draw;\end{tikzpicture}Done.
\begin{thebibliography}{9}\bibitem{x} X\end{thebibliography}\end{document}""")
    assert page.title == "On Sets"
    assert page.content == "\\section{Intro} We show $a_i > 0$ and 50\\%~\\cite{x}. Done."


@pytest.mark.parametrize(
    "data",
    [b"<div>" * 100_000 + b"x", b"<p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">x", b"<table><tr><td>a" * 9000],
)  # fmt: skip
def test_hostile_pages_end_soon(tmp_path: Path, data: bytes):
    (tmp_path / "a.html").write_bytes(data)
    assert len(read_all(tmp_path / "a.html")) == 1


@pytest.mark.parametrize("piece", ["<ref>", "<!--", "{{", "[[a|", "[//", "=", "-{", "<math>"])
def test_hostile_wikitext_ends_soon(piece: str):
    wikitext(piece * 100_000)


@pytest.mark.parametrize("piece", [r"\begin{comment}", r"\title{", r"\title[", "{"])
def test_hostile_latex_ends_soon(piece: str):
    latex(piece * 100_000)


def test_a_packed_page_does_not_grow_without_bound(tmp_path: Path):
    bomb = warc_record(
        "response", http(zlib.compress(b"<p>" + b" " * 3_000_000), "text/html", "Content-Encoding: deflate")
    )
    (tmp_path / "a.warc").write_bytes(bomb)
    [item] = read_all(tmp_path / "a.warc", ReaderLimits(max_record_bytes=1_000_000))
    assert item in damaged_of([item])
    assert damaged_of([item])[0].reason == "too_large"
