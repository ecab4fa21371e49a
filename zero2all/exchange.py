"""Export to, and import from, Hugging Face folders, and folders of adapters.

Export writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load. Import turns such a folder into a run at
step 0 with the folder's tokenizer, so that `z2a train` continues it like any other run; or with an extended tokenizer,
for which the model's embeddings grow. A run with adapters (LoRA) is exported merged, or its adapters alone, for peft.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, read_json_object, staged_folder, write_atomic, write_json
from zero2all.common.manifest import fingerprint, write_manifest
from zero2all.common.peers import Peers
from zero2all.common.workspace import FOLDER_NAME_WORDS, STAMP_NAME, Workspace, is_folder_name, open_workspace
from zero2all.config import RunConfig, config_from_values, config_values
from zero2all.config.finetune import FinetuneConfig
from zero2all.infer.load import LoadedModel
from zero2all.model.config import ModelConfig
from zero2all.model.hf import read_hf_folder, write_hf_folder
from zero2all.model.lora import read_adapter_folder, write_adapter_folder
from zero2all.tokenizer.chat import own_template
from zero2all.tokenizer.extend import check_extends, spelled_by
from zero2all.tokenizer.load import Tokenizer, load_tokenizer
from zero2all.tokenizer.save import (
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    TOKENIZER_FILES,
    TOKENIZER_NAME,
    compatible_files,
    opening_processor,
)
from zero2all.train.checkpoints.find import newest_checkpoint, open_at
from zero2all.train.checkpoints.manifest import Step, chosen_step
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import write_checkpoint
from zero2all.train.saved_config import FINETUNE_FILE, load_run_config, save_run_config

ENDS_NAME = "generation_config.json"
TokenizerLayout = Literal["safe", "compatible"]


def export_run(
    loaded: LoadedModel,
    tokenizer_folder: Path,
    target: Path,
    dtype: str | None = None,
    tokenizer_layout: TokenizerLayout = "safe",
) -> None:
    """Write weights, config and tokenizer of a run to `target`, which appears only when it is whole.

    `dtype` None takes what the weights were imported in, else float32. The `compatible` tokenizer layout declares
    control tokens as ordinary added tokens and brings a chat template, for tools that render chats as text; text can
    then spell control tokens.
    """
    target = require_new(target)
    with staged_folder(target) as partial:
        # Not through transformers, whose saving would make control tokens reachable from text.
        _copy_files(tokenizer_folder, partial)
        _open_documents(partial, loaded.tokenizer)
        if tokenizer_layout == "compatible":
            _make_compatible(partial, loaded.tokenizer)
        elif _is_own_template(partial / CHAT_TEMPLATE_NAME, loaded.tokenizer):
            (partial / CHAT_TEMPLATE_NAME).unlink()  # tools that render text would encode its marks as characters
        write_hf_folder(
            partial,
            loaded.model.config,
            loaded.weights(),
            dtype or loaded.stored_dtype,
            _token_ids(loaded.tokenizer),
        )


def export_adapter(run: Path, target: Path, step: Step = None) -> int:
    """Write the adapters of a run to `target`, for peft; returns the step."""
    config, target, step = load_run_config(run), require_new(target), chosen_step(run, step)
    lora = config.finetune.lora
    if lora.rank is None:
        raise UsageError(f"The run {run.name} has no adapters: all its weights are trained. Leave --adapter out.")
    checkpoint = newest_checkpoint(run) if step is None else open_at(run, step, Peers())
    if checkpoint is None:
        raise BadInputError(f"The run {run.name} has no checkpoint yet. Let `z2a train` reach its first one.")
    known = read_json_object(run / FINETUNE_FILE) if (run / FINETUNE_FILE).is_file() else {}
    base = str(known.get("base") or checkpoint.manifest.get("imported_from") or "")
    with staged_folder(target) as partial:
        write_adapter_folder(partial, config.model, lora, checkpoint.tensors("model/"), base)
    return checkpoint.step


def require_new(target: Path) -> Path:
    """The absolute path of a folder to write; an error when something is there already."""
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(
            f"{target} already exists and is not an empty folder. Choose another path, or delete it first."
        )
    return target


@dataclass(frozen=True)
class Imported:
    """The new run, and what was done to its embeddings."""

    run: Path
    resized: Resized | None


@dataclass(frozen=True)
class Resized:
    """How the embeddings grew."""

    rows_before: int
    rows: int
    new_ids: int
    """Ids that the model had no row of its own for; each begins as the mean of the old pieces that spelled it."""
    mean_pieces: float
    """Old pieces behind a new row, on average."""


def import_folder(
    folder: Path,
    workspace: Workspace,
    name: str,
    tokenizer_folder: Path | None = None,
    resize_embeddings: bool = False,
    adapter: Path | None = None,
    origin: Path | None = None,
) -> Imported:
    """Make the run `name` at step 0 from a Hugging Face folder; its folder appears when it is whole.

    A run folder with a config but without its checkpoint would be trained from random weights. The workspace may be
    new: it is made once the folder has turned out to be a model, so that a bad one leaves nothing behind. With
    `tokenizer_folder`, the run uses that tokenizer, which must extend the model's own without moving an id;
    `resize_embeddings` gives the model rows for all its ids, padded to a multiple of 64. Weights that are NaN or
    infinite are refused. `adapter`: a folder of peft's, whose adapters the run has and goes on training. `origin`: what
    the folder was made from.
    """
    if not is_folder_name(name):
        raise UsageError(f"train.name: got {name!r}, expected {FOLDER_NAME_WORDS}. Choose another --name.")
    if (workspace.root / STAMP_NAME).is_file():
        open_workspace(workspace.root)  # refuses that of another version
    run = workspace.run(name)
    if run.exists():
        raise UsageError(f"The run {name} already exists. Choose another --name, or delete {run}.")
    model, tensors, dtype = read_hf_folder(folder)
    _check_ends(folder, model.vocab_ids)
    old = tokenizer = load_tokenizer(folder)
    resized = None
    if tokenizer_folder is not None:
        tokenizer = load_tokenizer(tokenizer_folder)
        check_extends(old, tokenizer, tokenizer_folder)
    if resize_embeddings:
        model, tensors, resized = _resize(model, tensors, old, tokenizer)
    config = _config_for(model, name)
    if adapter is not None:
        lora, adapters = read_adapter_folder(adapter, model, tensors)
        tensors, config = tensors | adapters, dataclasses.replace(config, finetune=FinetuneConfig(lora=lora))
    _adopt_tokenizer(tokenizer_folder or folder, tokenizer, old.end_ids, workspace, model)
    open_workspace(workspace.root, create=True)
    details: dict[str, Any] = {
        "data": None,
        "tokenizer": tokenizer.fingerprint,
        "environment": {},
        "ops": {},
        "imported_from": str(origin or folder),
        "imported_dtype": dtype,
    }
    with staged_folder(run) as partial:
        save_run_config(config, partial)
        weights = {f"model/{key}": value for key, value in tensors.items()}
        snapshot = Snapshot.of_tensors(weights, {"step": 0, "tokens": 0})
        write_checkpoint(partial, 0, snapshot, {"inputs": fingerprint(config_values(config)), **details})
    return Imported(run, resized)


def _check_ends(folder: Path, vocab_ids: int) -> None:
    """Refuse ends of text that the model has no row for: it would never stop."""
    for path in (folder / "config.json", folder / ENDS_NAME):
        ends = read_json_object(path).get("eos_token_id") if path.is_file() else None
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and (type(end) is not int or not 0 <= end < vocab_ids):
                raise BadInputError(
                    f"{path} names {str(end)[:40]!r} as eos_token_id; expected a whole number from 0 to "
                    f"{vocab_ids - 1}, the ids of the model. Correct it, or download the folder again."
                )


def _resize(
    model: ModelConfig, tensors: dict[str, Tensor], old: Tokenizer, new: Tokenizer
) -> tuple[ModelConfig, dict[str, Tensor], Resized]:
    """Rows for every id of `new`: those of `old` unchanged, each new one the mean of the old pieces that spelled it."""
    old_ids = model.vocab_ids
    grown_model = dataclasses.replace(model, vocab_size=max(old_ids, new.vocab_size))
    spelled = {number: spelled_by(old, new.token_bytes(number)) for number in range(old.vocab_size, new.vocab_size)}
    changed = dict(tensors)
    for name in ("embedding.weight", "head.weight"):
        if name not in tensors:
            continue  # tied embeddings have no head of their own
        grown = tensors[name].new_zeros(grown_model.vocab_rows, tensors[name].shape[1])
        grown[:old_ids] = tensors[name][:old_ids]
        grown[old_ids : grown_model.vocab_ids] = tensors[name][: old.vocab_size].mean(dim=0)
        for number, pieces in spelled.items():
            grown[number] = tensors[name][pieces].mean(dim=0)
        changed[name] = grown
    mean = sum(map(len, spelled.values())) / max(1, len(spelled))
    facts = Resized(old_ids, grown_model.vocab_ids, len(spelled), mean)
    return grown_model, changed, facts


def _config_for(model: ModelConfig, name: str) -> RunConfig:
    """A config with the imported shape and defaults for everything else."""
    base = RunConfig()
    seq_len = min(base.data.seq_len, model.max_seq_len)
    samples = 8
    tokens_per_step = max(1, base.train.tokens_per_step // (seq_len * samples)) * seq_len * samples
    config = dataclasses.replace(
        base,
        model=model,
        data=dataclasses.replace(base.data, seq_len=seq_len),
        train=dataclasses.replace(base.train, name=name, tokens_per_step=tokens_per_step),
    )
    return config_from_values(config_values(config), f"of the new run {name}")


def _adopt_tokenizer(
    folder: Path, theirs: Tokenizer, ends: tuple[int, ...], workspace: Workspace, model: ModelConfig
) -> None:
    """Make the folder's tokenizer that of the workspace, unless it already is; `ends` are the model's."""
    if theirs.vocab_size > model.vocab_ids:
        raise BadInputError(
            f"The tokenizer in {folder} has {theirs.vocab_size} ids, but its model has only {model.vocab_ids} "
            "rows. If the tokenizer is meant to be larger, add --resize-embeddings."
        )
    if workspace.tokenizer.exists():
        if load_tokenizer(workspace.tokenizer).fingerprint != theirs.fingerprint:
            raise UsageError(
                f"The workspace {workspace.root} already has another tokenizer. Import into a workspace of its own "
                f"(--work), and pack the data there with the imported tokenizer."
            )
        return
    with staged_folder(workspace.tokenizer) as partial:
        _copy_files(folder, partial)
        if len(ends) > 1:  # a chat model may stop at several ids, and the tokenizer's own files name only one
            write_json(partial / ENDS_NAME, {"eos_token_id": list(ends)})
        content = {"tokenizer_kind": "imported", "vocab_size": theirs.vocab_size, "fingerprint": theirs.fingerprint}
        write_manifest(partial, "tokenizer", theirs.fingerprint, content)


def _copy_files(folder: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, target / name)


def _open_documents(folder: Path, tokenizer: Tokenizer) -> None:
    """Have `AutoTokenizer` begin a text as training and `z2a generate` do. An imported tokenizer stays as it came."""
    config = read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    tokenizer_json = read_json(folder / TOKENIZER_NAME)
    if "control_roles" in config and tokenizer_json.get("post_processor") is None:
        number = tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id
        name = next(name for name, each in tokenizer.control.items() if each == number)
        write_json(folder / TOKENIZER_NAME, {**tokenizer_json, "post_processor": opening_processor(name, number)})


def _make_compatible(folder: Path, tokenizer: Tokenizer) -> None:
    config = read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    tokenizer_json, config = compatible_files(read_json(folder / TOKENIZER_NAME), config)
    write_json(folder / TOKENIZER_NAME, tokenizer_json)
    write_json(folder / CONFIG_NAME, config)
    template = own_template(tokenizer)
    if template is not None and not (folder / CHAT_TEMPLATE_NAME).exists() and "chat_template" not in config:
        write_atomic(folder / CHAT_TEMPLATE_NAME, template.encode())


def _is_own_template(path: Path, tokenizer: Tokenizer) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == own_template(tokenizer)


def _token_ids(tokenizer: Tokenizer) -> dict[str, int | list[int] | None]:
    return {
        "bos_token_id": tokenizer.begin_id,
        "eos_token_id": list(tokenizer.end_ids) if len(tokenizer.end_ids) > 1 else tokenizer.end_id,
        "pad_token_id": tokenizer.pad_id,
    }
