"""The one config of a run: typed sections from YAML, dotted overrides on top, every problem reported at once.

    config = load_config("configs/quickstart.yaml", ["--optim.lr_max", "3e-4"])

Sections live beside the code they steer; this file only gathers them. Loading never edits what a person wrote:
the resolved config (every default filled in) is what is printed, saved with the run and compared on resume.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.schema import Problem, apply_overrides, build, field_docs, nearest_hint
from zero2all.model.config import ModelConfig
from zero2all.ops.config import OpsConfig
from zero2all.packed.config import DataConfig
from zero2all.parallel.config import ParallelConfig
from zero2all.resilience.config import ResilienceConfig
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.track.config import TrackConfig
from zero2all.train.config import (
    CheckpointConfig,
    EvalConfig,
    GuardsConfig,
    OptimConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which packed data is read, and in which proportion."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How the vocabulary is made, where the run makes one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the model."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    """Which implementation each operator uses."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Where the run computes."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    stages: list[StageConfig] = field(default_factory=list)
    """Stretches of the run with another mixture, in the order of their from_step."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and shape of the run."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """What happens when a step goes wrong."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """What happens when somebody wants the run to stop."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """What is logged."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Held-out evaluation inside the loop."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step."""
        return self.train.tokens_per_step // self.data.seq_len


class ConfigError(UsageError):
    """A config with one or more problems, each on its own numbered line."""

    def __init__(self, origin: str, problems: list[Problem]) -> None:
        self.problems = problems
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"The config {origin} has {count}; nothing was started.\n{lines}")


def load_config(source: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a preset name or YAML path, apply `--section.field value` overrides, check everything."""
    path = find_config(str(source))
    values = _read_yaml(path)
    problems: list[Problem] = []
    apply_overrides(values, overrides or [], problems)
    return config_from_values(values, str(path), problems)


def config_from_values(values: dict[str, Any], origin: str, problems: list[Problem] | None = None) -> RunConfig:
    """Build and check a config from nested mappings; raises ConfigError with all problems found."""
    problems = [] if problems is None else problems
    config = build(RunConfig, values, "", problems)
    if not problems:
        problems.extend(_cross_problems(config))
    if problems:
        raise ConfigError(origin, problems)
    assert isinstance(config, RunConfig), "build returns what it was asked for when it found no problem"
    return config


def find_config(source: str) -> Path:
    """The file behind a path or a preset name such as `quickstart`."""
    path = Path(source)
    if path.is_file():
        return path
    presets = {preset.stem: preset for folder in _preset_folders() for preset in sorted(folder.glob("*.yaml"))}
    if path.stem in presets and path.suffix in ("", ".yaml", ".yml") and path.parent.name in ("", "configs"):
        return presets[path.stem]
    raise UsageError(
        f"There is no config file or preset `{source}`. {nearest_hint(path.stem, presets)} "
        f"Give one of the presets ({', '.join(presets)}) or the path of a YAML file."
    )


def config_values(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain nested values."""
    return dataclasses.asdict(config)


def config_yaml(config: RunConfig, with_docs: bool = True) -> str:
    """The resolved config as YAML that loads back to the same config, with each field's doc line as a comment."""
    lines: list[str] = []
    _write_section(config, 0, lines, with_docs)
    return "\n".join(lines) + "\n"


def _preset_folders() -> list[Path]:
    checkout = Path(__file__).resolve().parent.parent / "configs"
    installed = Path(sys.prefix) / "share" / "zero2all" / "configs"
    return [folder for folder in (checkout, installed) if folder.is_dir()]


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"The config {path} cannot be read as YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"The config {path} holds {type(values).__name__}; expected sections such as `model:`.")
    return values


def _cross_problems(config: RunConfig) -> list[Problem]:
    """What is wrong between sections, and inside sections between fields."""
    found: list[Problem] = []
    for name in ("data", "model", "train"):
        found.extend(getattr(config, name).problems(name))
    for index, stage in enumerate(config.stages):
        found.extend(stage.problems(f"stages[{index}]"))
        if index and stage.from_step <= config.stages[index - 1].from_step:
            found.append(Problem(f"stages[{index}].from_step", stage.from_step, "a later step than the stage before"))
    seq_len, per_step = config.data.seq_len, config.train.tokens_per_step
    if seq_len > config.model.max_seq_len:
        found.append(Problem("data.seq_len", seq_len, f"at most model.max_seq_len ({config.model.max_seq_len})"))
    if per_step % seq_len:
        near = max(1, round(per_step / seq_len)) * seq_len
        found.append(
            Problem("train.tokens_per_step", per_step, f"a multiple of data.seq_len ({seq_len})", f"Nearest: {near}.")
        )
    elif (per_step // seq_len) % config.train.micro_batch_samples:
        found.append(
            Problem(
                "train.micro_batch_samples",
                config.train.micro_batch_samples,
                f"a divisor of the {per_step // seq_len} samples in a step (train.tokens_per_step / data.seq_len)",
            )
        )
    if config.schedule.warmup_steps > config.train.steps:
        found.append(
            Problem(
                "schedule.warmup_steps", config.schedule.warmup_steps, f"at most train.steps ({config.train.steps})"
            )
        )
    return found


def _write_section(section: Any, depth: int, lines: list[str], with_docs: bool) -> None:
    pad = "  " * depth
    docs = field_docs(section.__class__) if with_docs else {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if item.name in docs:
            lines.append(f"{pad}# {docs[item.name]}")
        if dataclasses.is_dataclass(value):
            lines.append(f"{pad}{item.name}:")
            _write_section(value, depth + 1, lines, with_docs)
        else:
            lines.append(f"{pad}{item.name}: {_yaml_value(value)}")


def _yaml_value(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(_plain(value), default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """Dataclasses inside lists as mappings."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
