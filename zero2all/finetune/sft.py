"""Supervised fine-tuning: a run of its own, from the weights of a base run, on conversations.

There is no trainer here. What is written is what `z2a train` takes: packed conversations (`data`), a config that begins
as the base run's, and a checkpoint at step 0 with its weights. So everything that training has holds: resume, guards,
layouts, the board. Three settings make fine-tuning what it is: the loss counts what the assistant writes; attention
stays within a conversation (`data.document_mask`), so that the loss of packed rows is that of the conversations alone;
and the learning rate is a share of the base run's.
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import MANIFEST_NAME, read_json_object, staged_folder
from zero2all.common.records import SPLITS
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, config_values
from zero2all.finetune import prepare
from zero2all.finetune.data import SOURCE, DataOptions, inputs_of, pack_conversations
from zero2all.finetune.distill import keep_teacher
from zero2all.infer.load import LoadedModel
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.mixture import source_weights
from zero2all.packed.remote import packed_root
from zero2all.packed.shard_format import open_split, packed_sources
from zero2all.packed.writer import write_report
from zero2all.train.checkpoints.manifest import Step

FOLDER = "sft"
"""Below the workspace: packed conversations, by run."""
BASE_SHARE = 1 / 3
"""Of the base run's highest learning rate. Published rates of fine-tuning stand at 0.3 to 0.8 of pretraining's."""
IMPORTED_RATES = ((0.5e9, 3e-4), (2e9, 1e-4), (math.inf, 2e-5))
"""By parameters, for models whose pretraining rate is not known."""
LORA_RATE = 10
"""Times the rate of full fine-tuning: the best rate of adapters is that much higher, at every rank."""
WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class SftOptions:
    """What a person may choose about fine-tuning."""

    name: str
    """Of the new run."""
    data: Sequence[Path]
    epochs: float = 2.0
    """How often the conversations are read."""
    lr: float | None = None
    """Highest learning rate. None: a share of the base run's, or by the size of an imported model."""
    seq_len: int | None = None
    """Tokens of a row; longer conversations are left out. None: that of the base run."""
    replay: float = 0.0
    """Share of the tokens that is text of the base run, so that it is not forgotten."""
    valid_share: float = 0.02
    """Share of the conversations that is held out."""
    step: Step = None
    """Which checkpoint of the base run. None: the newest."""
    lora: int | None = None
    """Rank of the adapters that are trained instead of the weights. None: all weights are trained."""
    teacher: str | None = None
    """Run or Hugging Face folder whose probabilities are learned, too (`distill`)."""
    overrides: Sequence[str] = ()
    """Fields of the config."""
    replace: bool = False
    """Delete a run of this name that was begun with other data or settings, instead of refusing."""


def prepare_sft(base: str, workspace: Workspace, options: SftOptions) -> prepare.PreparedRun:
    """Pack the conversations and write the run, or find it begun with the same data and settings."""
    if not 0 <= options.replay < 1:
        raise UsageError(f"--replay is {options.replay}; expected a share from 0 to below 1.")
    if options.replay and options.teacher:
        raise UsageError("A teacher reads only conversations. Leave out --replay or --teacher.")
    loaded = prepare.base_model(base, workspace, options.name, options.step)
    assert loaded.config is not None, "it is a run"
    seq_len = options.seq_len or loaded.config.data.seq_len
    folder = (workspace.root / FOLDER / options.name).resolve()
    report = packed_for(loaded, workspace, options, folder, DataOptions(seq_len, options.valid_share))
    mixture = {SOURCE: 1.0}
    if options.replay:
        weights = _replayed(loaded.config, workspace, folder, seq_len)
        mixture = {SOURCE: 1 - options.replay, **{name: options.replay * each for name, each in weights.items()}}
    config = _config(loaded, options, folder, mixture, report["rows"]["train"], seq_len)
    if options.teacher and (options.replace or not workspace.run(options.name).exists()):
        keep_teacher(config, loaded, workspace)
    return prepare.begin_run(loaded, config, workspace, report, options.replace)


