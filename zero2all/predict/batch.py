"""What is measured or predicted: the config of `z2a train` without what needs data, or of a published model; and a
batch such as 2x2048x16."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.files import MANIFEST_NAME
from zero2all.common.manifest import read_manifest
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, find_config, load_config, read_config_values
from zero2all.estimate.memory_settings import WIDTHS
from zero2all.estimate.parameters import KNOWN_MODELS, Counted
from zero2all.estimate.shapes import Shape
from zero2all.model.config import ModelConfig
from zero2all.packed.loader import rank_rows

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


@dataclass(frozen=True)
class BatchShape:
    """What one iteration computes: `accumulation` passes over `samples` sequences, then one update."""

    samples: int
    seq_len: int
    accumulation: int

    @property
    def tokens(self) -> int:
        """Tokens in one iteration."""
        return self.samples * self.seq_len * self.accumulation

    def __str__(self) -> str:
        return f"{self.samples}x{self.seq_len}x{self.accumulation}"


def parse_batch(text: str) -> BatchShape:
    """`2x2048x16` -> BatchShape(2, 2048, 16)."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip())
    if match is None:
        raise UsageError(
            f"--batch {text} is not a batch. Expected SAMPLESxSEQUENCExACCUMULATION, for example 2x2048x16: two "
            f"sequences of 2048 tokens a pass, 16 passes an iteration."
        )
    return BatchShape(*map(int, match.groups()))


def own_batch(config: RunConfig, replicas: int = 1) -> BatchShape:
    """The batch of a run of this config in each of `replicas` processes, which share the samples of a step."""
    rows = rank_rows(config.samples_per_step, 0, replicas)[2]
    samples = min(rows, 8 if config.train.micro_batch_samples == "auto" else config.train.micro_batch_samples)
    return BatchShape(samples, config.data.seq_len, -(-rows // samples))


def check_batch(batch: BatchShape, config: RunConfig) -> None:
    """Raise if its sequences are longer than the model's."""
    if batch.seq_len > config.model.max_seq_len:
        raise UsageError(
            f"--batch {batch} has sequences of {batch.seq_len} tokens, but model.max_seq_len is "
            f"{config.model.max_seq_len}. Use shorter sequences, or raise --model.max_seq_len."
        )


def shape_of(config: RunConfig) -> Shape:
    """What the rules of sizes look at in a config."""
    batch, parallel = own_batch(config), config.parallel
    return Shape(
        model=config.model,
        samples=batch.samples,
        seq_len=batch.seq_len // parallel.context,
        tensor=parallel.tensor,
        stages=parallel.pipeline * parallel.chunks,
        copies_kv_heads=parallel.copy_kv_heads,
        value_bytes=WIDTHS[config.train.precision],
    )


def load_measured_config(source: str, overrides: list[str]) -> tuple[RunConfig, list[str]]:
    """The config and what was assumed: random tokens need a size of the vocabulary, and have no documents to mask."""
    loaded, assumed = load_model_config(source, overrides)
    config, notes = with_vocabulary(loaded)
    notes = [*assumed, *notes]
    if config.data.document_mask:
        notes.append("data.document_mask is ignored: random tokens have no documents")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, document_mask=False))
    return config, notes


def with_vocabulary(config: RunConfig, workspace: Workspace | None = None) -> tuple[RunConfig, list[str]]:
    """The config with a size of the vocabulary: its own, or as a run takes it that of the workspace's tokenizer. Where
    there is none the size is assumed, and a note says so."""
    if config.model.vocab_size is not None:
        return config, []
    size, notes = config.tokenizer.vocab_size, []
    if workspace is None:
        notes.append(f"model.vocab_size is not set: using tokenizer.vocab_size, {size}")
    elif (workspace.tokenizer / MANIFEST_NAME).exists():
        size = int(read_manifest(workspace.tokenizer, "tokenizer", "z2a tokenizer train")["vocab_size"])
    else:
        notes.append(
            f"model.vocab_size is not set, and {workspace.root.absolute()} has no tokenizer: using "
            f"tokenizer.vocab_size, {size}. --work names another workspace."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size)), notes
