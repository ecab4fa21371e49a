"""Models that leave for, or come from, the Hugging Face world.

Export writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load. Import turns such a folder into a run at
step 0 with the folder's tokenizer, so that `z2a train` continues it like any other run.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import staged_folder
from zero2all.common.manifest import fingerprint, write_manifest
from zero2all.common.workspace import STAMP_NAME, Workspace, open_workspace
from zero2all.config import RunConfig, config_from_values, config_values
from zero2all.evals.load import LoadedModel
from zero2all.model.config import ModelConfig
from zero2all.model.hf import read_hf_folder, write_hf_folder
from zero2all.tokenizer.load import Tokenizer, load_tokenizer
from zero2all.train.checkpoint import write_checkpoint
from zero2all.train.setup import save_run_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export_run(loaded: LoadedModel, tokenizer_folder: Path, target: Path, dtype: str | None = None) -> None:
    """Write weights, config and tokenizer of a run to `target`, which appears only when it is whole.

    `dtype` None takes what the weights were imported in, else float32.
    """
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} exists and is no empty folder. Choose another one, or delete it first.")
    with staged_folder(target) as partial:
        # The files as they are: re-saving through transformers would make control tokens reachable from text.
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copy(tokenizer_folder / name, partial / name)
        write_hf_folder(
            partial,
            loaded.config.model,
            dict(loaded.model.state_dict()),
            dtype or loaded.stored_dtype,
            _token_ids(loaded.tokenizer),
        )


def import_folder(folder: Path, workspace: Workspace, name: str) -> Path:
    """Make the run `name` at step 0 from a Hugging Face folder; returns the run folder, which appears when it is whole.

    A run folder with a config but without its checkpoint would be trained from random weights. The workspace may be
    new: it is made once the folder has turned out to be a model, so that a bad one leaves nothing behind.
    """
    if (workspace.root / STAMP_NAME).is_file():
        open_workspace(workspace.root)  # refuses that of another version
    run = workspace.run(name)
    if run.exists():
        raise UsageError(f"The run {name} exists already. Choose another --name, or delete {run}.")
    model, tensors, dtype = read_hf_folder(folder)
    config = _config_for(model, name)
    tokenizer = _adopt_tokenizer(folder, workspace, model)
    open_workspace(workspace.root, create=True)
    details: dict[str, Any] = {
        "data": None,
        "tokenizer": tokenizer.fingerprint,
        "environment": {},
        "ops": {},
        "imported_from": str(folder),
        "imported_dtype": dtype,
    }
    counters = {"step": 0, "tokens": 0, "skips_in_a_row": 0}
    with staged_folder(run) as partial:
        save_run_config(config, partial)
        write_checkpoint(partial, 0, tensors, {}, counters, fingerprint(config_values(config)), details)
    return run


def _config_for(model: ModelConfig, name: str) -> RunConfig:
    """A config with the imported shape; everything else is left at its default for the person to set."""
    base = RunConfig()
    seq_len = min(base.data.seq_len, model.max_seq_len)
    samples = base.train.micro_batch_samples
    tokens_per_step = max(1, base.train.tokens_per_step // (seq_len * samples)) * seq_len * samples
    config = dataclasses.replace(
        base,
        model=model,
        data=dataclasses.replace(base.data, seq_len=seq_len),
        train=dataclasses.replace(base.train, name=name, tokens_per_step=tokens_per_step),
    )
    return config_from_values(config_values(config), f"of the new run {name}")


def _adopt_tokenizer(folder: Path, workspace: Workspace, model: ModelConfig) -> Tokenizer:
    """Make the folder's tokenizer that of the workspace, unless it already is."""
    theirs = load_tokenizer(folder)
    if theirs.vocab_size > model.vocab_rows:
        raise BadInputError(
            f"The tokenizer in {folder} has {theirs.vocab_size} ids, its model only {model.vocab_rows} rows: the "
            f"folder does not fit together."
        )
    if workspace.tokenizer.exists():
        if load_tokenizer(workspace.tokenizer).fingerprint != theirs.fingerprint:
            raise UsageError(
                f"The workspace {workspace.root} already has another tokenizer. Import into a workspace of its own "
                f"(--work), and pack the data there with the imported tokenizer."
            )
        return theirs
    with staged_folder(workspace.tokenizer) as partial:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copy(folder / name, partial / name)
        content = {"tokenizer_kind": "imported", "vocab_size": theirs.vocab_size, "fingerprint": theirs.fingerprint}
        write_manifest(partial, "tokenizer", theirs.fingerprint, content)
    return theirs


def _token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.begin_id,
        "eos_token_id": tokenizer.end_id,
        "pad_token_id": tokenizer.pad_id,
    }
