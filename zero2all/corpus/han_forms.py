"""Which traditional Han characters, and variants, are written as which simplified one.

`han_forms.txt` has a word for each simplified character: the character, then its traditional forms. The pairs are those
on which two converters agree, OpenCC (Apache 2.0) and zhconv, and a few variants of old books.
"""

from __future__ import annotations

from zero2all.common.files import package_text


def simplified_of() -> dict[int, int]:
    """Code point of a traditional character -> that of its simplified form."""
    words = package_text(__package__, "han_forms.txt").split()
    return {ord(form): ord(word[0]) for word in words for form in word[1:]}
