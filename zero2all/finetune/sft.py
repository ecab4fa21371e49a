"""Supervised fine-tuning: a run of its own, from the weights of a base run, on conversations.

There is no trainer here. What is written is what `z2a train` takes: packed conversations (`data`), a config that begins
as the base run's, and a checkpoint at step 0 with its weights. So everything that training has holds: resume, guards,
layouts, the board. Three settings make fine-tuning what it is: the loss counts what the assistant writes; attention
stays within a conversation (`data.document_mask`), so that the loss of packed rows is that of the conversations alone;
and the learning rate is a share of the base run's.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import MANIFEST_NAME, read_json_object, staged_folder, write_json
from zero2all.common.manifest import fingerprint
from zero2all.common.records import SPLITS
from zero2all.common.schema import Problem, apply_overrides
from zero2all.common.workspace import FOLDER_NAME_WORDS, Workspace, is_folder_name
from zero2all.config import ConfigError, RunConfig, config_from_values, config_values
from zero2all.exchange import import_folder
from zero2all.finetune.data import SOURCE, DataOptions, inputs_of, pack_conversations
from zero2all.infer.load import LoadedModel, load_model
from zero2all.model.lora import initial_adapters
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.mixture import source_weights
from zero2all.packed.remote import packed_root
from zero2all.packed.shard_format import open_split, packed_sources
from zero2all.packed.writer import write_report
from zero2all.train.checkpoints.manifest import Step
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import write_checkpoint
from zero2all.train.saved_config import CONFIG_FILE, FINETUNE_FILE, load_run_config, save_run_config

FOLDER = "sft"
"""Below the workspace: packed conversations, by run."""
BASE_SHARE = 1 / 3
"""Of the base run's highest learning rate. Published rates of fine-tuning stand at 0.3 to 0.8 of pretraining's."""
IMPORTED_RATES = ((0.5e9, 3e-4), (2e9, 1e-4), (math.inf, 2e-5))
"""By parameters, for models whose pretraining rate is not known."""
LORA_RATE = 10
"""Times the rate of full fine-tuning: the best rate of adapters is that much higher, at every rank."""
FEWEST_STEPS = 40
"""A set so small that it would be read in fewer steps gets smaller steps."""
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
    overrides: Sequence[str] = ()
    """Fields of the config."""
    replace: bool = False
    """Delete a run of this name that was begun with other data or settings, instead of refusing."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that `z2a train` can take."""

    run: Path
    config: RunConfig
    report: dict[str, Any]
    """What is said about the conversations."""
    is_new: bool
    """False: it was begun before, and goes on."""


def prepare_sft(base: str, workspace: Workspace, options: SftOptions) -> PreparedRun:
    """Pack the conversations and write the run, or find it begun with the same data and settings."""
    if not is_folder_name(options.name):
        raise UsageError(f"train.name: got {options.name!r}, expected {FOLDER_NAME_WORDS}. Choose another --name.")
    if not 0 <= options.replay < 1:
        raise UsageError(f"--replay is {options.replay}; expected a share from 0 to below 1.")
    loaded = load_model(_base_run(base, workspace), workspace, options.step, "cpu", "float32")
    if loaded.config is None or loaded.folder is None:
        raise UsageError(f"{base} is no run. Name a run of the workspace, or a Hugging Face folder.")
    run = workspace.run(options.name)
    if run.resolve() == loaded.folder.resolve():
        raise UsageError(f"--name {options.name} is the base run itself. Choose another name.")
    seq_len = options.seq_len or loaded.config.data.seq_len
    folder = (workspace.root / FOLDER / options.name).resolve()
    data = DataOptions(seq_len, options.valid_share)
    if run.exists() and not options.replace:  # before its packed conversations would be replaced
        _refuse_changed(run, {"base": loaded.name, "data": inputs_of(options.data, workspace.tokenizer, data)})
    report = pack_conversations(options.data, workspace.tokenizer, folder, data)
    if not report["rows"].get("train"):
        raise BadInputError("All conversations were held out. Lower --valid-share, or add conversations.")
    mixture = {SOURCE: 1.0}
    if options.replay:
        weights = _replayed(loaded.config, workspace, folder, seq_len)
        mixture = {SOURCE: 1 - options.replay, **{name: options.replay * each for name, each in weights.items()}}
    config = _config(loaded, options, folder, mixture, report["rows"]["train"], seq_len)
    record = {
        "base": loaded.name,
        "step": loaded.step,
        "data": report["inputs"],
        "config": fingerprint(config_values(_placed(config, None))),  # a workspace may be moved
    }
    if run.exists():
        if not options.replace:
            _refuse_changed(run, record)
        if not _changed(run, record):
            return PreparedRun(run, _placed(load_run_config(run), folder), report, is_new=False)
        shutil.rmtree(run)
    details: dict[str, Any] = {
        "data": None,
        "tokenizer": loaded.tokenizer.fingerprint,
        "environment": {},
        "ops": {},
        "imported_from": f"{loaded.folder} at step {loaded.step}",
        "imported_dtype": loaded.stored_dtype,
    }
    with staged_folder(run) as partial:
        save_run_config(config, partial)
        write_json(partial / FINETUNE_FILE, record)
        adapters = initial_adapters(config.model, config.finetune.lora, config.train.seed)
        weights_by_name = {f"model/{name}": tensor for name, tensor in (loaded.weights() | adapters).items()}
        snapshot = Snapshot.of_tensors(weights_by_name, {"step": 0, "tokens": 0})
        write_checkpoint(partial, 0, snapshot, {"inputs": record["config"], **details})
    return PreparedRun(run, config, report, is_new=True)


