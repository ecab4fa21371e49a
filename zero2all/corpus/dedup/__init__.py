"""Duplicates: exact, near, and lines that stand everywhere.

    config      what can be set
    fold        characters that count as the same, and what two texts are compared by
    signatures  a batch of texts -> digests, lengths, minhash signatures (numba)
    index       the files of a unit folder that hold them
    cluster     all unit folders -> which records are duplicates, and of which (disk, bounded memory, tasks)
    lines       boilerplate lines: counting, choosing, removing

Near duplicates and the split. With `near="all"` no two kept records were found similar, so whatever is held out has no
near duplicate in train. With `near="held_out"` similar records stay, but not in train when their like is held out.
With `near="off"` only equal texts are kept from standing on both sides.

numba is imported by the first call that needs it.
"""
