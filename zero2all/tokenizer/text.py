"""Text that UTF-8 can hold. A Python string may carry lone surrogates (half an emoji, from a broken JSON escape);
`tokenizers` refuses them with a message about types, after hours of packing."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """`text` itself, or, where it has surrogates, a copy with pairs joined and each lone one turned into U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
