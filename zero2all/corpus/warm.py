"""Importing this module loads the native code of cleaning and dedup, compiling it where numba's cache lacks it.

The fork server of the local engine imports it once, so that worker processes share the code instead of each loading
its own.
"""

from __future__ import annotations

from zero2all.corpus.clean.cleaner import warm_up
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.signatures import describe
from zero2all.corpus.scripts import scripts_of

warm_up()
describe(["warm"], "en", DedupConfig())
scripts_of(["warm"])
