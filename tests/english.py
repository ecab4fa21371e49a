"""English that is left in text for a Chinese reader."""

import html
import re

NOT_PROSE = re.compile(
    r"`[^`]*`|'[^'\n]*'|\"[^\"\n]*\"|“[^”\n]*”"  # quoted: code and values
    r"|P\([^)\n]*\)"  # P(answer | question)
    r"|(?:\S*/)?z2a(?: [a-z-]+)+"  # commands
    r"|\S*[\w\]][_=/.:,+][\w\[{]\S*"  # paths, fields, addresses, lists of names
    r"|(?<!\w)-{1,2}[a-z][\w.-]*"  # flags
)
SENTENCE = re.compile(r"[A-Za-z][a-z']*(?: [a-z']+){2,}")
LITTLE_WORDS = "a an the of is are was were has have not no with and or to from for in on at by it its this that than"
LITTLE = f"(?:{LITTLE_WORDS.replace(' ', '|')})"
FRAGMENT = re.compile(rf"\b(?:{LITTLE} [a-z]{{2,}}|[a-z]{{2,}} {LITTLE})\b")


def english_left(text: str) -> list[str]:
    """Every run of three English words, and every two words one of which is a little one, outside of code and names."""
    prose = NOT_PROSE.sub(" · ", text)
    return [*SENTENCE.findall(prose), *FRAGMENT.findall(prose)]


def prose_of_page(page: str) -> str:
    """What a page says, without the texts that it quotes (`<pre>`), its code and its settings."""
    shown = re.sub(r"<(style|script|pre|code|samp)\b.*?</\1>", " · ", page, flags=re.DOTALL)
    attributes = re.findall(r'(?:title|alt|aria-label|placeholder)="([^"]*)"', shown)
    return html.unescape("\n".join([*attributes, re.sub(r"<[^>]+>", "\n", shown)]))
