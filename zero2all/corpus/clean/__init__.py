"""Cleaning by character and script: repair, edits, drop rules, masks.

    config   every rule with its switch and thresholds; defaults for zh, en and code
    tables   one byte per code point: class and flags
    han      frequent pairs of Han characters, and the file of them
    kernels  the native pass that counts everything (numba)
    rules    counts -> measures -> which rule drops a text
    spam     terms of gambling
    repair   characters: controls, private use, mojibake, line ends
    code     licence headers, generated files, Python that does not parse
    mask     secrets and personal data
    cleaner  all of it for a batch of texts

numba is imported by the first text that needs it.
"""
