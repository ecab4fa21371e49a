"""Documents that are no plain text -> title and text: pages, XML of books and articles, office files, LaTeX, PDF.

Epub, docx and odt are zip archives: the pages or the one XML file with the text are read as members, within the limits
of archives. XML is parsed without its document type, so it can name no file and its entities cannot grow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html.entities import html5
from typing import Any

from zero2all.corpus.readers.items import Damaged, Format, ItemOrigin, RawRow, first_line_of, wrong_encoding
from zero2all.corpus.readers.lines import MAX_REPLACED_SHARE
from zero2all.corpus.readers.markup import latex
from zero2all.corpus.readers.pages import HEADINGS, LANG, MarkupError, Page, Walk, markdown, parse, read_page

_ELEMENT = re.compile(rb"<[a-zA-Z]")
_DECLARATION = re.compile(rb"\s*<\?xml.*?\?>", re.DOTALL)
_DOCTYPE = re.compile(rb"<!DOCTYPE[^\[>]*(?:\[.*?\]\s*)?>", re.DOTALL)
_ENTITY = re.compile(r"&(?!(?:amp|lt|gt|quot|apos);)([\w.:-]+);")
_META_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]{1,200}?(?:charset|encoding)\s*=\s*["']?\s*([\w:.-]{2,40})""", re.I)
_CHARSETS = {"gb2312": "gb18030", "gbk": "gb18030", "iso-8859-1": "cp1252", "shift_jis": "cp932", "euc-kr": "cp949"}
"""What browsers take these names for."""
_TEXT_CHARSET = re.compile(r"(utf|windows|cp|iso|gb|big5|euc|shift|koi8|latin|us-ascii|ascii|tis|mac)[\w-]*")
"""Python has codecs that are no encodings of a page, and slow ones."""

_TAGS = {
    name: tag
    for tag, names in {
        "section": "section sect1 sect2 sect3 sect4 sect5 sec chapter part preface appendix refsect1 simplesect",
        "title": "title refname", "p": "para simpara formalpara p refpurpose literallayout v subtitle",
        "div": "article book body", "ul": "itemizedlist list simplelist", "ol": "orderedlist", "dt": "term",
        "li": "listitem list-item member", "pre": "programlisting screen synopsis preformat code-block",
        "table": "table informaltable tbl", "tr": "row tr table-row", "td": "entry td tc table-cell th",
        "code": "literal function classname parameter varname filename command constant", "br": "br line-break",
        "blockquote": "blockquote disp-quote cite epigraph",
        "script": "info articleinfo bookinfo indexterm ref-list bibliography journal-meta permissions contrib-group "
        "aff fn fn-group footnote remark binary description instrText del back history pub-date article-id",
    }.items()
    for name in names.split()
}  # fmt: skip
"""XML elements by name -> what they are in HTML; `script` is left out."""


def document_row(
    data: bytes, origin: ItemOrigin, at: int, end: int, charset: str = "", **others: str
) -> RawRow | Damaged:
    """A document of a marked-up format. `charset`: what was said of it where it came from; `others`: of the record."""
    replaced = 0
    try:
        if origin.format is Format.PDF:
            page = _read_pdf(data)
        else:
            text, replaced = _decoded(data, charset, origin.data)
            if replaced > MAX_REPLACED_SHARE * len(text):
                return wrong_encoding(origin, at, end, data, UnicodeDecodeError(origin.data, data, 0, 1, ""))
            page = PARSERS.get(origin.format, PARSERS[Format.HTML])(text)
    except MarkupError as error:
        return origin.damaged(at, end, error.reason, str(error), end - at, data)
    noted = {"file": origin.name, **({"language": page.language} if page.language else {}), **others}
    fields = {"content": page.content, "title": page.title, "others": noted}
    return RawRow(fields, origin, at, end, is_document=True, replaced=replaced)


def _decoded(data: bytes, stated: str, sniffed: str) -> tuple[str, int]:
    """UTF-8 where it is; else as was said over HTTP, in the document, or as it looks; how much could not be decoded."""
    if not sniffed.startswith("utf-16"):
        try:
            return data.decode("utf-8"), 0
        except UnicodeDecodeError:
            pass
    meta = _META_CHARSET.search(data[:4096])
    best = ""
    for name in (stated.lower(), meta[1].decode().lower() if meta else "", sniffed):
        try:
            text = data.decode(_CHARSETS.get(name, name) if _TEXT_CHARSET.fullmatch(name) else sniffed, "replace")
        except LookupError:
            continue
        if not best or text.count("\ufffd") < best.count("\ufffd"):
            best = text
    return best, best.count("\ufffd")


