"""One HTML page that needs nothing else: no script, no network, no font of its own.

Such pages hold text of a corpus, so everything is escaped, and a content security policy forbids scripts as well.
"""

from collections.abc import Iterable
from html import escape

from zero2all.common.language import language

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, style: str, body: Iterable[str]) -> str:
    """The page. `title` is escaped here; `style` and the sections of `body` are taken as they are."""
    return (
        f'<!doctype html>\n<html lang="{language()}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )
