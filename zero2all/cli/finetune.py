"""`z2a sft`: teach a model to answer."""

from __future__ import annotations

import argparse

from zero2all.cli.verb import verb
from zero2all.common.progress import say, tell

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
    from pathlib import Path

    from zero2all.common.workspace import Workspace
    from zero2all.finetune.sft import SftOptions, prepare_sft

    name = arguments.name or f"{Path(arguments.model).expanduser().resolve().name}-sft"
    options = SftOptions(
        name,
        arguments.data,
        arguments.epochs,
        arguments.lr,
        arguments.seq_len,
        arguments.replay,
        arguments.valid_share,
        arguments.step,
        arguments.lora,
        arguments.overrides,
    )
    prepared = prepare_sft(arguments.model, Workspace(arguments.work), options)
    report, config = prepared.report, prepared.config
    forms = ", ".join(f"{form} {count:,}" for form, count in report["forms"].items())
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
