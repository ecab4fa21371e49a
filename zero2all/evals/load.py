"""Loads a trained run: model, tokenizer and step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.config.training import model_at
from zero2all.evals.inputs import require_checkpoint
from zero2all.model.z2all import Z2all
from zero2all.ops.registry import resolve
from zero2all.parallel.device import pick_device
from zero2all.parallel.layout import init_weights, model_parts
from zero2all.tokenizer.load import Tokenizer, load_tokenizer
from zero2all.train.checkpoints.find import newest_checkpoint
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.setup import load_run_config, with_vocabulary


@dataclass(frozen=True)
class LoadedModel:
    """What evaluation and generation need."""

    name: str
    step: int
    model: Z2all
    tokenizer: Tokenizer
    config: RunConfig
    stored_dtype: str = "float32"
    """What an imported model was stored in; training keeps float32."""
    tokens: int = 0
    """Tokens it was trained on."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.embedding.weight.device

    def weights(self) -> dict[str, Tensor]:
        """The weights by logical name, as a checkpoint has them; live."""
        return {name: part.values for name, part in model_parts(self.model).items()}


def load_run(workspace: Workspace, name: str, step: int | None = None) -> LoadedModel:
    """The newest checkpoint of a run, or the one of `step`."""
    run = workspace.run(name)
    config = load_run_config(run)
    checkpoint = newest_checkpoint(run) if step is None else None  # it has more to say about a run that lost them
    if checkpoint is None:
        require_checkpoint(run, step)
        assert step is not None, "a run with checkpoints has a newest one"
        checkpoint = verified_checkpoint(checkpoint_folder(run, step))
    config = dataclasses.replace(config, model=model_at(checkpoint.step, config.model, config.stages))
    model = _bare_model(config)
    checkpoint.load_into({f"model/{name}": part for name, part in model_parts(model).items()})
    stored_dtype = checkpoint.manifest.get("imported_dtype", "float32")
    tokenizer = load_tokenizer(workspace.tokenizer)
    if tokenizer.fingerprint != checkpoint.manifest.get("tokenizer"):
        raise BadInputError(
            f"The run {name} was trained with another tokenizer than the one in {workspace.tokenizer}: the same ids "
            f"mean other text there. Put that tokenizer back, or pack with this one and train a new run."
        )
    tokens = int(checkpoint.record.get("tokens", 0))
    return LoadedModel(name, checkpoint.step, model.eval(), tokenizer, config, stored_dtype, tokens)


def untrained(workspace: Workspace, config: RunConfig) -> LoadedModel:
    """The model of `config` as training would start it: the baseline of every comparison."""
    tokenizer = load_tokenizer(workspace.tokenizer)
    config = with_vocabulary(config, tokenizer.vocab_size)
    model = _bare_model(config)
    init_weights(model, config.train.seed)
    return LoadedModel(f"{config.train.name} (untrained)", 0, model.eval(), tokenizer, config)


def _bare_model(config: RunConfig) -> Z2all:
    device = pick_device(config.parallel.device)
    ops = dataclasses.replace(config.ops, strict=False, compile="none")  # what trained need not be what judges
    return Z2all(config.model, resolve(ops, device.type)).to(device)
