"""Readers: any mix of raw files -> rows, or damaged items with their place and reason.

    plan         file -> units that workers can read alone   plan_units
    read         unit -> rows and damaged items, in order    read_unit
    sniff        format by content; the name settles only what the content leaves open
    encodings    UTF-8, UTF-16, GB18030, found and converted
    streams      gzip, bzip2, xz, zst; bombs refused; zst frames
    archives     tar, zip, 7z, rar, one inside another
    lines, arrays, tables, texts    the formats
    pages, markup, documents, dumps    marked-up documents → Markdown; many in one stream
    chats        messages joined to conversations
    kernels      the two compiled scans

Memory does not grow with the file, and an item above `max_record_bytes` goes to quarantine unread. A reader never
raises for bad content: it yields `Damaged` and goes on; where it cannot go on, `ends_file` is set. The units of a file
give exactly what reading it in one unit gives, and so does going on at the cursor of any item. pyarrow, numba,
zstandard, libarchive, lxml and pypdf are imported only when a file needs them.
"""

# ruff: noqa: F401 - what other rooms import from here

from zero2all.corpus.readers.items import (
    EXCERPT_CHARS,
    NOT_READ,
    Cursor,
    Damaged,
    Format,
    ItemOrigin,
    RawRow,
    ReaderLimits,
    TextBy,
    Unit,
)
from zero2all.corpus.readers.read import read_unit
from zero2all.corpus.readers.sniff import sniff
from zero2all.corpus.readers.units import plan_units
