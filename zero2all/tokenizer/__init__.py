"""Train a tokenizer on the corpus, and load it (or any Hugging Face tokenizer) for encoding.

    train_tokenizer(texts, vocab_size=4096, folder=work / "tokenizer", inputs=fingerprint_of_inputs)
    tokenizer = load_tokenizer(work / "tokenizer")
    ids = [tokenizer.begin_id, *tokenizer.encode_text("你好"), tokenizer.end_id]

One rule runs through the package: text never produces a control id. Text goes through `encode_text`, control tokens
through `encode_control`, and the saved folder keeps the rule in `AutoTokenizer` and in plain `tokenizers` as well.
Importing this package imports neither `tokenizers` nor `transformers`; that happens at the first call. What loads and
trains is imported when it is first named: every command that reads a config imports this package for its section.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero2all.tokenizer.config import CONTROL_TOKENS, SpecialsConfig, TokenizerConfig

if TYPE_CHECKING:
    from zero2all.tokenizer.load import Tokenizer, load_tokenizer
    from zero2all.tokenizer.train import train_tokenizer

__all__ = ["CONTROL_TOKENS", "SpecialsConfig", "Tokenizer", "TokenizerConfig", "load_tokenizer", "train_tokenizer"]


def __getattr__(name: str) -> Any:
    module = {"Tokenizer": "load", "load_tokenizer": "load", "train_tokenizer": "train"}.get(name)
    if module is None:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{module}"), name)
