"""The model that a verb of `z2a perf` is asked about: a preset, a YAML file, a run's folder, or a published model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.config import RunConfig, find_config, load_config, read_config_values
from zero2all.estimate.parameters import KNOWN_MODELS, Counted
from zero2all.model.config import ModelConfig

STEP_SEQUENCES = 256
"""Sequences of a step of a published model, of whose run nothing is known."""


def load_model_config(source: str, overrides: list[str]) -> tuple[RunConfig, list[str]]:
    """The config and what was assumed."""
    known = None if Path(source).exists() else KNOWN_MODELS.get(source)
    shapes = {name: _values(model, model.config) for name, model in KNOWN_MODELS.items() if model.config is not None}
    if known is not None and source not in shapes:
        raise UsageError(
            f"{source} has layers that our trainer does not have. The calculators of `z2a perf` count it as it is; "
            f"elsewhere, and to change its fields, give a model that our trainer has: {', '.join(shapes)}, a preset, a "
            f"run's folder or a YAML file."
        )
    config = load_config(source, overrides, shapes)
    if known is None:
        return config, []
    said = f"{config.train.precision}, {config.train.tokens_per_step:,} tokens a step"
    return config, [
        f"{source} is known by its shape alone: {said} and all other settings are assumed or as you gave them"
    ]


def _values(model: Counted, shape: ModelConfig) -> dict[str, Any]:
    """A published model as the values of a config."""
    seq_len = model.seq_len or shape.max_seq_len
    return {
        "model": {**dataclasses.asdict(shape), "max_seq_len": seq_len},
        "data": {"seq_len": seq_len},
        "train": {"precision": "bfloat16", "steps": 10_000, "tokens_per_step": STEP_SEQUENCES * seq_len},
    }


def precision_notes(config: RunConfig, source: str, overrides: list[str]) -> list[str]:
    """Of a run on a GPU whose precision is float32 because nobody said another: that is seldom meant."""
    named = any(word.partition("=")[0] == "--train.precision" for word in overrides)
    if named or config.train.precision != "float32":
        return []
    if "precision" in (read_config_values(find_config(source)).get("train") or {}):
        return []
    return [
        "train.precision is not set, so it is float32. On a GPU bfloat16 is usually meant, and several times as fast: "
        "--train.precision bfloat16"
    ]