def packed_for(
    loaded: LoadedModel, workspace: Workspace, options: SftOptions, folder: Path, data: DataOptions
) -> dict[str, Any]:
    """Pack what a run learns; returns the report. Other data than the run of this name was begun with is refused."""
    run = workspace.run(options.name)
    if run.exists() and not options.replace:  # before what it has packed would be replaced
        prepare.refuse_changed(run, {"base": loaded.name, "data": inputs_of(options.data, workspace.tokenizer, data)})
    report = pack_conversations(options.data, workspace.tokenizer, folder, data)
    if not report["rows"].get("train"):
        raise BadInputError("All conversations were held out. Lower --valid-share, or add conversations.")
    return report


def _config(
    loaded: LoadedModel, options: SftOptions, folder: Path, mixture: dict[str, float], rows: int, seq_len: int
) -> RunConfig:
    """The base run's config with what fine-tuning changes, and what a person asked for on top."""
    assert loaded.config is not None, "it is a run"
    values = config_values(loaded.config)
    read = rows * options.epochs / mixture[SOURCE]
    length = prepare.run_length(options.name, loaded.config, read, seq_len)
    is_imported = not loaded.tokens and loaded.config.optim == RunConfig().optim
    if options.lora:  # the rates of Muon are no rates of AdamW
        is_imported |= values["optim"]["kind"] == "muon"
        values["optim"] = {**config_values(RunConfig())["optim"], "clip_grad_norm": values["optim"]["clip_grad_norm"]}
        values["parallel"]["offload"] = "none"
    lr = loaded.config.optim.lr_max * BASE_SHARE
    if is_imported:
        lr = next(rate for most, rate in IMPORTED_RATES if loaded.parameters <= most)
    lr = options.lr or lr * (LORA_RATE if options.lora else 1)
    changes: dict[str, dict[str, Any]] = {
        **length,
        "data": prepare.packed_data(folder, mixture, seq_len),
        "optim": {"lr_max": float(f"{lr:.4g}"), "weight_decay": 0.0},
        "schedule": {
            "kind": "linear",
            "warmup_steps": min(100, max(1, int(WARMUP_SHARE * length["train"]["steps"]))),
            "min_lr_ratio": 0.0,
        },
        "finetune": {"method": "sft", "lora": {"rank": options.lora}},
    }
    if options.teacher:
        changes["model"] = prepare.NO_DROPOUT
        changes["train"]["z_loss"] = 0.0
        changes["finetune"] |= {"method": "distill", "distill": {"teacher": options.teacher}}
    return prepare.changed_config(values, changes, options.overrides)


def _replayed(config: RunConfig, workspace: Workspace, folder: Path, seq_len: int) -> dict[str, float]:
    """Put the packed text of the base run beside the conversations; returns the share of each source."""
    root = packed_root(workspace.packed, config.data)
    splits = [open_split(root, name, "train") for name in packed_sources(root)]
    if any(split.remote is not None for split in splits):
        raise UsageError("--replay needs the text of the base run on this machine; its data.packed is an address.")
    weights = source_weights(splits, config.data.mixture)
    shares = {split.name: weight / sum(weights) for split, weight in zip(splits, weights, strict=True) if weight}
    if SOURCE in shares:
        raise UsageError(
            f"The base run has a source `{SOURCE}`, as the conversations are called. Pack it under another name."
        )
    manifests = []
    for name in shares:
        for split in SPLITS:
            _link(root / name / split, folder / name / split)
            opened = open_split(folder, name, split)
            if opened.tokens:
                build_best_fit(opened, seq_len)
    for name in (SOURCE, *shares):
        manifests += [open_split(folder, name, split).manifest for split in SPLITS]
    write_report(folder, manifests[0]["tokenizer"], manifests)
    return shares


def _link(source: Path, target: Path) -> None:
    """The same files under another name: packed shards are never written again."""
    names = [*read_json_object(source / MANIFEST_NAME)["files"], MANIFEST_NAME]
    if target.is_dir() and (target / MANIFEST_NAME).read_bytes() == (source / MANIFEST_NAME).read_bytes():
        return
    with staged_folder(target) as partial:
        for name in names:
            try:
                os.link(source / name, partial / name)
            except OSError:  # another disk
                shutil.copy(source / name, partial / name)
