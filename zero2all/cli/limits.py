"""The calculators of `z2a perf`: params, flops, mfu, batch, comm and the others; no torch, an answer at once.

Every flag is read as text first, so that all problems are reported together.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import (
    AMOUNT,
    COUNT,
    MODEL_HELP,
    Subparsers,
    add_json,
    add_verb,
    amount,
    count,
    write_json_result,
)
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from pathlib import Path

    from zero2all.common.schema import Problem
    from zero2all.estimate.answer import Answer
    from zero2all.estimate.parameters import Counted

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(text: str) -> float:
    from zero2all.common.progress import scaled

    if (value := scaled(text, SECONDS)) <= 0:
        raise ValueError(text)
    return value


def _share(text: str) -> float:
    from zero2all.common.progress import scaled

    value = scaled(text.removesuffix("%"), {"": 0.01 if text.endswith("%") else 1.0})
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def _stage(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise ValueError(text)
    return int(text)


def _numbers(text: str) -> list[float]:
    return [amount(part) for part in text.split(",")]


def _gpu(text: str) -> Any:
    from zero2all.estimate.gpus import DEVICE_NAMES, GPUS

    name = DEVICE_NAMES.get(text, text.lower())
    if name not in GPUS:
        known = f"{', '.join(GPUS)}; for any other give --peak-tflops (and --bandwidth-gbs)"
        raise LookupError(f"the exact name of a known one: {known}")
    return GPUS[name]


def _one_of(where: str, names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        from importlib import import_module

        known = getattr(import_module(where), names)
        if text not in known:
            raise LookupError(f"one of {', '.join(known)}")
        return text

    return read


KINDS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "count": (count, "N", COUNT),
    "number": (amount, "X", AMOUNT),
    "seconds": (_seconds, "TIME", "a time above 0, such as 60 (seconds), 90s, 10m, 3h or 5d"),
    "share": (_share, "SHARE", "a share above 0 and at most 1, such as 0.4 or 40%"),
    "stage": (_stage, "0-3", "0, 1, 2 or 3"),
    "numbers": (_numbers, "N,…", "numbers above 0 with commas between, such as 1000,3000,4192"),
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
    "layers": ("count", "number of blocks"),
    "hidden-size": ("count", "width of the model (hidden size)"),
    "intermediate-size": ("count", "width inside the SwiGLU"),
    "heads": ("count", "query heads"),
    "kv-heads": ("count", "key/value heads (default: as many as --heads)"),
    "head-dim": ("count", "width of a head (default: hidden size / heads)"),
    "vocab-size": ("count", "token ids"),
    "experts": ("count", "experts per block"),
    "experts-per-token": ("count", "experts that a token goes to"),
    "expert-size": ("count", "width inside an expert"),
    "shared-experts": ("count", "experts for every token"),
    "dense-layers": ("count", "first blocks without experts"),
    "latent": ("numbers", "latent attention (MLA): query rank, kv rank, plain, rope and value width of a head"),
    "seq-len": ("count", "tokens of a sequence (default: the model's)"),
    "recompute": ("recompute", "blocks recomputed in the backward pass, for HFU: none, selective, full (default none)"),
    "lengths": ("numbers", "lengths of the documents packed into a sequence"),
    "gpu": ("gpu", "accelerator by its exact name: a100, h100, h200, b200, … or the driver's name"),
    "peak-tflops": ("number", "dense peak in TFLOP/s, for one that is not known"),
    "bandwidth-gbs": ("number", "bandwidth of the memory in GB/s"),
    "gpus": ("count", "number of GPUs"),
    "tokens-per-second": ("number", "speed of all GPUs together"),
    "step-seconds": ("seconds", "time of a step, with --tokens-per-step"),
    "tokens-per-step": ("count", "tokens of a step, with --step-seconds"),
    "micro-batch": ("count", "sequences that a replica passes at once"),
    "accumulation": ("count", "micro-steps per step (default 1)"),
    "tensor": ("count", "tensor-parallel ranks (default 1)"),
    "pipeline": ("count", "pipeline stages (otherwise 1)"),
    "context": ("count", "context-parallel ranks (default 1)"),
    "expert": ("count", "expert-parallel ranks (default 1)"),
    "replicas": ("count", "groups that each hold a whole copy (HSDP; default 1)"),
    "zero": ("stage", "ZeRO stage (default 1)"),
    "micro-tokens": ("count", "tokens of a replica's micro-batch"),
    "micro-steps": ("count", "micro-steps per step (default 1)"),
    "value-bytes": ("number", "bytes of one value (default 2)"),
    "link-gbs": ("number", "GB/s that a rank sends (default: the link of --gpu)"),
    "latency-us": ("number", "latency of one hop in microseconds (default 0)"),
    "micro-batches": ("count", "micro-batches of a step"),
    "virtual": ("count", "blocks per stage, interleaved (default 1)"),
    "forward": ("number", "time of a forward pass (default 1)"),
    "input-gradient": ("number", "time of the input gradient (default 1)"),
    "weight-gradient": ("number", "time of the weight gradient (default 1)"),
    "m": ("count", "rows of the result"),
    "n": ("count", "columns of the result"),
    "k": ("count", "length that is summed over"),
    "tile": ("numbers", "rows and columns of a tile (default 128,256)"),
    "flops": ("number", "FLOPs of the run"),
    "law": ("law", "constants: refit, paper, paper-rounded (default refit)"),
    "tokens": ("count", "tokens of the run, or of a step for `flops` (default: as the config says)"),
    "mfu": ("share", "model FLOPs utilisation"),
    "tflops": ("number", "model TFLOP/s that one GPU achieves"),
    "convention": ("convention", "6N, 8N, seed, palm or causal (default: palm, or 6N where only --params are known)"),
    "goodput": ("share", "share of the time that makes progress (default 1)"),
    "price": ("number", "price of a GPU-hour"),
    "probability": ("share", "share of GPUs that fail in --interval"),
    "interval": ("seconds", "interval of --probability (default 1h)"),
    "failures": ("number", "failures that were seen, with --period"),
    "period": ("seconds", "time in which they were seen"),
    "mtbf": ("seconds", "mean time between failures of the whole run"),
    "save": ("seconds", "how long a save stops the run"),
    "restart": ("seconds", "how long a restart takes (default 10m)"),
    "every": ("seconds", "time between checkpoints to compare with"),
    "write-gbs": ("number", "GB/s that checkpoints are written at"),
    "recipe": ("recipe", "precision and optimizer: adamw, adamw-fp32, adamw-bf16, adamw-8bit, lion, … (default adamw)"),
    "sequences": ("count", "sequences at once (default 1)"),
    "cache-value-bytes": ("number", "bytes of a cached value (default 2)"),
    "rows": ("number", "documents"),
    "mean-length": ("number", "characters of a document on average"),
    "tokens-per-character": ("number", "tokens of a character: English about 0.25, Chinese about 0.6"),
    "epochs": ("number", "passes over the text (default 1)"),
}
"""Flag -> its kind and its help."""

SHAPE = (
    *("params", "active", "layers", "hidden-size", "intermediate-size", "heads", "kv-heads", "head-dim", "vocab-size"),
    *("experts", "experts-per-token", "expert-size", "shared-experts", "dense-layers", "latent", "seq-len"),
)
SPEED = "gpus gpu peak-tflops mfu tflops tokens-per-second convention goodput"
VERBS: dict[str, tuple[str, str, str]] = {
    "params": ("parameters of a model by part", "MODEL", ""),
    "flops": ("FLOPs per token in every convention, and by group", "MODEL", "tokens lengths gpu peak-tflops"),
    "mfu": (
        "utilisation (MFU) of a speed in every convention",
        "MODEL",
        "tokens-per-second step-seconds tokens-per-step gpus gpu peak-tflops lengths recompute",
    ),
    "batch": (
        "replicas, global batch and tokens of a step",
        "gpus micro-batch",
        "seq-len accumulation tensor pipeline context",
    ),
    "comm": (
        "bytes that a rank sends in a step, and how long that takes",
        "MODEL gpus",
        "zero tensor pipeline context expert replicas micro-tokens micro-steps value-bytes link-gbs latency-us gpu",
    ),
    "bubble": (
        "idle share of a pipeline under every schedule",
        "pipeline micro-batches",
        "virtual forward input-gradient weight-gradient",
    ),
    "roofline": (
        "what limits a matmul: arithmetic or memory; its tiles and waves",
        "",
        "m n k gpu peak-tflops bandwidth-gbs value-bytes tile",
    ),
    "chinchilla": ("best parameters and tokens for a number of FLOPs", "", "flops params tokens law"),
    "time": ("how long a run takes", "MODEL", f"tokens {SPEED}"),
    "cost": ("what a run costs", "MODEL price", f"tokens {SPEED}"),
    "failure": (
        "how likely a failure is, and the time between failures",
        "gpus",
        "probability interval failures period",
    ),
    "checkpoint": ("how often to save (Young, Daly), and the goodput", "mtbf", "MODEL save restart every write-gbs"),
    "zero": ("memory of weights, gradients and states by ZeRO stage", "MODEL gpus", "recipe"),
    "inference": (
        "memory and least time of generating: weights, KV cache, 2ND",
        "MODEL",
        "sequences gpu cache-value-bytes",
    ),
    "tokens": ("tokens of a text before it is tokenised", "rows mean-length tokens-per-character", "epochs params"),
}
"""Verb -> summary, the flags it needs, and those it may have. MODEL: a model, or flags of its shape."""
EXAMPLES = {
    "params": "z2a perf params llama-3.1-8b",
    "flops": "z2a perf flops z2all-1b --gpu h200",
    "mfu": "z2a perf mfu --params 1.1e9 --layers 22 --hidden-size 2048 --vocab-size 32000 --seq-len 2048"
    " --tokens-per-second 24000 --gpu a100",
    "batch": "z2a perf batch --gpus 8 --micro-batch 4 --tensor 2 --pipeline 2 --seq-len 2048",
    "comm": "z2a perf comm llama-3.1-8b --gpus 8 --zero 3 --link-gbs 361",
    "bubble": "z2a perf bubble --pipeline 8 --micro-batches 32 --virtual 4",
    "roofline": "z2a perf roofline --gpu h100 --m 8192 --n 14336 --k 4096",
    "chinchilla": "z2a perf chinchilla --flops 5.76e23",
    "time": "z2a perf time gpt-3 --tokens 300B --gpus 1024 --tflops 140 --convention 6N",
    "cost": "z2a perf cost z2all-1b --tokens 26B --gpus 8 --gpu h200 --mfu 0.55 --price 3",
    "failure": "z2a perf failure --gpus 16384 --failures 419 --period 54d",
    "checkpoint": "z2a perf checkpoint --mtbf 3.1h --save 60s --restart 10m",
    "zero": "z2a perf zero --params 7.5B --gpus 64",
    "inference": "z2a perf inference llama-3.1-8b --gpu h100 --sequences 8",
    "tokens": "z2a perf tokens --rows 1e6 --mean-length 2400 --tokens-per-character 0.25",
}


def register(inner: Subparsers) -> None:
    """Add the verbs."""
    for name, (summary, needs, may) in VERBS.items():
        takes_model = "MODEL" in f"{needs} {may}"
        parser = add_verb(inner, name, summary, EXAMPLES[name], _calculate, takes_overrides=takes_model)
        parser.set_defaults(calculator=name)
        if takes_model:
            parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP} (also deepseek-v3, gpt-3)")
            parser.add_argument("--tied", action="store_true", help="the head is the embedding")
            parser.add_argument("--gpt", action="store_true", help="GPT: biases, learned positions, tied head")
        for flag in _flags(name):
            kind, about = FLAGS[flag]
            parser.add_argument(f"--{flag}", default=None, metavar=KINDS[kind][1], help=about)
        add_json(parser)


def _flags(verb: str) -> list[str]:
    _, needs, may = VERBS[verb]
    named = [*needs.split(), *may.split()]
    return [flag for flag in dict.fromkeys([*named, *(SHAPE if "MODEL" in named else ())]) if flag != "MODEL"]


def _calculate(arguments: argparse.Namespace) -> None:
    from zero2all.common.schema import MISSING, Problem
    from zero2all.estimate import model_calculators, run_calculators
    from zero2all.estimate.answer import ImpossibleError

    name: str = arguments.calculator
    _, needs, may = VERBS[name]
    problems: list[Problem] = []
    values = _read(arguments, _flags(name), problems)
    for flag in needs.split():
        if flag != "MODEL" and getattr(arguments, flag.replace("-", "_")) is None:
            kind, about = FLAGS[flag]
            problems.append(Problem(f"--{flag}", MISSING, f"{t(about)}: {t(KINDS[kind][2])}"))
    if "MODEL" in f"{needs} {may}":
        model = _model(arguments, values, problems, is_needed="MODEL" in needs)
        kept = {"seq_len"} if name in ("flops", "mfu", "time", "cost", "inference") else set()
        kept |= {"experts_per_token"} if name == "comm" else set()
        shape = {flag.replace("-", "_") for flag in SHAPE} - kept
        values = {flag: value for flag, value in values.items() if flag not in shape} | {"model": model}
    if problems:
        raise ImpossibleError(problems)
    module = model_calculators if name in model_calculators.VERBS else run_calculators
    show(getattr(module, name)(**values), arguments.json)


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


def _model(
    arguments: argparse.Namespace, values: dict[str, Any], problems: list[Problem], is_needed: bool
) -> Counted | None:
    """The model that was named, or that the flags describe."""
    from zero2all.common.schema import MISSING, Problem
    from zero2all.estimate.parameters import KNOWN_MODELS, counted, counted_by_total, counted_gpt

    beside = ("seq-len", "experts-per-token")  # of use beside a named model too
    given = [flag for flag in SHAPE if flag not in beside and getattr(arguments, flag.replace("-", "_")) is not None]
    seq_len = values.get("seq_len")
    if arguments.model is not None:
        given += [flag for flag in ("tied", "gpt") if getattr(arguments, flag)]
        if given:
            flags = ", ".join(f"--{flag}" for flag in given)
            problems.append(Problem("MODEL", arguments.model, f"no {flags} beside it; change it by --model.FIELD"))
        if arguments.model in KNOWN_MODELS and not arguments.overrides:
            return KNOWN_MODELS[arguments.model]
        return _configured(arguments, problems)
    if not given:
        if is_needed or arguments.overrides:
            numbers = "--hidden-size, --layers, --heads, --intermediate-size, --vocab-size"
            rule = f"a model, or its numbers: --params; or {numbers}"
            problems.append(Problem("MODEL", MISSING, rule))
        return None
    if any(flag.replace("-", "_") not in values for flag in given):
        return None  # it is named among the problems already
    get = values.get
    if arguments.gpt:
        names = ("hidden_size", "layers", "vocab_size", "seq_len")
        if all(map(get, names)):
            return counted_gpt(*(values[name] for name in names))
        problems.append(
            Problem("--gpt", MISSING, "--hidden-size, --layers, --vocab-size and --seq-len, for its positions")
        )
        return None
    if "params" in values:
        tables = 2 * get("vocab_size", 0) * get("hidden_size", 0)
        if get("active", 0) > values["params"]:
            problems.append(Problem("--active", get("active"), f"at most the parameters ({values['params']:,})"))
        if tables >= values["params"]:
            rule = f"tables smaller than the model: 2 x {get('hidden_size')} wide, and {values['params']:,} parameters"
            problems.append(Problem("--vocab-size", get("vocab_size"), rule))
        return counted_by_total(
            values["params"], get("active"), get("layers"), get("hidden_size"), get("vocab_size"), seq_len
        )
    shape = _plain_shape(arguments, values, problems)
    return None if shape is None else counted(*shape)


def _plain_shape(arguments: argparse.Namespace, values: dict[str, Any], problems: list[Problem]) -> Any:
    """The model that dimensions describe, as `counted` takes it; None where they do not fit together."""
    from zero2all.common.schema import MISSING, Problem
    from zero2all.estimate.parameters import Latent, Unpadded
    from zero2all.model.config import MoeConfig

    inner = "expert_size" if "experts" in values and "dense_layers" not in values else "intermediate_size"
    needed = ("hidden_size", "layers", "heads", "vocab_size", inner)
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in values]
    if missing:
        problems.append(Problem(", ".join(missing), MISSING, "all dimensions of the model, or --params alone"))
        return None
    experts = {name: values[name] for name in MoeConfig.__dataclass_fields__ if name in values}
    plain = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "head_dim")
    config = Unpadded(
        **{name: values[name] for name in plain if name in values},
        kv_heads=values.get("kv_heads", values["heads"]),
        tied_embeddings=arguments.tied,
        moe=MoeConfig(**experts),
    )
    latent = values.get("latent")
    if latent is not None and len(latent) != len(Latent.__dataclass_fields__):
        problems.append(Problem("--latent", latent, "five widths: query rank, kv rank, plain, rope, value"))
        return None
    wrong = [] if latent else config.problems("model")
    for problem in wrong:
        flag = problem.field.rpartition(".")[2].replace("_", "-")
        expected = re.sub(r"model\.(?:moe\.)?(\w+)", lambda name: f"--{name[1].replace('_', '-')}", problem.expected)
        problems.append(Problem(f"--{flag}", problem.value, expected))
    if wrong:
        return None
    return config, "plain numbers", values.get("seq_len"), Latent(*map(int, latent)) if latent else None


def _configured(arguments: argparse.Namespace, problems: list[Problem]) -> Counted | None:
    from dataclasses import replace

    from zero2all.common.errors import UsageError
    from zero2all.config import ConfigError
    from zero2all.estimate.memory import checkpoint_bytes
    from zero2all.estimate.parameters import counted
    from zero2all.estimate.run.models import load_model_config

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
    saved = checkpoint_bytes(
        model, optim.kind, config.train.precision, optim.adafactor_beta1 > 0, optim.bf16_rounding == "kahan"
    )
    return replace(
        found,
        step_tokens=step,
        run_tokens=step * config.train.steps,
        checkpoint_bytes=saved,
        optimizer=optim.kind,
    )


def show(answer: Answer, json_path: Path | None) -> None:
    """Print an answer, or write it as JSON (`-`: print that)."""
    from zero2all.cli.table import print_table

    if write_json_result(json_path, answer.as_json()):
        return
    print_table(answer.rows(), answer.title)
    for line in (answer.convention, *answer.notes):
        print(t(line))
