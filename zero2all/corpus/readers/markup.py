"""Markup written by hand: wikitext becomes Markdown; LaTeX and Markdown lose what is around their text.

Done by substitutions that look at a short piece each, from the inside out, so that no nesting takes long. What must not
be touched (code, maths) is put aside first. What a template of a wiki would print is not known: they are left out but
for a few that hold text. LaTeX stays LaTeX: models learn to read and write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import unescape

from zero2all.corpus.readers.pages import MOST_INDENTED, Block, Page, markdown

MOST_NESTED = 40
"""Templates and links inside one another that are resolved."""
_ASIDE = re.compile("\ue000(\\d+)\ue001")
_FRONT_MATTER = re.compile(r"\ufeff?(---|\+\+\+)[ \t]*\r?\n(.*?)\r?\n\1[ \t]*(?:\r?\n|$)", re.DOTALL)
_FRONT_TITLE = re.compile(r"""^title\s*[:=]\s*(["']?)(.+?)\1\s*$""", re.MULTILINE)


def without_front_matter(text: str) -> Page:
    """Markdown without the block of settings above it, which names its title."""
    found = _FRONT_MATTER.match(text)
    if not found or not re.search(r"^[\w-]+\s*[:=]", found[2], re.MULTILINE):
        return Page("", text)
    title = _FRONT_TITLE.search(found[2])
    return Page(title[2] if title else "", text[found.end() :].lstrip("\r\n"))


class _Aside:
    """Pieces of a text that are put aside and come back as they were."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def put(self, text: str) -> str:
        self._kept.append(text)
        return f"\ue000{len(self._kept) - 1}\ue001"

    def back(self, text: str) -> str:
        """A piece may have been put aside inside another."""
        while "\ue000" in text:
            text = _ASIDE.sub(lambda found: self._kept[int(found[1])], text)
        return text


def _pairs(text: str, opening: re.Pattern[str], replace: Callable[[re.Match[str], str], str]) -> str:
    """Every stretch from an opening to its closing replaced. A closing that was missed once is not looked for again, so
    that the time does not grow with the square of the text."""
    out: list[str] = []
    missing: set[str] = set()
    at = start = 0
    while found := opening.search(text, at):
        closing = "-->" if found[0] == "<!--" else f"\\end{{{found['env']}}}" if found["env"] else f"</{found['tag']}>"
        end = -1 if closing in missing else text.find(closing, found.end())
        at = found.end()
        if end < 0:
            missing.add(closing)
            continue
        out += (text[start : found.start()], replace(found, text[at:end]))
        at = start = end + len(closing)
    return "".join(out) + text[start:]


def _innermost(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
    """Every match replaced, those inside others first."""
    for _ in range(MOST_NESTED):
        text, count = pattern.subn(replace, text)
        if not count:
            break
    return text


def _prose(text: str, aside: _Aside) -> Iterator[Block]:
    """Paragraphs, and listings that were put aside on lines of their own."""
    for paragraph in re.split(r"\n\s*\n", text):
        if words := aside.back(" ".join(paragraph.split())).strip("\n"):
            yield Block(words)


# ---- wikitext -------------------------------------------------------------------------------------------------

_WIKI_CODE = re.compile(r"<(?P<tag>nowiki|pre|source|syntaxhighlight|code|math|chem)\b(?P<more>[^<>]*)(?<!/)>(?P<env>)")
_WIKI_GONE = re.compile(
    r"<!--(?P<env>)|<(?P<tag>ref|gallery|timeline|imagemap|references|score|templatedata)\b[^<>]*(?<!/)>"
)
_WIKI_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_WIKI_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_WIKI_OUTER = re.compile(r"\[(?:https?:)?//[^\s\[\]]+ ?([^\[\]\n]*)\]")
_WIKI_VARIANT = re.compile(r"-\{(?:[^{}|]*\|)?([^{}]*)\}-")
_WIKI_NAMESPACE = re.compile(
    r":?(file|image|category|media|文件|檔案|档案|图像|圖像|分类|分類|ファイル|カテゴリ|파일|분류|файл|категория|[a-z]{2,3}(-[a-z]+)*):",
    re.IGNORECASE,
)
_TEXT_TEMPLATES = {"lang": 2, "tsl": 3}
_TEXT_TEMPLATES |= dict.fromkeys(("le", "link-en", "nowrap", "small", "nobold", "mvar", "abbr"), 1)
"""Templates that print one of their arguments, and which."""


def wikitext(text: str) -> str:
    """An article of a MediaWiki as Markdown."""
    aside = _Aside()
    text = _pairs(_pairs(text, _WIKI_GONE, lambda *_: ""), _WIKI_CODE, lambda *found: aside.put(_wiki_code(*found)))
    text = _innermost(_WIKI_TEMPLATE, _wiki_template, text)
    text = _innermost(_WIKI_LINK, _wiki_link, text)
    text = _WIKI_VARIANT.sub(_wiki_variant, _WIKI_OUTER.sub(r"\1", text))
    text = re.sub(r"</?[a-zA-Z][^<>]*>|'{2,5}|__[A-Z]+__", "", re.sub(r"<br\s*/?>", "\n", text, flags=re.IGNORECASE))
    return markdown(_wiki_blocks(unescape(text), aside))


def _wiki_code(found: re.Match[str], inner: str) -> str:
    tag, attributes, inner = found["tag"], found["more"], unescape(inner)
    if tag in ("math", "chem"):
        return f"${inner.strip()}$"
    if tag == "nowiki":
        return inner
    if "\n" not in inner:
        return f"`{inner}`"
    language = re.search(r"lang\w*\s*=\s*[\"']?([\w+#-]+)", attributes)
    return f"\n\n```{language[1] if language else ''}\n{inner.strip(chr(10))}\n```\n\n"


def _wiki_template(found: re.Match[str]) -> str:
    parts = found[1].split("|")
    place = _TEXT_TEMPLATES.get(parts[0].strip().lower())
    return parts[place].strip() if place is not None and place < len(parts) else ""


def _wiki_link(found: re.Match[str]) -> str:
    target, _, label = found[1].rpartition("|")
    return "" if _WIKI_NAMESPACE.match(target or label) else label


def _wiki_variant(found: re.Match[str]) -> str:
    """What a conversion between scripts shows in simplified Chinese; a rule without such a form shows itself."""
    forms = dict(part.split(":", 1) for part in found[1].split(";") if ":" in part)
    return next((forms[name].strip() for name in ("zh-hans", "zh-cn") if name in forms), found[1] if not forms else "")


def _wiki_blocks(text: str, aside: _Aside) -> Iterator[Block]:
    lines: list[str] = []
    cells: list[str] | None = None  # of a table's row
    kind = "th"
    for line in [*text.split("\n"), ""]:
        mark = line.lstrip()
        words = mark.strip()
        level = min(len(words) - len(words.lstrip("=")), len(words) - len(words.rstrip("=")), 6)
        heading = words[level : len(words) - level].strip() if level else ""
        is_item = cells is None and re.match(r"[*#:;]+", mark)
        if heading or is_item or mark.startswith("{|") or not mark:
            yield from _prose("\n".join(lines), aside)
            lines = []
        if cells is not None and mark.startswith(("|-", "|}")):
            if any(cells):
                yield Block(aside.back("| " + " | ".join(cells) + " |"), kind)
                kind = "td"
            cells = None if mark.startswith("|}") else []
        elif mark.startswith("{|"):
            cells, kind = [], "th"
        elif cells is not None and mark.startswith(("|", "!")):
            if not mark.startswith("|+"):
                cells += [cell.rpartition("|")[2].strip() for cell in re.split(r"\|\||!!", mark[1:])]
        elif cells is not None:
            if cells and mark:
                cells[-1] += " " + mark
        elif heading:
            yield Block(aside.back(heading), f"h{level}")
        elif is_item:
            marks, words = is_item[0], aside.back(mark[is_item.end() :].strip())
            sign = {"*": "- ", "#": "1. "}.get(marks[-1], "")
            if words:
                yield Block(words, "li", "  " * min(len(marks) - 1, MOST_INDENTED) + sign)
        else:
            lines.append(line)


# ---- LaTeX ----------------------------------------------------------------------------------------------------

_TEX_DROPPED = re.compile(r"\\begin\{(?P<env>thebibliography|tikzpicture|comment)\}(?P<tag>)")
_TEX_TITLE = re.compile(r"\\title(?:\[[^\[\]]*\])?\{((?:[^{}]|\{[^{}]*\})*)\}")
_TEX_COMMAND = re.compile(r"\\[a-zA-Z@]+\*?|[{}]")


def latex(text: str) -> Page:
    """The body of a LaTeX source as it stands, without comments, pictures and bibliography."""
    text = re.sub(r"(?<!\\)%.*\n?", "", text)
    title = _TEX_TITLE.search(text)
    head, begin, body = text.partition(r"\begin{document}")
    text = _pairs((body if begin else head).partition(r"\end{document}")[0], _TEX_DROPPED, lambda *_: "")
    words = _TEX_COMMAND.sub("", title[1]).replace("~", " ") if title else ""
    return Page(" ".join(words.split()), re.sub(r"\n{3,}", "\n\n", text).strip())
