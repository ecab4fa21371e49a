"""Marked-up documents -> their text as Markdown: headings, lists, tables, code and maths keep their structure.

One walk over the tree of lxml turns a document into blocks and remembers which of them lie in which element. Of an HTML
page only the main text is wanted. Navigation, footers, cookie banners and the like are left out on the way, by tag,
role, class and id. Of what is left, blocks of running text count for the elements around them, links against; the
element with the largest sum is the main one. The walk needs no Python frame per level, so depth costs nothing, and
nothing is fetched. It costs about 4 ms a page of news, half of it for the parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SKIPPED = _words(
    "script style nav aside footer button label figcaption select option textarea input iframe svg template object "
    "embed canvas noscript audio video map dialog menu head math"
)
BLOCKS = _words(
    "html body div section article main p header table tbody thead tfoot tr ul ol dl li dt dd blockquote pre figure "
    "center address details summary hr fieldset caption form h1 h2 h3 h4 h5 h6"
)
CONTAINERS = _words("body div section article main td center table")
CODE = _words("code kbd samp tt")
HEADINGS = {f"h{level}": level for level in range(1, 7)}
ROLES = _words("navigation banner contentinfo complementary dialog search alert menu menubar toolbar")
NEVER_WORDS = _words(
    "comment comments disqus related breadcrumb breadcrumbs cookie cookies consent gdpr newsletter newsletters share "
    "sharing shares sharebar ad ads byline taboola outbrain recommend recommended recommendations pagination caption "
    "captions credit credits advert adverts advertisement sponsor sponsored rail dateline headerlink editsection "
    "katex-html mathjax_preview navbox noprint dfp cta"
)
"""Words in a class or id of what is never main text."""
BAD_WORDS = _words(
    "nav navbar navigation menu menus footer sidebar sidebars crumbs subscribe subscription signup promo promos "
    "promotion social socials banner popup modal overlay pager tags taglist widget widgets toolbar masthead copyright "
    "hidden trending popular readmore seealso gutter linenos lineno toc feedback rating login register reflist "
    "timestamp notification teaser teasers"
)
GOOD_WORDS = _words("content article body main page wrapper container entry post story text layout embed media")
"""Beside one of these, a bad word says where something stands rather than what it is."""
SPARING_WORDS = _words("has with without no open")
_MAIN_NAME = re.compile(
    r"(article|story|post|entry|page|main|blog|news)[-_]*(body|content|text|main|copy)|markdown-body|mw-parser-output"
)
MAIN_FACTOR, NAMED_FACTOR = 1.2, 1.4
"""Of the worth of `article` and `main`, and of an element with a name like `post-content`."""
BLOCK_COST, MOST_COUNTED = 40, 2000
"""Bytes that a block must have to count for the elements around it; bytes that count at most."""
INNER_SHARE = 0.85
"""An element inside the best one that has this share of its worth is the main one: the rest is around the text."""
LINKED_SHARE = 0.6
"""A block with more of its characters in links is a list of links."""
LEAST_CHARS = 250
"""A page with less main text is read again without regard to names."""
MOST_INDENTED = 12
"""Levels of lists and quotes that are shown."""
LONG_TAG_BYTES = 1 << 14
_LONG_TAG = re.compile(rb"<([a-zA-Z][\w:-]{0,99})([^<>]{%d,})" % (LONG_TAG_BYTES - 101))
MOST_ATTRIBUTES = 500
"""Of a long tag: libxml2 takes time with the square of their number."""
_ADDRESS = re.compile(r"https?://\S+")
_HIDDEN = re.compile(r"display:\s*none|visibility:\s*hidden")
_NAME_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_CODE_LANGUAGE = re.compile(r"(?:language-|lang-|highlight-source-|brush: ?)([\w+#]+)")
_SENTENCE_END = re.compile(r"[.!?。！？…:：;；][\"'”’」』)）]*$")
_TITLE_PARTS = re.compile(r"\s+[|–—·»:-]{1,2}\s+|\s*[|｜_]\s*")
LANG = "{http://www.w3.org/XML/1998/namespace}lang"


class Block(NamedTuple):
    """A paragraph, heading, list item, row of a table or listing."""

    text: str
    kind: str = "p"
    """`h1` to `h6`, `pre`, `th` and `td` (the first row of a table and the others), `li`, `p`."""
    first: str = ""
    """What Markdown puts before its first line …"""
    rest: str = ""
    """… and before the others."""
    links: float = 0
    """Share of its characters that are links."""

    @property
    def bytes(self) -> int:
        """Its size; a Han character weighs as much as three letters."""
        return len(self.text) if self.text.isascii() else len(self.text.encode(errors="replace"))

    @property
    def is_teaser(self) -> bool:
        """A link with the beginning of what it leads to."""
        return self.links > 0.02 and self.text.endswith(("…", "..."))

    @property
    def weight(self) -> float:
        """What it adds to the elements around it."""
        if self.links > 0.5 or self.is_teaser:
            return -100 if self.kind in HEADINGS else -min(self.bytes, 100)
        counted = min(self.bytes * (1 - self.links), MOST_COUNTED)
        return 0 if self.kind in HEADINGS else max(counted - BLOCK_COST, 0)


class Page(NamedTuple):
    """What a document says."""

    title: str
    content: str
    language: str = ""
    """As the document states it."""


class MarkupError(ValueError):
    """A document that cannot be read as what it is, and the reason for the report."""

    def __init__(self, detail: str, reason: str = "damaged_markup") -> None:
        super().__init__(detail)
        self.reason = reason


def parse(data: bytes, parser: Any) -> Any:
    """The root of a document, None when there is nothing in it. Raises MarkupError when the parser gave up inside."""
    from lxml import etree

    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError:
        return None
    last = parser.error_log.last_error
    if last is not None and last.type == etree.ErrorTypes.ERR_RESOURCE_LIMIT:
        raise MarkupError(last.message)
    return root


def read_page(data: bytes) -> Page:
    """The main text of an HTML page in UTF-8."""
    from lxml import etree

    if any(len(piece) > LONG_TAG_BYTES and _LONG_TAG.search(piece) for piece in data.split(b">")):
        data = _LONG_TAG.sub(
            lambda found: found[0] if found[2].count(b"=") < MOST_ATTRIBUTES else b"<" + found[1], data
        )
    root = parse(data, etree.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True))
    if root is None:
        return Page("", "")
    for by_names in (True, False):
        walk = Walk(root, by_names=by_names)
        first, end = walk.main()
        title = _title(walk, first, end)
        content = markdown(_kept(walk.blocks[first:end], title))
        if len(content) >= LEAST_CHARS:
            break
    return Page(title, content, root.get("lang") or root.get(LANG) or "")


class Walk:
    """The blocks of a document, and which of them lie in which element."""

    def __init__(self, root: Any, by_names: bool = False, tag_of: Callable[[Any], str] | None = None) -> None:
        """`by_names`: without what its class, id or role says is not main text. `tag_of`: what an element of
        other XML is in HTML; its `title` is a heading by depth."""
        self.blocks: list[Block] = []
        self.title = ""
        self._elements: list[tuple[int, int, float]] = []
        """First block, end, and factor of every element that could be the main one."""
        self._by_names, self._tag_of = by_names, tag_of
        self._parts: list[str] = []
        self._link_chars = self._quotes = self._depth = 0
        self._lists: list[int | None] = []
        """Of every list around this place, the number of its last item; None: bullets."""
        self._tables: list[bool] = []
        """Of every table around this place, whether it holds data."""
        self._marker = self._heading = ""
        self._pre: str | None = None
        """Inside a listing: its language, as far as it is known."""
        self._cells: list[str] | None = None
        """Inside a row of data."""
        self._walk(root)

    def _walk(self, root: Any) -> None:
        from lxml import etree

        parts, tag_of = self._parts, self._tag_of
        starts: list[int] = []
        links: list[bool] = []
        is_skipped = False
        walker = etree.iterwalk(root, events=("start", "end"))
        for event, element in walker:
            tag = element.tag if tag_of is None else tag_of(element)
            is_start = event == "start"
            if is_start and (tag in SKIPPED or (self._by_names and element.attrib and _is_boilerplate(tag, element))):
                self._skip(tag, element)
                walker.skip_subtree()
                is_skipped = True
                continue
            if is_skipped:  # only its end comes
                is_skipped = False
            elif tag in BLOCKS:
                (self._begin if is_start else self._end)(tag, element)
                if tag in CONTAINERS:
                    if is_start:
                        starts.append(len(self.blocks))
                    else:
                        self._close(starts.pop(), tag, element)
            elif tag == "a":
                if is_start:
                    links.append(not (element.get("href") or "#").startswith("#"))
                else:
                    links.pop()
            elif tag == "br":
                parts.append("\n" if is_start else "")
            elif tag in CODE:
                self._mark_code(element, is_start)
            elif tag == "title":
                (self._begin if is_start else self._end)(f"h{min(self._depth + 1, 6)}", element)
            elif tag in ("td", "th"):
                self._cell(is_start)
            text = element.text if is_start else element.tail
            if text and (parts or self._pre is not None or not text.isspace()):
                parts.append(text)
                if links and links[-1]:
                    self._link_chars += len(text)
        self._flush()

    def _skip(self, tag: str, element: Any) -> None:
        """What remains of an element that is left out: the title, and the source of a formula."""
        if tag == "head":
            self.title = " ".join((element.findtext(".//title") or "").split())
        kind = element.get("type") or ""
        if tag == "math":
            found = [each.text for each in element.iter("{*}annotation") if "tex" in (each.get("encoding") or "")]
            tex = (found[0] if found else element.get("alttext")) or " ".join("".join(element.itertext()).split())
        else:
            tex = element.text or "" if "math/tex" in kind else ""
        if tex.strip():
            sign = "$$" if "display" in kind or element.get("display") == "block" else "$"
            self._parts.append(f"{sign}{tex.strip()}{sign}")

    def _mark_code(self, element: Any, is_start: bool) -> None:
        if self._pre is None:
            self._parts.append("`")
        elif is_start and not self._pre:
            self._pre = _code_language(element)

    def _begin(self, tag: str, element: Any) -> None:
        if self._cells is not None:
            self._parts.append(" ")
            return
        if self._pre is not None:  # each line of a listing may be an element
            self._parts.append("" if not self._parts or self._parts[-1].endswith("\n") else "\n")
            return
        self._flush()
        if tag in HEADINGS:
            self._heading = tag
        elif tag == "li":
            number = self._lists[-1] if self._lists else None
            if number is not None:
                self._lists[-1] = number + 1
            self._marker = "- " if number is None else f"{number + 1}. "
        elif tag in ("ul", "ol"):
            self._lists.append(None if tag == "ul" else 0)
        elif tag == "pre":
            self._pre = _code_language(element)
        elif tag == "table":
            self._tables.append(self._tag_of is not None or _is_data(element))
        elif tag == "tr" and self._tables and self._tables[-1]:
            self._cells = []
        self._quotes += tag == "blockquote"
        self._depth += tag == "section"

    def _end(self, tag: str, _: Any) -> None:
        if self._cells is not None:
            if tag == "tr":
                cells, self._cells = self._cells, None
                follows = bool(self.blocks) and self.blocks[-1].kind in ("th", "td")
                if any(cells):
                    self._add("| " + " | ".join(cells) + " |", "td" if follows else "th")
            return
        if self._pre is not None and tag != "pre":
            return
        self._flush()
        if tag in HEADINGS:
            self._heading = ""
        elif tag == "li":
            self._marker = ""
        elif tag in ("ul", "ol"):
            self._lists.pop()
        elif tag == "pre":
            self._pre = None
        elif tag == "table":
            self._tables.pop()
        self._quotes -= tag == "blockquote"
        self._depth -= tag == "section"

    def _cell(self, is_start: bool) -> None:
        if self._cells is None:
            self._flush()
        elif not is_start:
            self._cells.append(" ".join("".join(self._parts).split()).replace("|", "\\|"))
            self._parts.clear()

    def _close(self, start: int, tag: str, element: Any) -> None:
        if len(self.blocks) > start and self._tag_of is None:
            factor = MAIN_FACTOR if tag in ("article", "main") else 1.0
            if tag != "body" and element.attrib:
                names = f"{element.get('class')} {element.get('id')} {element.get('itemprop')}"
                factor = NAMED_FACTOR if _is_main_name(names) else factor
            self._elements.append((start, len(self.blocks), factor))

    def _flush(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        text = text.strip("\n").rstrip() if self._pre is not None else " ".join(text.split())
        if text and text != "``":
            is_item = self._lists or self._marker
            self._add(text, self._heading or ("pre" if self._pre is not None else "li" if is_item else "p"))
        else:
            self._link_chars = 0

    def _add(self, text: str, kind: str) -> None:
        quotes = "> " * min(self._quotes, MOST_INDENTED)
        first = "  " * min(max(len(self._lists) - bool(self._marker), 0), MOST_INDENTED) + self._marker
        if kind == "pre":
            text = f"```{self._pre}\n{text}\n```"
        links = self._link_chars / len(text)
        self.blocks.append(Block(text, kind, quotes + first, quotes + " " * len(first), links))
        self._marker, self._link_chars = "", 0

    def main(self) -> tuple[int, int]:
        """First block and end of the main text."""
        sums = [0.0, *accumulate(block.weight for block in self.blocks)]
        worth = {element: (sums[element[1]] - sums[element[0]]) * element[2] for element in self._elements}
        best = max(worth, key=lambda each: worth[each], default=(0, len(self.blocks), 0.0))
        enough = INNER_SHARE * worth.get(best, 0)
        inner = [each for each in worth if best[0] <= each[0] and each[1] <= best[1] and worth[each] >= enough > 0]
        first, end, _ = min(inner, key=lambda each: each[1] - each[0], default=best)
        return first, end


def _code_language(element: Any) -> str:
    found = _CODE_LANGUAGE.search(element.get("class") or "")
    return found[1] if found else element.get("data-lang") or element.get("language") or ""


def _is_data(table: Any) -> bool:
    """Whether a table holds data, and is not there for the layout of a page."""
    if next(table.iterdescendants("table", "pre", "h1", "h2", "h3", "form"), None) is not None:
        return False
    if next((row for row in table.iter("tr") if len(row) > 1), None) is None:
        return False
    return next(table.iter("th"), None) is not None or next(table.iter("p", "div", "ul", "ol"), None) is None


def _is_boilerplate(tag: str, element: Any) -> bool:
    if tag in ("html", "body", "article", "main"):
        return False
    get = element.get
    if get("role") in ROLES or get("aria-hidden") == "true" or get("hidden") is not None:
        return True
    style = get("style")
    if style and tag != "span" and _HIDDEN.search(style):  # a hidden span holds the source of a formula
        return True
    return _is_bad_name(f"{get('class') or ''} {get('id') or ''}")


@lru_cache(maxsize=1 << 14)
def _is_bad_name(names: str) -> bool:
    for name in names[:1000].split():
        words = {name.lower(), *(word.lower() for word in _NAME_WORDS.findall(name))}
        if not words & SPARING_WORDS and (words & NEVER_WORDS or (words & BAD_WORDS and not words & GOOD_WORDS)):
            return True
    return False


@lru_cache(maxsize=1 << 14)
def _is_main_name(names: str) -> bool:
    return _MAIN_NAME.search(names[:1000].lower()) is not None


def _title(walk: Walk, first: int, end: int) -> str:
    """The first heading of the main text, or one before it that the title repeats; else the title without the site."""
    for place, block in enumerate(walk.blocks[:end]):
        if block.kind == "h1" and (place >= first or block.text in walk.title):
            return block.text
    return max(_TITLE_PARTS.split(walk.title), key=len)


def _kept(blocks: list[Block], title: str) -> Iterable[Block]:
    """The blocks without lists of links, repetitions, the title, and short lines above the first paragraph."""
    seen = {title}
    begun = False
    for block in blocks:
        if block.links > LINKED_SHARE or block.is_teaser or block.text in seen or _ADDRESS.fullmatch(block.text):
            continue
        if block.bytes > 80:
            seen.add(block.text)
        if not begun and block.kind == "p" and block.bytes < 60 and not _SENTENCE_END.search(block.text):
            continue
        begun = begun or block.kind not in HEADINGS
        yield block


def markdown(blocks: Iterable[Block]) -> str:
    """Blocks as one text. A heading without anything below it is left out."""
    kept: list[Block] = []
    for block in [*blocks, Block("", "h1")]:
        while block.kind in HEADINGS and kept and kept[-1].kind in HEADINGS and block.kind <= kept[-1].kind:
            kept.pop()
        kept.append(block)
    out: list[str] = []
    last = ""
    for text, kind, first, rest, _ in kept[:-1]:
        if out:
            out.append("\n" if kind == last == "li" or (kind == "td" and last in ("th", "td")) else "\n\n")
        mark = "#" * HEADINGS[kind] + " " if kind in HEADINGS else first
        out.append(mark + text.replace("\n", "\n" + rest))
        if kind == "th":
            out.append(f"\n{rest}|" + "---|" * (text.replace("\\|", "").count("|") - 1))
        last = kind
    return "".join(out)
