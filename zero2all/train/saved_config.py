"""The config that a run keeps: resolved against its data, saved beside its checkpoints, read again by every tool."""

import dataclasses
import os
from pathlib import Path

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import sweep_partials, write_atomic
from zero2all.config import RunConfig, config_from_values, config_yaml, read_config_values, with_new_names

CONFIG_FILE = "config.yaml"
FINETUNE_FILE = "finetune.json"
"""Of a run that was fine-tuned on conversations: what it was begun with."""
SECTIONS_OF_EVERY_RUN = ("data", "model", "train", "validation")
"""Sections that a saved config must have: a truncated file must not be filled up with defaults."""


def with_vocabulary(config: RunConfig, tokens_in_data: int) -> RunConfig:
    """The config with model.vocab_size filled in, or an error when the data has ids the model lacks."""
    size = config.model.vocab_size
    if size is None:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=tokens_in_data))
    if size < tokens_in_data:
        raise UsageError(
            f"model.vocab_size is {size}, but the data was packed with {tokens_in_data} token ids. Set it to at least "
            f"that, or to null for the tokenizer's size, or train a smaller tokenizer and pack again."
        )
    return config


def save_run_config(config: RunConfig, run: Path) -> None:
    """Save the resolved config with the run."""
    sweep_partials(run / CONFIG_FILE)
    write_atomic(run / CONFIG_FILE, config_yaml(config).encode())


def load_run_config(run: Path) -> RunConfig:
    """The resolved config a run was started with."""
    path = run / CONFIG_FILE
    if not os.path.lexists(path):
        known = sorted(folder.name for folder in run.parent.glob("*") if (folder / CONFIG_FILE).is_file())
        if known:
            raise BadInputError(
                f"There is no run in {run} (no {CONFIG_FILE}). Runs in this workspace: {', '.join(known)}."
            )
        raise BadInputError(f"There is no run in {run} (no {CONFIG_FILE}). Train one with `z2a train`.")
    try:
        values = with_new_names(read_config_values(path))
        missing = [name for name in SECTIONS_OF_EVERY_RUN if name not in values]
        if missing:
            raise UsageError(f"These sections are missing: {', '.join(missing)}.")
        return config_from_values(values, str(path))
    except UsageError as error:
        raise BadInputError(
            f"{path}, the saved config of a run, was changed or is damaged. {error}\n"
            f"Restore the file, or write it again with `z2a train CONFIG --print-config` and the settings of the run."
        ) from error
