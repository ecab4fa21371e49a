"""Many documents in one stream: WARC files of crawlers, and the XML dumps of MediaWiki.

Both are read record by record, by position; what is no page is skipped and counted. A record that is damaged costs what
lies before the next one that begins.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from html import unescape

from zero2all.corpus.readers.documents import document_row
from zero2all.corpus.readers.items import Format, ItemOrigin, Items, OnSkip, RawRow, ReaderLimits, too_large
from zero2all.corpus.readers.lines import broken_item, text_row
from zero2all.corpus.readers.markup import wikitext
from zero2all.corpus.readers.streams import CHUNK_BYTES, Stream

_LENGTH = re.compile(rb"^content-length:\s*(\d{1,15})\s*$", re.IGNORECASE | re.MULTILINE)
_CHUNK = re.compile(rb"\s*([0-9a-fA-F]{1,8})[^\r\n]*\r\n")
MAX_HEAD_BYTES = 1 << 16


def _field(head: str, name: str) -> str:
    found = re.search(rf"^{name}:(.*)$", head, re.IGNORECASE | re.MULTILINE)
    return found[1].strip() if found else ""


def read_warc(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int, on_skip: OnSkip) -> Items:
    """The pages of a WARC from position `at`, where the stream stands, and the texts of a WET file."""
    size = had = 0
    while (had == size) and (look := stream.peek(MAX_HEAD_BYTES)):
        start = at
        if blank := len(look) - len(look.lstrip(b"\r\n")):
            at += stream.skip(blank)
            continue
        head, found, _ = look.partition(b"\r\n\r\n")
        length = _LENGTH.search(head.replace(b"\r\n", b"\n"))
        if head.startswith(b"WARC/") and not found and len(look) < MAX_HEAD_BYTES:
            size += 1  # it ends inside a head
        elif not (head.startswith(b"WARC/") and length):
            at += stream.skip(1) + _skip_to(stream, b"WARC/")
            yield origin.damaged(start, at, "damaged_warc", "no head of a WARC record", at - start, look[:1000])
        else:
            size = int(length[1])
            at += stream.skip(len(head) + 4)
            body = stream.peek(min(size, limits.max_record_bytes + 1))
            had = stream.skip(size)
            at += had
            if had == size and size > limits.max_record_bytes:
                yield too_large(origin, start, at - start, limits.max_record_bytes, body[:1000])
            elif had == size:
                fields = head.decode("utf-8", "replace").replace("\r\n", "\n")
                yield from _warc_record(fields, body, origin, start, at, limits, on_skip)
    if stream.broken is not None:
        yield broken_item(stream, origin, at, b"")
    elif had != size:
        yield origin.damaged(at, at, "cut_off", "the file ends inside a record", 0).to_the_end()


def _warc_record(
    head: str, body: bytes, origin: ItemOrigin, at: int, end: int, limits: ReaderLimits, on_skip: OnSkip
) -> Items:
    kind, url = _field(head, "WARC-Type"), _field(head, "WARC-Target-URI").strip("<>")
    if kind == "response":
        yield from _response(body, url, origin, at, end, limits, on_skip)
    elif kind != "conversion":
        on_skip(f"warc {kind[:20] or 'record'}", url)
    elif (row := text_row(body, origin, at, end, whole=False)) is not None:
        if isinstance(row, RawRow):
            row.fields["others"]["url"] = url
        yield row


def _response(
    body: bytes, url: str, origin: ItemOrigin, at: int, end: int, limits: ReaderLimits, on_skip: OnSkip
) -> Items:
    raw, _, payload = body.partition(b"\r\n\r\n")
    http = raw.decode("latin-1")
    kind, _, more = _field(http, "Content-Type").partition(";")
    status = http.split(" ", 2)[1:2]
    if kind.strip().lower() not in ("text/html", "application/xhtml+xml") or status != ["200"]:
        on_skip("warc response, no page" if status == ["200"] else "warc response, not 200", url)
        return
    if "chunked" in _field(http, "Transfer-Encoding").lower():
        payload = b"".join(_chunks(payload))
    coding = _field(http, "Content-Encoding").lower()
    if coding in ("gzip", "x-gzip", "deflate") and payload[:1] != b"<":
        try:
            unpacked = zlib.decompressobj(wbits=47)
            payload = unpacked.decompress(payload, limits.max_record_bytes + 1)
        except zlib.error as error:
            yield origin.damaged(at, end, "damaged_compression", f"{url}: {error}", end - at)
            return
        if len(payload) > limits.max_record_bytes:
            yield too_large(origin, at, end - at, limits.max_record_bytes, payload[:1000])
            return
    elif coding not in ("", "identity") and payload[:1] != b"<":
        yield origin.damaged(at, end, "unknown_compression", f"{url}: Content-Encoding {coding}", end - at)
        return
    charset = re.search(r"charset=[\"']?([\w:.-]+)", more, re.IGNORECASE)
    yield document_row(payload, origin, at, end, charset[1] if charset else "", url=url)


def _chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while (found := _CHUNK.match(data, at)) and (size := int(found[1], 16)):
        yield data[found.end() : found.end() + size]
        at = found.end() + size
    if at == 0:  # the crawler has joined them already
        yield data


def _skip_to(stream: Stream, mark: bytes) -> int:
    """Skip to the next `mark`; how many bytes that were."""
    passed = 0
    while data := stream.peek(CHUNK_BYTES):
        found = data.find(mark)
        if found >= 0:
            return passed + stream.skip(found)
        passed += stream.skip(max(len(data) - len(mark) + 1, 1))
    return passed


def read_mediawiki(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int, on_skip: OnSkip) -> Items:
    """The articles of a dump from position `at`, where the stream stands: of each page its last revision."""
    while True:
        at += _skip_to(stream, b"<page>")
        start = at
        page = b""
        size = 0
        while (data := stream.peek(CHUNK_BYTES)) and (found := data.find(b"</page>")) < 0:
            step = stream.skip(max(len(data) - 6, 1))
            page += data[:step] if size <= limits.max_record_bytes else b""
            size += step
        if not data:
            break
        page += data[: found + 7]
        size += stream.skip(found + 7)
        at += size
        if size > limits.max_record_bytes:
            yield too_large(origin, start, size, limits.max_record_bytes, page[:1000])
            continue
        yield from _wiki_page(page, origin, start, at, on_skip)
    if stream.broken is not None:
        yield broken_item(stream, origin, start, page)
    elif page:
        yield origin.damaged(start, start, "cut_off", "the dump ends inside a page", len(page), page).to_the_end()


def _wiki_page(page: bytes, origin: ItemOrigin, start: int, end: int, on_skip: OnSkip) -> Items:
    title, space, text = (_last_element(page, name) for name in (b"title", b"ns", b"text"))
    if space.strip() not in ("", "0") or b"<redirect" in page or not text:
        kind = "without text" if not text else "redirect" if b"<redirect" in page else "of another namespace"
        on_skip(f"wiki page: {kind}", title)
        return
    fields = {"content": wikitext(text), "title": title, "others": {"file": origin.name, "offset": start}}
    yield RawRow(fields, origin, start, end, is_document=True)


def _last_element(page: bytes, name: bytes) -> str:
    """What the last element of a name holds: a page may have many revisions. Found without a pattern, in one pass."""
    start = page.find(b">", max(page.rfind(b"<" + name + mark) for mark in (b">", b" "))) + 1
    end = page.find(b"</" + name + b">", start)
    return unescape(page[start:end].decode("utf-8", "replace")) if end >= 0 and b"<" + name in page else ""


DUMPS = {Format.WARC: read_warc, Format.MEDIAWIKI: read_mediawiki}
