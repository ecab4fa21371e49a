"""`z2a sft`, `z2a dpo`, `z2a rl`: teach a model to answer, which answers are better, and what earns a reward."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import verb
from zero2all.common.errors import UsageError
from zero2all.common.progress import say, tell

if TYPE_CHECKING:
    from zero2all.finetune.prepare import PreparedRun

SHOWN_REASONS = 6


@verb("""
    sft: teach a model to answer: fine-tune it on conversations

    model MODEL                   run of the workspace, or Hugging Face folder
    --work
    --data+! PATH:path            files or folders of conversations: messages, ShareGPT, Alpaca, prompt and completion,
        chat logs; JSON, JSONL, CSV or parquet
    --name NAME                   name of the new run (default: MODEL-sft)
    --epochs X:float>0 =2         how often the conversations are read (default 2)
    --lr X:float>0                highest learning rate (default: a third of the base run's; for imported models by
        their size)
    --seq-len N:int>=2            tokens of a row; longer conversations are left out (default: the base run's)
    --replay X:float>=0..0.99 =0  share of the tokens that is text of the base run, so that it is not forgotten
        (default 0)
    --valid-share X:float>=0..0.5 =0.02  share of the conversations that is held out (default 0.02)
    --step
    --lora RANK:int>=1            train adapters of this rank (such as 16) instead of all weights: far less memory, ten
        times the learning rate; finetune.lora.* has the rest
    --teacher RUN                 learn the probabilities of this run or Hugging Face folder, too (distillation);
        finetune.distill.* has the rest
    --prepare                     write the run and stop; `z2a train` begins it
    --section.field

    z2a sft my-run --data chats.jsonl --work my-workspace
    z2a sft my-run --data chats.jsonl --lora 16 --work my-workspace
    z2a sft small --teacher large --data chats.jsonl --work my-workspace
    z2a sft path/to/huggingface-folder --data alpaca.json more/ --work new-workspace --epochs 3
    """)
def _sft(arguments: argparse.Namespace) -> int:
    from zero2all.common.workspace import Workspace
    from zero2all.finetune.sft import SftOptions, prepare_sft

    asked = {name: getattr(arguments, name) for name in ("replay", "lora", "teacher")}
    options = SftOptions(**_given(arguments, "sft"), **asked)
    prepared = prepare_sft(arguments.model, Workspace(arguments.work), options)
    return _begin(arguments, prepared)


@verb("""
    dpo: teach a model which of two answers is better (direct preference optimisation)

    model MODEL                   run of the workspace, such as one of `z2a sft`, or Hugging Face folder
    --work
    --data+! PATH:path            files or folders of pairs: prompt, chosen and rejected, as texts or messages; JSON,
        JSONL, CSV or parquet
    --name NAME                   name of the new run (default: MODEL-dpo)
    --epochs X:float>0 =1         how often the pairs are read (default 1)
    --lr X:float>0                highest learning rate, of AdamW (default: 1e-6, above 2 B parameters 5e-7)
    --seq-len N:int>=2            tokens of an answer with its prompt; longer pairs are left out (default: the base
        run's)
    --valid-share X:float>=0..0.5 =0.02  share of the prompts that is held out (default 0.02)
    --step
    --beta X:float>0              how strongly answers are held to the base's (default 0.1, with --normalise 5)
    --normalise                   divide the log-probability of an answer by its tokens
    --label-smoothing X:float>=0..0.49  share of the pairs whose order is taken to be wrong (default 0)
    --sft-weight X:float>=0       times the loss of the chosen answers, added (default 0)
    --prepare                     write the run and stop; `z2a train` begins it
    --section.field

    z2a dpo my-run-sft --data pairs.jsonl --work my-workspace
    """)
def _dpo(arguments: argparse.Namespace) -> int:
    from zero2all.common.workspace import Workspace
    from zero2all.finetune.dpo import prepare_dpo
    from zero2all.finetune.sft import SftOptions

    names = ("beta", "normalise", "label_smoothing", "sft_weight")
    asked = {name: value for name in names if (value := getattr(arguments, name))}
    given = _given(arguments, "dpo")
    given["overrides"] = [*(f"--finetune.dpo.{name}={value}" for name, value in asked.items()), *given["overrides"]]
    prepared = prepare_dpo(arguments.model, Workspace(arguments.work), SftOptions(**given))
    return _begin(arguments, prepared)


@verb("""
    rl: let a model try, and teach it what earned a reward (reinforcement learning, GRPO)

    model MODEL                   run of the workspace, such as one of `z2a sft`, or Hugging Face folder
    --work
    --data+ PATH:path             files or folders of prompts: prompt or messages, with `answer` (or `tests`) beside it;
        JSON, JSONL, CSV or parquet
    --arithmetic DIGITS           ask for sums of numbers with so many digits, such as 3 or 2-4
    --reward+ NAME[=WEIGHT]       what is rewarded: exact, number, format, code, calls, or FILE.py:FUNCTION, which gets
        the answer and its row (default: exact; with --arithmetic number). An answer is right where the first one is
        at least 1
    --tools+ NAME                 functions that are run where an answer calls them: calculator
    --name NAME                   name of the new run (default: MODEL-rl)
    --steps N:int>=2 =200         steps, each with answers of its own (default 200)
    --prompts N:int>=1            prompts of a step (default 16)
    --answers N:int>=2            answers to each prompt (default 8)
    --max-new-tokens N:int>=1     tokens of an answer (default 256, at most half of a row)
    --lr X:float>0                highest learning rate, of AdamW (default: by size, from 1e-4 to 1e-6)
    --seq-len N:int>=2            tokens of a prompt with its answer; longer prompts are left out (default: the base
        run's)
    --valid-share X:float>=0..0.5 =0.02  share of the prompts that is held out (default 0.02)
    --step
    --prepare                     write the run and stop; `z2a train` begins it
    --section.field

    z2a rl my-run-sft --arithmetic 3 --work my-workspace
    z2a rl my-run-sft --data prompts.jsonl --reward number=1 calls=-0.1 --tools calculator --work my-workspace
    z2a rl my-run-sft --data prompts.jsonl --reward mine.py:score --work my-workspace
    """)
def _rl(arguments: argparse.Namespace) -> int:
    from zero2all.common.workspace import Workspace
    from zero2all.finetune.rl import RlOptions, digits_of, prepare_rl

    arithmetic = None if arguments.arithmetic is None else digits_of(arguments.arithmetic)
    if arithmetic is None and not arguments.data:
        raise UsageError("There is nothing to ask. Name files of prompts with --data, or --arithmetic DIGITS.")
    rewards = dict(map(_reward, arguments.reward or (["number"] if arithmetic else [])))
    names = ("prompts", "answers", "max_new_tokens", "tools")
    asked = {name: value for name in names if (value := getattr(arguments, name))}
    asked |= {"rewards": rewards} if rewards else {}
    given = {**_given(arguments, "rl"), "data": arguments.data or []}
    given["overrides"] = [
        *(f"--finetune.grpo.{name}={json.dumps(value)}" for name, value in asked.items()),
        *given["overrides"],
    ]
    options = RlOptions(**given, steps=arguments.steps, arithmetic=arithmetic)
    return _begin(arguments, prepare_rl(arguments.model, Workspace(arguments.work), options))


def _reward(word: str) -> tuple[str, float]:
    """NAME or NAME=WEIGHT; a file by its whole path, so that the run can continue from elsewhere."""
    name, mark, weight = word.rpartition("=")
    try:
        value = float(weight) if mark else 1.0
    except ValueError:
        raise UsageError(f"--reward {word}: {weight!r} is no number. Write NAME or NAME=WEIGHT.") from None
    path, colon, function = (name if mark else word).rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{function}" if colon else function, value


def _given(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """The options that every way of fine-tuning has."""
    names = ("data", "epochs", "lr", "seq_len", "valid_share", "step", "overrides")
    name = arguments.name or f"{Path(arguments.model).expanduser().resolve().name}-{method}"
    return {"name": name, **{each: getattr(arguments, each) for each in names if hasattr(arguments, each)}}


def _begin(arguments: argparse.Namespace, prepared: PreparedRun) -> int:
    """Say what was read, and train."""
    report, config = prepared.report, prepared.config
    forms = ", ".join(f"{form} {count:,}" for form, count in report["forms"].items())
    if config.finetune.method == "dpo":
        tell(f"pairs: {report['kept']:,} of {report['read']:,} ({forms})")
    elif config.finetune.method == "grpo":
        tell(f"prompts: {report['kept']:,} of {report['read']:,} ({forms})")
    else:
        tell(f"conversations: {report['kept']:,} of {report['read']:,} ({forms})")
    for reason, count in list(report["left_out"].items())[:SHOWN_REASONS]:
        say(f"left out: {count:,} {reason}, such as {report['examples'][reason]}")
    if len(report["left_out"]) > SHOWN_REASONS:
        more = len(report["left_out"]) - SHOWN_REASONS
        say(f"left out for {more:,} more reasons, which left_out.jsonl beside the packed rows names")
    if arguments.valid_share and "valid" not in report["rows"]:
        say(f"None is held out: --valid-share {arguments.valid_share:g} of {report['kept']:,} chose none.")
    learned, tokens = report["learned_tokens"]["train"], report["tokens"]["train"]
    rows = report["rows"]["train"]
    if learned:
        tell(
            f"{tokens:,} tokens in {rows:,} rows of {config.data.seq_len:,}; {learned / tokens:.0%} of them are learned"
        )
    command = ["train", str(prepared.run / "config.yaml"), "--work", str(arguments.work)]
    if arguments.prepare:
        tell(f"{prepared.run}: ready at step 0. Look at the first row, then train:")
        if learned:
            print(f"  z2a data show --at 0 --config {prepared.run} --work {arguments.work}")
        print(f"  z2a {' '.join(command)}")
        return 0
    tell(f"{prepared.run}: {config.train.steps:,} steps, learning rate {config.optim.lr_max:g}")

    from zero2all.cli.main import parse

    begun = parse([*command, "--data.packed", str(config.data.packed)])  # where it lies now
    return int(begun.handler(begun) or 0)
