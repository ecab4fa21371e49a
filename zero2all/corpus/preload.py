"""Importing this module loads the native code of cleaning and dedup, compiling it where numba's cache lacks it.

The fork server of the local engine imports it once, so that worker processes share the code.
"""

from __future__ import annotations

from zero2all.corpus.channels import channels_of
from zero2all.corpus.clean.cleaner import Cleaner
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.signatures import describe

Cleaner(channel="en").clean(["warm"])
describe(["warm"], "en", DedupConfig())
channels_of([""], ["warm"])
