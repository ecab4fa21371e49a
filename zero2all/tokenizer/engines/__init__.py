"""Encoding engines: the fastest way to exactly the ids that the tokenizer defines.

    engine = open_engine(tokenizer, EngineConfig(), sample=texts_of_the_corpus)
    batch = engine.encode_batch(texts)          # batch.ids, batch.offsets; batch[i] are the ids of texts[i]
    engine.choice                               # what was asked, what was taken, why, and what it was checked on

The `tokenizers` library is the reference: what it answers is what a vocabulary means. Every other engine is compared
with it on a sample of the very text that is to be encoded and on strings made to be difficult, before it may work; one
that differs anywhere is not used. Whatever the engine, no id that it returns is a control id: that is checked on every
batch, not on the sample.

    config      what a person may choose
    batch       what an engine returns
    kinds       the engines: fastokens, numba (ours), gigatoken, tiktoken, tokenizers, and why one cannot run
    tables      a vocabulary as arrays, for ours
    kernels     ours, compiled
    parity      the comparison with the reference
    choose      which engine, with the reason
"""

from zero2all.tokenizer.engines.batch import EncodedBatch
from zero2all.tokenizer.engines.choose import Engine, EngineChoice, open_engine
from zero2all.tokenizer.engines.config import ENGINE_NAMES, EngineConfig
from zero2all.tokenizer.engines.parity import ParityError, check_parity, hard_strings

__all__ = [
    "ENGINE_NAMES",
    "EncodedBatch",
    "Engine",
    "EngineChoice",
    "EngineConfig",
    "ParityError",
    "check_parity",
    "hard_strings",
    "open_engine",
]
