"""Encoders: the fastest way to exactly the ids that the tokenizer defines.

    encoder = open_encoder(tokenizer, EncoderConfig(), sample=texts_of_the_corpus)
    batch = encoder.encode_batch(texts)          # batch.ids, batch.offsets; batch[i] are the ids of texts[i]
    encoder.choice                               # what was asked, what was taken, why, and what it was checked on

The `tokenizers` library is the reference: its ids define what a vocabulary means. Every other encoder is first compared
with it on a sample of the text that is to be encoded and on difficult strings; one that differs anywhere is not used.
No encoder may return a control id: that is checked on every batch.

    kinds       the encoders (fastokens, numba, tokenizers), their options, and what they return
    tables      a vocabulary as arrays, for our own encoder (numba)
    kernels     our own encoder, compiled
    choose      which encoder, with the reason, and the comparison with the reference
"""

from zero2all.tokenizer.encoders.choose import Encoder, open_encoder
from zero2all.tokenizer.encoders.kinds import ENCODER_NAMES, EncodedBatch, EncoderConfig, EncoderName

__all__ = ["ENCODER_NAMES", "EncodedBatch", "Encoder", "EncoderConfig", "EncoderName", "open_encoder"]
