"""The calculators of `z2a perf`: model, mfu, chinchilla, cost and failures; no torch, an answer at once.

Every flag is read as text first, so that all problems are reported together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero2all.cli.terminal import print_table
from zero2all.cli.verb import AMOUNT, COUNT, TAKES_FIELDS, TIME, amount, count, duration, verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import scaled

if TYPE_CHECKING:
    from zero2all.common.schema import Problem
    from zero2all.estimate.model_calculators import CalculatorAnswer
    from zero2all.estimate.parameters import Counted


MODEL_HELP = "a preset, a YAML file, a run's folder, or a published model: llama-3.1-8b, mixtral-8x7b, …"


def _time(text: str) -> float:
    if not (value := duration(text)):
        raise ValueError(text)
    return value


def _share(text: str) -> float:
    value = scaled(text.removesuffix("%"), {"": 0.01 if text.endswith("%") else 1.0})
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def _gpu(text: str) -> Any:
    from zero2all.estimate.gpus import DEVICE_NAMES, GPUS

    name = DEVICE_NAMES.get(text, text.lower())
    if name not in GPUS:
        known = f"{', '.join(GPUS)}; for any other give --peak-tflops (and --bandwidth-gbs)"
        raise LookupError(f"the exact name of a known one: {known}")
    return GPUS[name]


def _one_of(where: str, names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        known = getattr(import_module(where), names)
        if text not in known:
            raise LookupError(f"one of {', '.join(known)}")
        return text

    return read


KINDS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "count": (count, "N", COUNT),
    "number": (amount, "X", AMOUNT),
    "time": (_time, "TIME", TIME),
    "share": (_share, "SHARE", "a share above 0 and at most 1, such as 0.4 or 40%"),
    "gpu": (_gpu, "NAME", ""),
    "recipe": (_one_of("zero2all.estimate.model_calculators", "RECIPES"), "NAME", ""),
    "recompute": (_one_of("zero2all.estimate.model_calculators", "RECOMPUTED"), "KIND", ""),
    "law": (_one_of("zero2all.estimate.run_calculators", "LAWS"), "NAME", ""),
    "convention": (_one_of("zero2all.estimate.run_calculators", "CONVENTIONS"), "NAME", ""),
}
"""Kind of a flag -> how it is read, what stands for it in the help, and the rule."""

FLAGS: dict[str, tuple[str, str]] = {
    "params": ("count", "parameters, where that is all you know"),
    "active": ("count", "parameters that a token uses, with --params (default: all)"),
    "layers": ("count", "number of blocks, with --params"),
    "hidden-size": ("count", "width of the model (hidden size), with --params"),
    "vocab-size": ("count", "token ids, with --params"),
    "seq-len": ("count", "tokens of a sequence (default: the model's)"),
    "recompute": ("recompute", "blocks recomputed in the backward pass, for HFU: none, selective, full (default none)"),
    "gpu": ("gpu", "accelerator by its exact name: a100, h100, h200, b200, … or the driver's name"),
    "peak-tflops": ("number", "dense peak in TFLOP/s, for one that is not known"),
    "gpus": ("count", "number of GPUs (default: 8 for `model`, otherwise 1)"),
    "tokens-per-second": ("number", "speed of all GPUs together"),
    "flops": ("number", "FLOPs of the run"),
    "law": ("law", "constants: refit, paper, paper-rounded (default refit)"),
    "tokens": ("count", "tokens of the run, or of a step for `model` (default: as the config says)"),
    "mfu": ("share", "model FLOPs utilisation"),
    "tflops": ("number", "model TFLOP/s that one GPU achieves"),
    "convention": ("convention", "6N, 8N, seed, palm or causal (default: palm, or 6N where only --params are known)"),
    "goodput": ("share", "share of the time that makes progress (default 1)"),
    "price": ("number", "price of a GPU-hour, for the cost"),
    "recipe": ("recipe", "precision and optimizer: adamw, adamw-fp32, adamw-bf16, adamw-8bit, lion, … (default adamw)"),
    "sequences": ("count", "sequences at once (default 1)"),
    "time": ("time", "training while nothing disturbs, such as 54d"),
    "mtbf": ("time", "mean time between failures of the whole run (default: Llama 3's rate, 1.97e-5 a GPU-hour)"),
    "save": ("time", "training that a checkpoint stops (default 60s)"),
    "restart": ("time", "from a failure to the first new step (default 5m)"),
    "interval": ("time", "training between two checkpoints (default: Daly's interval)"),
    "cache-value-bytes": ("number", "bytes of a cached value (default 2)"),
}
"""Flag -> its kind and its help."""

SHAPE = ("params", "active", "layers", "hidden-size", "vocab-size", "seq-len")
NODE = 8
"""GPUs over which ZeRO cuts, where nobody says how many."""
FAILURES = "time gpus mtbf save restart interval"
SPEED = "gpus gpu peak-tflops mfu tflops tokens-per-second convention goodput"
VERBS: dict[str, tuple[str, str]] = {
    "model": (
        "parameters of a model, FLOPs of a token, states by ZeRO stage, and the least time of generating",
        "MODEL tokens gpu gpus recipe sequences cache-value-bytes",
    ),
    "mfu": (
        "utilisation (MFU) of a speed in every convention",
        "MODEL tokens-per-second gpus gpu peak-tflops recompute",
    ),
    "chinchilla": ("best parameters and tokens for a number of FLOPs", "flops params tokens law"),
    "cost": ("how long a run takes and what it costs", f"MODEL tokens {SPEED} price"),
    "failures": ("how often a long run should save, and what failures leave of its time", FAILURES),
}
"""Verb -> summary and flags. MODEL: a model, or --params with what else is known of it."""
EXAMPLES = {
    "model": ("z2a perf model llama-3.1-8b", "z2a perf model z2all-1b --gpu h200 --gpus 64"),
    "mfu": (
        "z2a perf mfu --params 1.1e9 --layers 22 --hidden-size 2048 --vocab-size 32000 --seq-len 2048"
        " --tokens-per-second 24000 --gpu a100",
    ),
    "chinchilla": ("z2a perf chinchilla --flops 5.76e23",),
    "failures": (
        "z2a perf failures --time 54d --mtbf 3.1h --save 60s --restart 10m",
        "z2a perf failures --gpus 16384 --time 54d --interval 30m",
    ),
    "cost": (
        "z2a perf cost z2all-1b --tokens 26B --gpus 8 --gpu h200 --mfu 0.55 --price 3",
        "z2a perf cost gpt-3 --tokens 300B --gpus 1024 --tflops 140 --convention 6N",
    ),
}


def _declare(name: str) -> None:
    """Declare a calculator; every flag is read as text."""
    summary, flags = VERBS[name]
    table = [f"--{flag} {KINDS[FLAGS[flag][0]][1]}  {FLAGS[flag][1]}" for flag in _flags(name)]
    if "MODEL" in flags:
        table = [f"model? MODEL  {MODEL_HELP} (also deepseek-v3, gpt-3)", *table, TAKES_FIELDS]
    example = "\n".join(EXAMPLES[name])
    lines = "\n".join([*table, "JSON"])
    verb(f"perf {name}: {summary}\n\n{lines}\n\n{example}", defaults={"calculator": name})(_calculate)


def _flags(verb: str) -> list[str]:
    named = VERBS[verb][1].split()
    return [flag for flag in dict.fromkeys([*named, *(SHAPE if "MODEL" in named else ())]) if flag != "MODEL"]


def _calculate(arguments: argparse.Namespace) -> None:
    from zero2all.estimate.model_calculators import ImpossibleError

    name: str = arguments.calculator
    problems: list[Problem] = []
    values = _read(arguments, _flags(name), problems)
    model = _model(arguments, values, problems) if "model" in arguments else None
    if problems:
        raise ImpossibleError(problems)
    if model is not None:
        shape = {flag.replace("-", "_") for flag in SHAPE} - {"seq_len"}
        values = {flag: value for flag, value in values.items() if flag not in shape}
    answers = _answers(name, model, values)
    value = next(iter(answers.values())).as_json()
    if len(answers) > 1:
        value = {part: answer.as_json() for part, answer in answers.items()}
    if not write_json_result(arguments.json, value):
        for answer in answers.values():
            show(answer)


def _answers(name: str, model: Counted | None, values: dict[str, Any]) -> dict[str, CalculatorAnswer]:
    """What a verb answers, part by part."""
    from zero2all.estimate import model_calculators as of_model
    from zero2all.estimate import run_calculators as of_run

    def some(*names: str) -> dict[str, Any]:
        return {each: values.pop(each) for each in names if each in values}

    if model is None:
        return {name: (of_run.chinchilla if name == "chinchilla" else of_run.failures)(**values)}
    if name == "model":
        length, gpu = some("seq_len"), some("gpu")
        return {
            "parameters": of_model.params(model),
            "flops": of_model.flops(model, **length, **gpu, **some("tokens")),
            "states": of_model.zero(model, values.pop("gpus", NODE), **some("recipe")),
            "generating": of_model.inference(model, **length, **gpu, **values),
        }
    devices = of_model.Devices(**some("gpus", "gpu", "peak_tflops"))
    if name == "cost":
        speed = of_run.RunSpeed(**some("mfu", "tflops", "tokens_per_second", "convention", "goodput"))
        return {name: of_run.cost(model, speed, devices, **values)}
    return {name: of_model.mfu(model, devices=devices, **values)}


def _read(arguments: argparse.Namespace, flags: list[str], problems: list[Problem]) -> dict[str, Any]:
    """The flags that were given, in their types."""
    from zero2all.common.schema import Problem

    values = {}
    for flag in flags:
        name = flag.replace("-", "_")
        text = getattr(arguments, name)
        if text is None:
            continue
        read, _, rule = KINDS[FLAGS[flag][0]]
        try:
            values[name] = read(text)
        except LookupError as error:
            problems.append(Problem(f"--{flag}", text, str(error.args[0])))
        except (ValueError, argparse.ArgumentTypeError):
            problems.append(Problem(f"--{flag}", text, rule))
    return values


def _model(arguments: argparse.Namespace, values: dict[str, Any], problems: list[Problem]) -> Counted | None:
    """The model that was named, or what is known of it."""
    from zero2all.common.schema import MISSING, Problem
    from zero2all.estimate.parameters import KNOWN_MODELS, counted_by_total

    given = [flag for flag in SHAPE if flag != "seq-len" and getattr(arguments, flag.replace("-", "_")) is not None]
    seq_len = values.get("seq_len")
    if arguments.model is not None:
        if given:
            flags = ", ".join(f"--{flag}" for flag in given)
            problems.append(Problem("MODEL", arguments.model, f"no {flags} beside it; change it by --model.FIELD"))
        if arguments.model in KNOWN_MODELS and not arguments.overrides:
            return KNOWN_MODELS[arguments.model]
        return _configured(arguments, problems)
    if "params" not in given:
        problems.append(Problem("MODEL", MISSING, "a model, or the number of its parameters: --params"))
        return None
    if any(flag.replace("-", "_") not in values for flag in given):
        return None  # it is named among the problems already
    get = values.get
    tables = 2 * get("vocab_size", 0) * get("hidden_size", 0)
    if get("active", 0) > values["params"]:
        problems.append(Problem("--active", get("active"), f"at most the parameters ({values['params']:,})"))
    if tables >= values["params"]:
        rule = f"tables smaller than the model: 2 x {get('hidden_size')} wide, and {values['params']:,} parameters"
        problems.append(Problem("--vocab-size", get("vocab_size"), rule))
    widths = (get("layers"), get("hidden_size"), get("vocab_size"))
    return counted_by_total(values["params"], get("active"), *widths, seq_len)


def _configured(arguments: argparse.Namespace, problems: list[Problem]) -> Counted | None:
    from zero2all.config import ConfigError
    from zero2all.estimate.memory import checkpoint_bytes
    from zero2all.estimate.parameters import counted
    from zero2all.predict.batch import load_model_config

    try:
        config, _ = load_model_config(arguments.model, arguments.overrides)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    except UsageError as error:
        if problems:  # else it stands alone
            problems.append(Problem("MODEL", arguments.model, "the name of a model that is known, or a YAML file"))
            return None
        raise error
    model = replace(config.model, vocab_size=config.model.vocab_size or config.tokenizer.vocab_size)
    step, optim = config.train.tokens_per_step, config.optim
    found = counted(model, str(arguments.model), config.data.seq_len)
    saved = checkpoint_bytes(model, optim.kind, config.train.precision, optim.bf16_rounding == "kahan")
    tokens = step * config.train.steps
    return replace(found, step_tokens=step, run_tokens=tokens, checkpoint_bytes=saved, optimizer=optim.kind)


def show(answer: CalculatorAnswer) -> None:
    """Print an answer."""
    print_table(answer.rows(), answer.title)
    for line in (answer.convention, *answer.notes):
        print(t(line))


for _name in VERBS:
    _declare(_name)
