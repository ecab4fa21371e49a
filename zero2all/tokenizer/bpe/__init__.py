"""Our BPE trainer: exact merges from any amount of text, in bounded memory, also for Chinese.

    learned = learn_bpe(parts, 32_000, BpeResources(scratch=folder, max_memory=4 << 30, threads=2))
    learned.pieces, learned.merges

Chinese has no spaces, so a pretoken is a clause, and clauses hardly ever repeat: a trainer that keeps every distinct
pretoken keeps the whole text. Ours cuts pretokens between two characters that are neighbours fewer than T times in all
the text. No piece with T occurrences or more can contain such a pair, so the merges are exactly those of training
without any cut (`learn` says when, and checks it).

    scan        which code points are letters, numbers and white space; the pretoken pattern as native code
    bigrams     pass 1: how often each pair of neighbouring characters occurs
    fragments   pass 2: the distinct fragments between cuts and their counts, in bounded memory
    counting    documents to arrays of code points; runs a pass over all parts with threads, and resumes it
    words       the fragments as one flat array of symbols
    merging     the merge loop
    learn       all of it in order, with the first guess at T and the memory each stage may take
"""
