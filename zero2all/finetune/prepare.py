"""A run that begins with the weights of another one: what every kind of fine-tuning prepares in the same way.

Written are the config and a checkpoint at step 0 with the weights of the base, without moments; `finetune.json` says
what the run was begun with, so that the same command continues it and another one is refused.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.files import read_json_object, staged_folder, write_json
from zero2all.common.manifest import fingerprint
from zero2all.common.schema import Problem, apply_overrides
from zero2all.common.workspace import FOLDER_NAME_WORDS, Workspace, is_folder_name
from zero2all.config import ConfigError, RunConfig, config_from_values, config_values
from zero2all.exchange import import_folder
from zero2all.infer.load import LoadedModel, load_model
from zero2all.model.lora import initial_adapters
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.checkpoints.manifest import Step, read_manifest
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import write_checkpoint
from zero2all.train.saved_config import CONFIG_FILE, FINETUNE_FILE, load_run_config, save_run_config
from zero2all.train.state import DTYPES

FEWEST_STEPS = 40
"""A set so small that it would be read in fewer steps gets smaller steps."""
NO_DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)


@dataclass(frozen=True)
class PreparedRun:
    """A run that `z2a train` can take."""

    run: Path
    config: RunConfig
    report: dict[str, Any]
    """What is said about the data; `inputs` names it."""
    is_new: bool
    """False: it was begun before, and goes on."""


def base_model(base: str, workspace: Workspace, name: str, step: Step) -> LoadedModel:
    """The base of the new run `name`: a run, or a Hugging Face folder, which is imported under its own name first."""
    if not is_folder_name(name):
        raise UsageError(f"train.name: got {name!r}, expected {FOLDER_NAME_WORDS}. Choose another --name.")
    loaded = load_model(_base_run(base, workspace), workspace, step, "cpu", "float32")
    if loaded.config is None or loaded.folder is None:
        raise UsageError(f"{base} is no run. Name a run of the workspace, or a Hugging Face folder.")
    if workspace.run(name).resolve() == loaded.folder.resolve():
        raise UsageError(f"--name {name} is the base run itself. Choose another name.")
    return loaded


def run_length(name: str, base: RunConfig, rows: float, seq_len: int) -> dict[str, dict[str, Any]]:
    """The settings of a run that reads so many rows, in steps no larger than those of its base."""
    samples = max(1, min(base.train.tokens_per_step // seq_len, int(rows / FEWEST_STEPS)))
    steps, micro = max(2, math.ceil(rows / samples)), base.train.micro_batch_samples
    often = max(1, steps // 4)
    return {
        "train": {
            **{"name": name, "steps": steps, "tokens": None, "tokens_per_step": samples * seq_len},
            "micro_batch_samples": min(micro, samples) if isinstance(micro, int) else micro,
        },
        "validation": {"every_steps": often},
        "checkpoint": {"every_steps": often, "keep_every_steps": 0},
    }


def packed_data(folder: Path, mixture: Mapping[str, float], seq_len: int) -> dict[str, Any]:
    """The settings of data that was packed for a run: rows of whole conversations, which do not see each other."""
    return {
        **{"packed": str(folder), "mixture": dict(mixture), "seq_len": seq_len, "max_epochs": None},
        **{"packing": "best_fit", "document_mask": True},
    }


def adamw(base: LoadedModel, lr: float | None, rates: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The settings of AdamW; without `lr`, the rate by the parameters of the base. Muon's rates are no rates of it."""
    assert base.config is not None, "it is a run"
    kept = {} if base.config.optim.kind.startswith("adamw") else config_values(RunConfig())["optim"]
    rate = lr or next(rate for most, rate in rates if base.parameters <= most)
    return {**kept, "lr_max": rate, "weight_decay": 0.0}


def changed_config(
    values: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]
) -> RunConfig:
    """The config of a base run with what a kind of fine-tuning changes, and what a person asked for on top. Adapters
    of the base are merged into its weights."""
    values["finetune"]["lora"] = {}
    for section, fields in changes.items():
        values[section] |= fields
    values["stages"] = []
    problems: list[Problem] = []
    apply_overrides(values, list(overrides), problems)
    if problems:
        raise ConfigError(None, problems)
    return config_from_values(values, f"of the new run {values['train']['name']}")


def begin_run(
    loaded: LoadedModel, config: RunConfig, workspace: Workspace, report: dict[str, Any], replaces: bool = False
) -> PreparedRun:
    """Write the run, or find it begun with the same base, data (`inputs` of the report) and settings. `replaces`: one
    that was begun with others is deleted instead of refused."""
    run = workspace.run(config.train.name)
    assert loaded.folder is not None, "the base is a run"
    files = read_manifest(checkpoint_folder(loaded.folder, loaded.step))["files"]
    record = {
        "base": loaded.name,
        "base_weights": fingerprint([value for name, value in files.items() if name.startswith("model-")]),
        "step": loaded.step,
        "data": report["inputs"],
        "config": fingerprint(config_values(_placed(config, None))),  # a workspace may be moved
    }
    if run.exists():
        if not replaces:
            refuse_changed(run, record)
        if not _changed(run, record):
            return PreparedRun(run, _placed(load_run_config(run), config.data.packed), report, is_new=False)
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
        dtype = DTYPES["float64" if config.train.precision == "float64" else "float32"]
        adapters = initial_adapters(config.model, config.finetune.lora, config.train.seed)
        weights_by_name = {f"model/{name}": tensor.to(dtype) for name, tensor in (loaded.weights() | adapters).items()}
        snapshot = Snapshot.of_tensors(weights_by_name, {"step": 0, "tokens": 0})
        folder = write_checkpoint(partial, 0, snapshot, {"inputs": record["config"], **details})
        write_json(partial / FINETUNE_FILE, {**record, "weights": fingerprint(read_manifest(folder)["files"])})
    return PreparedRun(run, config, report, is_new=True)


def refuse_changed(run: Path, record: Mapping[str, Any]) -> None:
    """UsageError where a run was begun with something else."""
    changed = _changed(run, record)
    if changed:
        raise UsageError(
            f"The run {run.name} already exists, and was begun with other values of: {', '.join(changed)}. Choose "
            f"another --name, or delete {run}."
        )


def _changed(run: Path, record: Mapping[str, Any]) -> list[str]:
    """What differs from what a run was begun with."""
    known = read_json_object(run / FINETUNE_FILE) if (run / FINETUNE_FILE).is_file() else {}
    words = {"base": "base run", "step": "step of the base", "data": "data", "config": "settings"}
    if "base_weights" in known:  # the first versions did not write it
        words["base_weights"] = "weights of the base"
    return [words[name] for name, value in record.items() if name in words and known.get(name) != value]


def _base_run(base: str, workspace: Workspace) -> str:
    folder = Path(base).expanduser()
    if (is_folder_name(base) and workspace.run(base).is_dir()) or (folder / CONFIG_FILE).is_file():
        return base
    if not (folder / "config.json").is_file():
        return base  # and loading it says what is wrong
    name = folder.resolve().name
    if not workspace.run(name).is_dir():
        import_folder(folder, workspace, name)
    return name


def _placed(config: RunConfig, packed: str | None) -> RunConfig:
    """The config with its data in this folder."""
    return replace(config, data=replace(config.data, packed=packed))
