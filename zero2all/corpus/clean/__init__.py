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

from zero2all.corpus.clean.cleaner import Cleaned, Cleaner, warm_up
from zero2all.corpus.clean.config import RULES, CleanConfig, RuleInfo, build_config, config_problems, default_config
from zero2all.corpus.clean.repair import repair

__all__ = [
    "RULES",
    "CleanConfig",
    "Cleaned",
    "Cleaner",
    "RuleInfo",
    "build_config",
    "config_problems",
    "default_config",
    "repair",
    "warm_up",
]
