"""The one config of a run: typed sections from YAML, dotted overrides on top, every problem reported at once.

    config = load_config("configs/quickstart.yaml", ["--optim.lr_max", "3e-4"])

No torch here: a config is checked before anything heavy is imported.
Loading never edits what a person wrote: the resolved config (every default filled in) is what is printed, saved with
the run and compared on resume.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.language import message
from zero2all.common.progress import counted
from zero2all.common.schema import Problem, UnknownName, apply_overrides, build, field_docs, nearest_hint
from zero2all.common.workspace import refuse_workspace
from zero2all.common.yamlio import read_yaml
from zero2all.config.rules import RULED, Filled, fill, with_value
from zero2all.config.schedule import schedule_problems
from zero2all.config.training import RunConfig, ScheduleConfig, StageConfig, TrainConfig
from zero2all.model.config import LORA_TARGETS

RENAMED_FIELDS = {"lr_min_share": "min_lr_ratio", "eval": "validation", "valid_tokens_per_source": "tokens_per_source"}
RENAMED_CHOICES = {"ops.linear": {"into32": "fp32_wgrad"}, "tokenizer.kind": {"sentencepiece": "bpe"}}
REPLACED_CHOICES = {
    "optim.kind": dict.fromkeys(("adafactor", "lion", "sgd"), "adamw"),
    "parallel.offload": dict.fromkeys(("optimizer_disk", "weights"), "optimizer"),
    "train.recompute": {"swap": "full"},
    **{
        f"ops.{operator}": {"liger": "auto"}
        for operator in ("cross_entropy", "linear_cross_entropy", "rms_norm", "rope", "swiglu")
    },
}
"""By field: a value of earlier versions -> what to use now."""
REMOVED_FIELDS = {
    "data": ("quarantine",),
    "guards": ("false_shard_alarms",),
    "optim": ("adafactor_beta1", "adafactor_decay_power", "adafactor_clip_rms", "muon_update_rms"),
    "parallel": ("offload_one_step_late", "offload_folder"),
}
"""Left out where a run of an earlier version wrote them."""
MOVED_FIELDS = {"muon_iterations": "iterations", "muon_precision": "precision"}
"""Old -> new name, of the last ones below optim.muon. Old names are accepted in files of earlier versions; in a config
they are an error."""


def with_new_names(values: Any, place: str = "") -> Any:
    """Values that a run of an earlier version wrote, under their new names."""
    if isinstance(values, list):
        return [with_new_names(item, place) for item in values]
    if isinstance(values, dict):
        if place == "parallel" and "data" in values:
            values = {**values, "zero": 3 if values["data"] == "shard" else 0}
            del values["data"]
        if not place and isinstance(values.get("parallel"), dict):
            parallel = {name: value for name, value in values["parallel"].items() if name != "powersgd_rank"}
            groups = {name: value for name, value in parallel.pop("slow_link", {}).items() if name != "top_k_share"}
            values = {**values, "parallel": parallel, **({"diloco": groups} if groups.get("groups") else {})}
        if place == "tokenizer":  # of a kind of trainer that is gone; its tokenizers still load
            values = {name: value for name, value in values.items() if name != "sentencepiece"}
        if place == "optim":
            moved = {new: values[old] for old, new in MOVED_FIELDS.items() if old in values}
            kept = {name: value for name, value in values.items() if name not in MOVED_FIELDS}
            values = {**kept, "muon": {**moved, **kept["muon"]} if "muon" in kept else moved}
        removed = REMOVED_FIELDS.get(place, ())
        return {
            RENAMED_FIELDS.get(name, name): with_new_names(value, f"{place}.{name}" if place else str(name))
            for name, value in values.items()
            if name not in removed
        }
    new = {**RENAMED_CHOICES.get(place, {}), **REPLACED_CHOICES.get(place, {})}
    return new.get(values, values) if isinstance(values, str) else values


class ConfigError(UsageError):
    """A config with one or more problems, each on its own numbered line."""

    def __init__(self, origin: str | None, problems: list[Problem], config: RunConfig | None = None) -> None:
        """`origin`: the file; None where all problems come from the command line. `config`: as it was asked for, where
        every field has a value of its type."""
        self.problems, self.config = problems, config
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        problem_count = counted(len(problems), "problem")
        if origin is None:
            super().__init__(f"The command line has {problem_count}; nothing was started.\n" + lines)
        else:
            super().__init__(f"The config {origin} has {problem_count}; nothing was started.\n" + lines)


Shapes = Mapping[str, dict[str, Any]]


def load_config(source: str | Path, overrides: list[str] | None = None, shapes: Shapes | None = None) -> RunConfig:
    """Read a preset name, a YAML path or a run's folder, apply `--section.field value` overrides, check everything.
    `shapes` are the values of further names."""
    return load_with_rules(source, overrides, shapes)[0]


def load_with_rules(
    source: str | Path, overrides: list[str] | None = None, shapes: Shapes | None = None, saved: RunConfig | None = None
) -> tuple[RunConfig, list[Filled]]:
    """As `load_config`, with the values that rules gave. `saved`: the config of a run that goes on, which keeps its."""
    try:
        return _load_config(source, overrides, shapes or {}, saved)
    except ConfigError as error:
        given = {word.removeprefix("--").partition("=")[0] for word in overrides or []}
        if all(_is_below(problem.field, given) for problem in error.problems) or _is_sound(source, given, shapes or {}):
            raise ConfigError(None, error.problems, error.config) from None
        raise


def _is_sound(source: str | Path, given: Collection[str], shapes: Shapes) -> bool:
    """Whether the file alone has no problem, so that what is wrong was `given` on the command line."""
    try:
        _load_config(source, None, shapes)
    except UsageError:
        return False
    return bool(given)


def _is_below(field: str, names: Collection[str]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in names)


def _load_config(
    source: str | Path, overrides: list[str] | None, shapes: Shapes, saved: RunConfig | None = None
) -> tuple[RunConfig, list[Filled]]:
    if str(source) in shapes and not Path(source).exists():
        path, values = Path(source), copy.deepcopy(shapes[str(source)])
    else:
        path = find_config(str(source), shapes)
        values = read_config_values(path)
    if _is_kept_by_run(path):
        values = with_new_names(values)
    usual = _usual_warmup(values, path, overrides or [])
    problems: list[Problem] = []
    apply_overrides(values, overrides or [], problems)
    given, nulls = _given(values, overrides or [])
    if _is_kept_by_run(path):
        given |= {"stages", *RULED} - nulls  # an older version had fewer fields, and no rules
    filled: list[Filled] = []

    def apply_rules(config: RunConfig, problems: list[Problem]) -> RunConfig:
        if all(isinstance(problem, UnknownName) for problem in problems):  # else some fields have no value
            config, filled[:] = fill(config, given, nulls, saved, problems)
        blamed = {problem.field for problem in _cross_problems(config, problems)}.intersection(WARMUP_FIELDS)
        if usual is None or not blamed or any(each.name == "schedule.warmup_steps" for each in filled):
            return config
        return with_value(config, "schedule.warmup_steps", -(-usual[0] * config.train.steps // usual[1]))

    return config_from_values(values, str(path), problems, apply_rules), filled


def _given(values: dict[str, Any], overrides: list[str]) -> tuple[set[str], set[str]]:
    """The names of the fields that have a value, and of those set to null, which are taken out where a rule or a
    default is meant. The command line's train.steps or train.tokens replaces the other one in the file."""
    flat, length = flat_values(values), {"train.steps", "train.tokens"}
    said = {word.removeprefix("--").partition("=")[0] for word in overrides}
    said = {name for name in length & said if flat.get(name) is not None}
    nulls = {
        name for name in RULED | length if name in flat and (flat[name] is None or (said and name in length - said))
    }
    for section, _, leaf in (name.partition(".") for name in nulls):
        del values[section][leaf]
    return {name for name, value in flat.items() if value is not None and name not in nulls}, nulls


