"""The config of a measurement: that of `z2a train`, without what needs data."""

from __future__ import annotations

import dataclasses

from zero2all.config import RunConfig, load_config


def load_measured_config(source: str, overrides: list[str]) -> tuple[RunConfig, list[str]]:
    """The config, resolved without data, and what was assumed for that.

    Tokens are random: a vocabulary that would come from a tokenizer gets the size the config asks of one, and there are
    no documents to mask.
    """
    config = load_config(source, overrides)
    notes = []
    if config.model.vocab_size is None:
        size = config.tokenizer.vocab_size
        notes.append(f"model.vocab_size is not set: measured with tokenizer.vocab_size, {size}")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))
    if config.data.document_mask:
        notes.append("data.document_mask is left out: random tokens have no documents")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, document_mask=False))
    return config, notes
