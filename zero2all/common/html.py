"""One HTML page that needs nothing else: no network, no font of its own, no script but one of ours.

Such pages hold text of a corpus, so everything is escaped, and a content security policy forbids other scripts as well.
"""

import base64
import hashlib
from collections.abc import Iterable
from html import escape

from zero2all.common.language import language

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, style: str, body: Iterable[str], script: str = "") -> str:
    """The page. `title` is escaped here; `style`, `script` and the sections of `body` are taken as they are."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY
    return (
        f'<!doctype html>\n<html lang="{language()}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + f"\n</main>\n{f'<script>{script}</script>' if script else ''}</body>\n</html>\n"
    )