WARMUP_FIELDS = ("schedule.warmup_steps", "schedule.decay_share", "schedule.decay_steps")
"""Where a warmup that leaves too few steps is reported."""


def _usual_warmup(values: dict[str, Any], path: Path, overrides: list[str]) -> tuple[int, int] | None:
    """The warmup of a preset or the default, and the steps it was meant for: a shorter run takes the same share of
    them. None where the user set the warmup."""
    if any(word.partition("=")[0] == "--schedule.warmup_steps" for word in overrides):
        return None
    warmup, steps = (flat_values(values).get(name) for name in ("schedule.warmup_steps", "train.steps"))
    if warmup is None:
        return ScheduleConfig.warmup_steps, TrainConfig.steps
    return (warmup, steps) if path in preset_files().values() and steps else None


def config_from_values(
    values: dict[str, Any],
    origin: str,
    problems: list[Problem] | None = None,
    apply_rules: Callable[[RunConfig, list[Problem]], RunConfig] | None = None,
) -> RunConfig:
    """Build and check a config from nested mappings; raises ConfigError with all problems found. `apply_rules` fills
    in what was not given, before anything is compared."""
    problems = [] if problems is None else problems
    config = build(RunConfig, values, "", problems)
    problems = [_with_new_name(problem) or _with_other_place(problem) for problem in problems]
    has_types = not problems
    if apply_rules is not None:
        config = apply_rules(config, problems)
    problems.extend(_cross_problems(config, problems))
    if problems:
        raise ConfigError(origin, problems, config if has_types else None)
    assert isinstance(config, RunConfig), "build returns what it was asked for when it found no problem"
    return config


