"""`z2a sft` and `z2a dpo`: teach a model to answer, and which answers are better."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import verb
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
    --prepare                     write the run and stop; `z2a train` begins it
    --section.field

    z2a sft my-run --data chats.jsonl --work my-workspace
    z2a sft my-run --data chats.jsonl --lora 16 --work my-workspace
    z2a sft path/to/huggingface-folder --data alpaca.json more/ --work new-workspace --epochs 3
    """)
def _sft(arguments: argparse.Namespace) -> int:
    from zero2all.common.workspace import Workspace
    from zero2all.finetune.sft import SftOptions, prepare_sft

    options = SftOptions(**_given(arguments, "sft"), replay=arguments.replay, lora=arguments.lora)
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


def _given(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """The options that every way of fine-tuning has."""
    from pathlib import Path

    names = ("data", "epochs", "lr", "seq_len", "valid_share", "step", "overrides")
    name = arguments.name or f"{Path(arguments.model).expanduser().resolve().name}-{method}"
    return {"name": name, **{each: getattr(arguments, each) for each in names}}


def _begin(arguments: argparse.Namespace, prepared: PreparedRun) -> int:
    """Say what was read, and train."""
    report, config = prepared.report, prepared.config
    forms = ", ".join(f"{form} {count:,}" for form, count in report["forms"].items())
    if config.finetune.method == "dpo":
        tell(f"pairs: {report['kept']:,} of {report['read']:,} ({forms})")
    else:
        tell(f"conversations: {report['kept']:,} of {report['read']:,} ({forms})")
    for reason, count in list(report["left_out"].items())[:SHOWN_REASONS]:
        say(f"left out: {count:,} {reason}, such as {report['examples'][reason]}")
    learned, tokens = report["learned_tokens"]["train"], report["tokens"]["train"]
    rows = report["rows"]["train"]
    tell(f"{tokens:,} tokens in {rows:,} rows of {config.data.seq_len:,}; {learned / tokens:.0%} of them are learned")
    command = ["train", str(prepared.run / "config.yaml"), "--work", str(arguments.work)]
    if arguments.prepare:
        tell(f"{prepared.run}: ready at step 0. Look at the first row, then train:")
        print(f"  z2a data show --at 0 --config {prepared.run} --work {arguments.work}")
        print(f"  z2a {' '.join(command)}")
        return 0
    tell(f"{prepared.run}: {config.train.steps:,} steps, learning rate {config.optim.lr_max:g}")

    from zero2all.cli.main import parse

    begun = parse([*command, "--data.packed", str(config.data.packed)])  # where it lies now
    return int(begun.handler(begun) or 0)