def read_xml(text: str) -> Page:
    """DocBook, JATS, FictionBook, and the text of Word and OpenDocument files."""
    from lxml import etree

    data = _ENTITY.sub(_entity, text).encode(errors="replace")
    begin = _ELEMENT.search(data)
    doctype = data.find(b"<!DOCTYPE", 0, begin.start() if begin else None)
    ends = _DOCTYPE.match(data, doctype) if doctype >= 0 else _DECLARATION.match(data)
    root = parse(
        data[ends.end() :] if ends else data,
        etree.XMLParser(
            encoding="utf-8",
            recover=True,
            resolve_entities=False,
            huge_tree=True,
            remove_comments=True,
            remove_pis=True,
        ),
    )
    if root is None:
        raise MarkupError("no XML element can be read")
    walk = Walk(root, tag_of=_tag_of)
    title = walk.blocks[0].text if walk.blocks and walk.blocks[0].kind in HEADINGS else ""
    blocks = [block for block in walk.blocks if block.text != title]
    return Page(title, markdown(blocks), root.get(LANG) or root.get("lang") or "")


def _entity(found: re.Match[str]) -> str:
    """What an entity stands for; one of the document's own its name, where that is a word (`&true;`)."""
    return html5.get(f"{found[1]};", found[1] if found[1].isalpha() else "")


def _tag_of(element: Any) -> str:
    """The HTML element that an XML element is like."""
    name = element.tag
    if type(name) is not str:
        return "script"
    space, _, name = name.rpartition("}")
    if "wordprocessingml" in space and name == "p":
        return _word_paragraph(element)
    if "opendocument" in space and name == "h":
        return f"h{min(int(element.get(space + '}outline-level') or 1), 6)}"
    return _TAGS.get(name, name)


def _word_paragraph(element: Any) -> str:
    """A paragraph of Word is a heading or a list item by its style; styles of Chinese headings are called 1, 2, 3."""
    settings = element.find("{*}pPr")
    if settings is None:
        return "p"
    style = next((value for one in settings.findall("{*}pStyle") for value in one.values()), "")
    heading = re.fullmatch(r"(?:[Hh]eading|标题|標題)? ?([1-6])", style)
    if heading or style == "Title":
        return f"h{heading[1]}" if heading else "h1"
    return "li" if settings.find("{*}numPr") is not None else "p"


def _read_pdf(data: bytes) -> Page:
    """The text layer of a PDF, without what stands at the edges of its pages, its lines joined to paragraphs."""
    import io

    from pypdf import PdfReader

    try:
        reader = PdfReader(io.BytesIO(data))
        pages = [page.extract_text().splitlines() for page in reader.pages]
        known: Any = reader.metadata or {}
        title = str(known.get("/Title") or "").strip()
    except Exception as error:  # it raises whatever its parts raise
        raise MarkupError(first_line_of(error), "encrypted" if "crypt" in str(error) else "damaged_pdf") from error
    edges: dict[str, int] = {}
    for lines in pages:
        for line in {re.sub(r"\d+", "#", line.strip()) for line in [*lines[:2], *lines[-2:]]}:
            edges[line] = edges.get(line, 0) + 1
    repeated = {line for line, count in edges.items() if count > max(2, len(pages) // 2) or line == "#"}
    lines = [line.strip() for page in pages for line in page if re.sub(r"\d+", "#", line.strip()) not in repeated]
    if not any(lines):
        advice = "the pages are pictures; recognise them first, for example: ocrmypdf IN.pdf OUT.pdf"
        raise MarkupError(advice, "no_text_layer")
    usual = sorted(map(len, lines))[len(lines) * 3 // 4]
    text = ""
    for line in lines:
        joins = text and len(text) - text.rfind("\n") > 0.8 * usual and not re.search(r"[.!?。！？:：]$", text)
        if joins and text.endswith("-") and line[:1].islower():
            text = text[:-1] + line
        else:
            gap = "\n" if not joins else "" if not (text[-1:] + line[:1]).isascii() else " "
            text += gap + line if text else line
    return Page(title, text)


PARSERS: dict[Format, Callable[[str], Page]] = {
    Format.HTML: lambda text: read_page(text.encode(errors="replace")),
    Format.XML: read_xml,
    Format.LATEX: latex,
}