def find_config(source: str, more_names: Collection[str] = ()) -> Path:
    """The file behind a path, a run's folder or a preset name such as `quickstart`; `more_names` are suggested too."""
    path = Path(source)
    if path.is_file():
        return path
    if (path / "config.yaml").is_file():
        return path / "config.yaml"
    presets = preset_files()
    name = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if name in presets and path.parent in (Path(), Path("configs")):
        return presets[name]
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"The config {source} is a pipe or a device. Save it as a file and give the path of that file."
        )
    refuse_workspace(path, message("a preset or a config file"))
    hint = nearest_hint(name, [*presets, *more_names])
    names = ", ".join([*presets, *more_names])
    if hint.startswith("Did"):
        raise UsageError(
            f"There is no config file or preset `{source}`. {hint} Give one of the presets ({names}) or the path of a "
            f"YAML file."
        )
    raise UsageError(
        f"There is no config file or preset `{source}`. Give one of the presets ({names}) or the path of a YAML file."
    )


def preset_files() -> dict[str, Path]:
    """The named configs that come with zero2all; those of a checkout stand before installed copies. A wheel puts them
    below the environment, below ~/.local (`pip install --user`) or beside the package (`--target`)."""
    package = Path(__file__).resolve().parents  # PREFIX/lib/python3.X/site-packages/zero2all/config/__init__.py
    installed = [Path(sys.prefix), *package[5:6], package[2]]
    folders = [*(place / "share" / "zero2all" / "configs" for place in installed), package[2] / "configs"]
    return {preset.stem: preset for folder in folders for preset in sorted(folder.glob("*.yaml"))}


