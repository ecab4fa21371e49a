"""Duplicates: exact, near, and lines that stand everywhere.

    config      what can be set
    shingles    what two texts are compared by, defined in plain Python
    signatures  a batch of texts -> digests, lengths, minhash signatures (numba)
    index       the files of a unit folder that hold them
    cluster     all unit folders -> which records are copies, and of which (disk, bounded memory, tasks)
    lines       boilerplate lines: counting, choosing, removing

Near duplicates and the split. With `near="all"` no two kept records were found similar, so whatever is held out has no
near duplicate in train. With `near="held_out"` similar records stay, but not in train when their like is held out.
With `near="off"` only equal texts are kept from standing on both sides.

numba is imported by the first call that needs it.
"""

from zero2all.corpus.dedup.cluster import (
    EXACT_DUPLICATE,
    KEEP,
    NEAR_DUPLICATE,
    Cluster,
    DedupResult,
    Member,
    Place,
    find_duplicates,
)
from zero2all.corpus.dedup.config import VALUES, DedupConfig
from zero2all.corpus.dedup.index import IndexWriter, digest_bytes, read_index, read_signatures, write_index
from zero2all.corpus.dedup.lines import LineCounter, count_lines, frequent_lines, strip_lines, uses_lines
from zero2all.corpus.dedup.signatures import Described, describe, signatures, text_digest, text_digests

__all__ = [
    "EXACT_DUPLICATE",
    "KEEP",
    "NEAR_DUPLICATE",
    "VALUES",
    "Cluster",
    "DedupConfig",
    "DedupResult",
    "Described",
    "IndexWriter",
    "LineCounter",
    "Member",
    "Place",
    "count_lines",
    "describe",
    "digest_bytes",
    "find_duplicates",
    "frequent_lines",
    "read_index",
    "read_signatures",
    "signatures",
    "strip_lines",
    "text_digest",
    "text_digests",
    "uses_lines",
    "write_index",
]
