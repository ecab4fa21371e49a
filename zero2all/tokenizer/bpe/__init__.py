"""Our BPE trainer: exact merges from any amount of text, in a memory that does not explode on Chinese.

    learned = learn_bpe(parts, pieces_wanted=32_000, scratch=folder, max_memory=4 << 30, threads=2)
    learned.pieces, learned.merges

Chinese has no spaces, so a pre-token is a clause, and clauses hardly ever repeat: a trainer that keeps every distinct
pre-token keeps the whole text. Ours cuts pre-tokens wherever two neighbouring characters stand side by side fewer than
T times in all the text. Such a pair of characters can be inside no piece that is learned with T occurrences or more,
so the merges are, one by one, those of training without any cut (`learn` says when, and checks it).

    categories  which code points are letters, numbers and white space, as the encoders see it
    scan        the pre-token pattern as native code
    blocks      documents to arrays of code points; repairs and forbidden strings are counted here
    bigrams     pass 1: how often each pair of neighbouring characters occurs
    pieces      pass 2: the distinct pieces between cuts and their counts, in bounded memory
    first_pass  both of what pass 1 counts, and the guess at T
    counting    runs a pass over all parts with threads, and resumes it
    words       the pieces as one flat array of symbols
    merging     the merge loop
    learn       all of it in order
    reference   slow and plain versions to test against

Importing this package does not import numba; the first call does.
"""

from zero2all.tokenizer.bpe.learn import learn_bpe
from zero2all.tokenizer.bpe.learned import LearnedBpe

__all__ = ["LearnedBpe", "learn_bpe"]
