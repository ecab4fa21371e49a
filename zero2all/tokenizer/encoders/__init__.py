"""Encoders: the fastest way to exactly the ids that the tokenizer defines.

    encoder = open_encoder(tokenizer, EncoderConfig(), sample=texts_of_the_corpus)
    batch = encoder.encode_batch(texts)          # batch.ids, batch.offsets; batch[i] are the ids of texts[i]
    encoder.choice                               # what was asked, what was taken, why, and what it was checked on

The `tokenizers` library is the reference: what it answers is what a vocabulary means. Every other encoder is compared
with it on a sample of the very text that is to be encoded and on strings made to be difficult, before it may work; one
that differs anywhere is not used. Whatever the encoder, no id that it returns is a control id: that is checked on every
batch, not on the sample.

    config      what a person may choose
    batch       what an encoder returns
    kinds       the encoders: fastokens, numba (ours), gigatoken, tiktoken, tokenizers, and why one cannot run
    tables      a vocabulary as arrays, for ours
    kernels     ours, compiled
    parity      the comparison with the reference
    choose      which encoder, with the reason
"""

from zero2all.tokenizer.encoders.batch import EncodedBatch
from zero2all.tokenizer.encoders.choose import Encoder, EncoderChoice, open_encoder
from zero2all.tokenizer.encoders.config import ENCODER_NAMES, EncoderConfig, EncoderName
from zero2all.tokenizer.encoders.parity import ParityError, check_parity, hard_strings

__all__ = [
    "ENCODER_NAMES",
    "EncodedBatch",
    "Encoder",
    "EncoderChoice",
    "EncoderConfig",
    "EncoderName",
    "ParityError",
    "check_parity",
    "hard_strings",
    "open_encoder",
]
