"""Train a tokenizer on the corpus, and load it (or any Hugging Face tokenizer) for encoding.

    train_tokenizer(texts, vocab_size=4096, folder=work / "tokenizer", inputs=fingerprint_of_inputs)
    tokenizer = load_tokenizer(work / "tokenizer")
    ids = [tokenizer.begin_id, *tokenizer.encode_text("你好"), tokenizer.end_id]

One rule runs through the package: text never produces a control id. Text goes through `encode_text`, control tokens
through `encode_control`, and the saved folder keeps the rule in `AutoTokenizer` and in plain `tokenizers` as well.
Importing this package imports neither `tokenizers` nor `transformers`; that happens at the first call.
"""

from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.load import Tokenizer, load_tokenizer
from zero2all.tokenizer.specials import CONTROL_TOKENS, SpecialsConfig
from zero2all.tokenizer.train import train_tokenizer

__all__ = ["CONTROL_TOKENS", "SpecialsConfig", "Tokenizer", "TokenizerConfig", "load_tokenizer", "train_tokenizer"]