def _base_run(base: str, workspace: Workspace) -> str:
    """The base as a run of the workspace: a Hugging Face folder is imported under its own name first."""
    folder = Path(base).expanduser()
    if (is_folder_name(base) and workspace.run(base).is_dir()) or (folder / CONFIG_FILE).is_file():
        return base
    if not (folder / "config.json").is_file():
        return base  # and loading it says what is wrong
    name = folder.resolve().name
    if not workspace.run(name).is_dir():
        import_folder(folder, workspace, name)
    return name


def _placed(config: RunConfig, folder: Path | None) -> RunConfig:
    """The config with its conversations in this folder."""
    return replace(config, data=replace(config.data, packed=None if folder is None else str(folder)))


def _refuse_changed(run: Path, record: Mapping[str, Any]) -> None:
    changed = _changed(run, record)
    if changed:
        raise UsageError(
            f"The run {run.name} already exists, and {', '.join(changed)} differ from those it was begun with. Choose "
            f"another --name, or delete {run}."
        )


def _changed(run: Path, record: Mapping[str, Any]) -> list[str]:
    """What differs from what a run was begun with, in words."""
    known = read_json_object(run / FINETUNE_FILE) if (run / FINETUNE_FILE).is_file() else {}
    words = {"base": "the base run", "step": "its step", "data": "the conversations", "config": "the settings"}
    return [words[name] for name, value in record.items() if known.get(name) != value]


def _config(
    loaded: LoadedModel, options: SftOptions, folder: Path, mixture: dict[str, float], rows: int, seq_len: int
) -> RunConfig:
    """The base run's config with what fine-tuning changes, and what a person asked for on top."""
    assert loaded.config is not None, "it is a run"
    values = config_values(loaded.config)
    read = rows * options.epochs / mixture[SOURCE]
    samples = max(1, min(loaded.config.train.tokens_per_step // seq_len, int(read / FEWEST_STEPS)))
    steps = max(2, math.ceil(read / samples))
    often = max(1, steps // 4)
    is_imported = not loaded.tokens and loaded.config.optim == RunConfig().optim
    if options.lora:  # the rates of Muon are no rates of AdamW
        is_imported |= values["optim"]["kind"] == "muon"
        values["optim"] = {**config_values(RunConfig())["optim"], "clip_grad_norm": values["optim"]["clip_grad_norm"]}
        values["parallel"]["offload"] = "none"
    lr = _imported_rate(loaded) if is_imported else loaded.config.optim.lr_max * BASE_SHARE
    lr = options.lr or lr * (LORA_RATE if options.lora else 1)
    changes: dict[str, dict[str, Any]] = {
        "data": {
            **{"packed": str(folder), "mixture": mixture, "seq_len": seq_len, "max_epochs": None},
            **{"packing": "best_fit", "document_mask": True},
        },
        "train": {
            **{"name": options.name, "steps": steps, "tokens": None, "tokens_per_step": samples * seq_len},
            "micro_batch_samples": _micro_batch(values["train"]["micro_batch_samples"], samples),
        },
        "optim": {"lr_max": float(f"{lr:.4g}"), "weight_decay": 0.0},
        "finetune": {"lora": {"rank": options.lora}},
        "schedule": {
            "kind": "linear",
            "warmup_steps": min(100, max(1, int(WARMUP_SHARE * steps))),
            "min_lr_ratio": 0.0,
        },
        "validation": {"every_steps": often},
        "checkpoint": {"every_steps": often, "keep_every_steps": 0},
    }
    for section, fields in changes.items():
        values[section] |= fields
    values["stages"] = []
    problems: list[Problem] = []
    apply_overrides(values, list(options.overrides), problems)
    if problems:
        raise ConfigError(None, problems)
    return config_from_values(values, f"of the new run {options.name}")


def _micro_batch(asked: Any, samples: int) -> Any:
    return min(asked, samples) if isinstance(asked, int) else asked


def _imported_rate(loaded: LoadedModel) -> float:
    return next(rate for most, rate in IMPORTED_RATES if loaded.parameters <= most)


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