def config_values(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain nested values."""
    return dataclasses.asdict(config)


def flat_values(values: Any, place: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    if not isinstance(values, dict) or not values:
        return {place: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat_values(value, f"{place}.{name}" if place else str(name))
    return found


def config_yaml(config: RunConfig, with_docs: bool = True, filled: Iterable[Filled] = ()) -> str:
    """The resolved config as YAML that loads back to the same config, with each field's doc line as a comment, and the
    rule behind each value that one has `filled`."""
    lines: list[str] = []
    _write_section(config, "", lines, with_docs, {each.name: each.words for each in filled})
    return "\n".join(lines) + "\n"


def read_config_values(path: Path) -> dict[str, Any]:
    """The sections of a YAML file as they stand there."""
    try:
        values = read_yaml(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"The config {path} cannot be read as YAML; nothing was started.\n" + str(error)) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(
            f"The config {path} holds a {type(values).__name__}; expected sections such as `model:` with "
            "fields below them. `z2a train quickstart --print-config` prints a complete config."
        )
    return values


def _is_kept_by_run(path: Path) -> bool:
    """Whether a run wrote this config; an import writes one beside its checkpoint, a run also beside its metrics."""
    return path.name == "config.yaml" and any((path.parent / name).is_dir() for name in ("checkpoints", "metrics"))


def _with_new_name(problem: Problem) -> Problem | None:
    """A field or choice by the name it had in an earlier version: say the new one. None for any other problem."""
    if problem.field == "parallel.data":
        hint = "It is now `parallel.zero`: 0 replaces replicate, 3 replaces shard."
        return dataclasses.replace(problem, hint=hint)
    if problem.field == "parallel.slow_link":
        return dataclasses.replace(problem, hint="It is now `diloco`: a section of its own.")
    if problem.field == "parallel.powersgd_rank" or (problem.field, problem.value) == ("parallel.compress", "powersgd"):
        hint = "PowerSGD is gone. Take bf16, or `diloco` for a slow network."
        return dataclasses.replace(problem, hint=hint)
    if problem.field == "diloco.scheme" and problem.value in ("local_sgd", "sparse"):
        hint = "For local SGD set diloco.scheme to diloco, outer_lr to 1 and momentum to 0; sparse is gone."
        return dataclasses.replace(problem, hint=hint)
    if "sentencepiece" in (problem.field.removeprefix("tokenizer."), problem.value):
        hint = "SentencePiece models are no longer trained here; `z2a tokenizer import` takes those of its library."
        return dataclasses.replace(problem, hint=hint)
    if problem.field == "optim.muon_update_rms":
        hint = (
            "Muon's steps now have a spectral scale: delete this field and set optim.lr_max to about 0.02 at 524,288 "
            "tokens a step."
        )
        return dataclasses.replace(problem, hint=hint)
    if isinstance(problem, UnknownName):
        leaf = problem.field.rpartition(".")[2]
        new = f"optim.muon.{MOVED_FIELDS[leaf]}" if leaf in MOVED_FIELDS else RENAMED_FIELDS.get(leaf)
    else:
        new = RENAMED_CHOICES.get(problem.field, {}).get(str(problem.value))
        instead = REPLACED_CHOICES.get(problem.field, {}).get(str(problem.value))
        if instead:
            return dataclasses.replace(problem, hint=f"It was removed. Use `{instead}`.")
    return dataclasses.replace(problem, hint=f"It is now called `{new}`.") if new else None


def _with_other_place(problem: Problem) -> Problem:
    """A field written under the wrong section: say where it lives."""
    if not isinstance(problem, UnknownName):
        return problem
    leaf = problem.field.rpartition(".")[2]
    homes = [
        f"`{section.name}.{leaf}`"
        for section in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(section.default_factory)
        and leaf in {item.name for item in dataclasses.fields(section.default_factory)}
    ]
    return (
        dataclasses.replace(problem, hint=f"{problem.hint} Another section has this field: {', '.join(homes)}.")
        if homes
        else problem
    )


def _cross_problems(config: RunConfig, known: list[Problem]) -> list[Problem]:
    """What is wrong between fields and between sections; where a section has `known` problems, nothing rests on it."""
    troubled = {problem.field.partition(".")[0].partition("[")[0] for problem in known}
    every_section_is_known = troubled <= {section.name for section in dataclasses.fields(RunConfig)}

    def sound(*sections: str) -> bool:
        return not troubled.intersection(sections) and (len(sections) == 1 or every_section_is_known)

    found: list[Problem] = []
    for name in ("data", "tokenizer", "model", "optim", "train", "parallel", "diloco", "resilience"):
        if sound(name):
            found.extend(getattr(config, name).problems(name))
    if sound("stages"):
        found.extend(_stages_problems(config.stages))
    if sound("data", "model", "finetune"):
        limit = config.model.max_seq_len
        if config.data.seq_len > limit * (2 if config.finetune.method == "dpo" else 1):  # a row has two answers
            found.append(Problem("data.seq_len", config.data.seq_len, f"at most model.max_seq_len ({limit})"))
    if sound("finetune", "model", "optim", "parallel", "diloco") and config.finetune.lora.rank:
        found.extend(_lora_problems(config))
    if sound("finetune", "model", "train", "diloco", "parallel"):
        found.extend(_objective_problems(config))
    if sound("finetune", "data", "ops") and config.finetune.method == "distill":
        found.extend(_distill_problems(config))
    if sound("data", "train"):
        found.extend(_batch_problems(config.data.seq_len, config.train))
    if sound("stages", "model", "train", "data"):
        for index, stage in enumerate(config.stages):
            found.extend(_stage_length_problems(stage.seq_len, f"stages[{index}].seq_len", config))
    if sound("schedule", "train", "stages"):
        top = config.optim.lr_max if sound("optim") else 1.0
        found.extend(schedule_problems(config.train.steps, top, config.schedule, config.stages))
    return found


def _objective_problems(config: RunConfig) -> list[Problem]:
    """A loss that is computed in two passes over the same rows needs the same network in both; groups of DiLoCo would
    each divide by their own rows."""
    if not config.finetune.has_objective:
        return []
    method, model = config.finetune.method, config.model
    must_be_zero = {"train.z_loss": config.train.z_loss}
    must_be_zero |= {
        f"model.{name}": getattr(model, name) for name in ("embedding_dropout", "attention_dropout", "residual_dropout")
    }
    found = [Problem(name, value, f"0 with finetune.method {method}") for name, value in must_be_zero.items() if value]
    if config.diloco.groups:
        found.append(Problem("diloco.groups", config.diloco.groups, f"none with finetune.method {method}"))
    if method == "grpo":  # every process draws answers with the whole model
        layout = {name: getattr(config.parallel, name) for name in ("pipeline", "context", "tensor", "expert")}
        expected = "1 with finetune.method grpo: answers are drawn with a whole model in every process"
        found += [Problem(f"parallel.{name}", value, expected) for name, value in layout.items() if value != 1]
        if config.parallel.zero == 3:
            found.append(Problem("parallel.zero", 3, "0 to 2 with finetune.method grpo, for the same reason"))
    return found


def _distill_problems(config: RunConfig) -> list[Problem]:
    """What a teacher says is kept by whole conversations, and each token then has several targets."""
    data, head, method = config.data, config.ops.linear_cross_entropy, config.finetune.method
    several = f"auto, chunked, triton or quack with finetune.method {method}"
    rules = (
        (data.packed is None, Problem("data.packed", None, "the folder that `z2a sft … --teacher` has packed")),
        (data.packing != "best_fit", Problem("data.packing", data.packing, f"best_fit with finetune.method {method}")),
        (not data.document_mask, Problem("data.document_mask", False, f"true with finetune.method {method}")),
        (head in ("off", "torch"), Problem("ops.linear_cross_entropy", head, several)),
    )
    return [problem for is_wrong, problem in rules if is_wrong]


def _stages_problems(stages: list[StageConfig]) -> list[Problem]:
    found: list[Problem] = []
    for index, stage in enumerate(stages):
        found.extend(stage.problems(f"stages[{index}]"))
        if index and stage.from_step <= stages[index - 1].from_step:
            expected = f"a step after that of the previous stage ({stages[index - 1].from_step})"
            found.append(Problem(f"stages[{index}].from_step", stage.from_step, expected))
    return found


def _stage_length_problems(seq_len: int | None, place: str, config: RunConfig) -> list[Problem]:
    if seq_len is None:
        return []
    limit, per_step = config.model.max_seq_len, config.train.tokens_per_step
    if seq_len > limit:
        return [Problem(place, seq_len, f"at most model.max_seq_len ({limit})")]
    if per_step % seq_len:
        return [Problem(place, seq_len, f"a divisor of train.tokens_per_step ({per_step})")]
    return []


def _lora_problems(config: RunConfig) -> list[Problem]:
    """Experts have no adapters, Muon is no optimizer for adapters, and what is sent or moved is the whole model."""
    targets, attention = config.finetune.lora.targets or [], LORA_TARGETS[:4]
    beyond = bool(config.model.moe.experts) and not set(targets) <= set(attention)
    words = f"some of {', '.join(attention)}: in a model with experts only attention has adapters"
    kinds = "adamw (or adamw_8bit, adamw_bf16) where finetune.lora.rank is set"
    none = "none where finetune.lora.rank is set: the states of adapters are small"
    left_out = "left out where finetune.lora.rank is set: groups exchange all weights"
    rules = (
        (beyond, Problem("finetune.lora.targets", targets, words)),
        (config.optim.kind == "muon", Problem("optim.kind", "muon", kinds)),
        (config.parallel.offload != "none", Problem("parallel.offload", config.parallel.offload, none)),
        (bool(config.diloco.groups), Problem("diloco.groups", config.diloco.groups, left_out)),
    )
    return [problem for is_wrong, problem in rules if is_wrong]


def _batch_problems(seq_len: int, train: TrainConfig) -> list[Problem]:
    per_step = train.tokens_per_step
    if per_step % seq_len:
        near = max(1, round(per_step / seq_len)) * seq_len
        expected = f"a multiple of data.seq_len ({seq_len})"
        return [Problem("train.tokens_per_step", per_step, expected, f"The nearest is {near}.")]
    return []


def _write_section(section: Any, place: str, lines: list[str], with_docs: bool, rules: Mapping[str, str]) -> None:
    pad = "  " * place.count(".")
    docs = field_docs(section.__class__) if with_docs else {}
    for item in dataclasses.fields(section):
        value, name = getattr(section, item.name), f"{place}{item.name}"
        if item.name in docs:
            lines.append(f"{pad}# {docs[item.name]}")
        if dataclasses.is_dataclass(value):
            lines.append(f"{pad}{item.name}:")
            _write_section(value, f"{name}.", lines, with_docs, rules)
        else:
            rule = f"  # rule: {rules[name]}" if name in rules else ""
            lines.append(f"{pad}{item.name}: {_yaml_value(value)}{rule}")


def _yaml_value(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(_plain(value), default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """Dataclasses inside lists as mappings."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
