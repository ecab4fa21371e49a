"""`z2a inspect RUN STEP`: the documents a run read in one step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zero2all.cli.runs import add_run_name
from zero2all.cli.verb import Subparsers, add_verb, whole, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from pathlib import Path

    from zero2all.config import RunConfig
    from zero2all.train.guards.documents import SampleText


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "inspect",
        "print the documents that a run read in one step",
        "z2a inspect my-run 1200 --sample 3 --full --work my-workspace",
        _inspect,
    )
    add_run_name(parser)
    parser.add_argument("step", metavar="STEP", type=whole(1), help="the step, as in the metrics: the first is 1")
    parser.add_argument(
        "--sample", type=whole(0), default=None, metavar="N", help="only this sample of the step, from 0"
    )
    parser.add_argument("--full", action="store_true", help="whole texts, not only the first 300 characters")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _inspect(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import counted
    from zero2all.tokenizer import load_tokenizer
    from zero2all.train.guards.documents import EXCERPT_CHARS, samples_of_step
    from zero2all.train.guards.incident import recorded_row_losses
    from zero2all.train.guards.watch import INCIDENTS_FOLDER
    from zero2all.train.run_data import open_run_data
    from zero2all.train.saved_config import load_run_config

    workspace = workspace_of(arguments)
    run = workspace.existing_run(arguments.run)
    config = load_run_config(run)
    first, end, known = _tokens_of(run, config, arguments.step)
    data, run_end = open_run_data(config, workspace, True)
    if first >= run_end:
        last = arguments.step - 1 - (first - run_end) // config.train.tokens_per_step
        raise UsageError(f"{arguments.run} ends with step {last:,}; there is no step {arguments.step:,}.")
    count = (end - first) // data.segment_at(first).seq_len
    if arguments.sample is not None and arguments.sample >= count:
        raise UsageError(
            f"Step {arguments.step:,} of {arguments.run} has {counted(count, 'sample')}, so there is no sample "
            f"{arguments.sample:,}. Give a number below that."
        )
    tokenizer = load_tokenizer(workspace.tokenizer)
    samples = samples_of_step(
        data,
        first,
        count,
        workspace.corpus,
        lambda ids: tokenizer.decode(ids, skip_control=False),
        None if arguments.sample is None else [arguments.sample],
        recorded_row_losses(run / INCIDENTS_FOLDER, arguments.step),
        None if arguments.full else EXCERPT_CHARS,
    )
    facts = {"run": arguments.run, "step": arguments.step, "tokens": [first, end], **known}
    if arguments.json:
        from dataclasses import asdict

        from zero2all.common.jsonio import dumps_pretty

        print(dumps_pretty({**facts, "samples": [asdict(sample) for sample in samples]}).decode(), end="")
    else:
        _print(facts, count, samples)


def _tokens_of(run: Path, config: RunConfig, step: int) -> tuple[int, int, dict[str, Any]]:
    """First and end token of a step (tokens_per_step may have changed), and what the metrics say of the step."""
    from zero2all.track.reader import read_run

    length = config.train.tokens_per_step
    end = step * length
    known: dict[str, Any] = {"loss": None, "trained": False}
    try:
        series = read_run(run).series.get("loss")
    except BadInputError:  # a run that has no metrics has still an order
        series = None
    if series is None or not len(series):
        return end - length, end, known
    at = int(series.step.searchsorted(step, side="right")) - 1
    if at >= 0:
        end = int(series.tokens[at]) + (step - int(series.step[at])) * length
        if int(series.step[at]) == step:
            known["loss"] = float(series.value[at])
    known["trained"] = bool(step <= int(series.step[-1]))
    return max(0, end - length), end, known


def _print(facts: dict[str, Any], count: int, samples: list[SampleText]) -> None:
    from zero2all.common.progress import TEXT_MARKS, counted, terminal_safe

    loss = "" if facts["loss"] is None else t(f", loss {facts['loss']:.4f}")
    state = "" if facts["trained"] else t(", not trained yet")
    first, end = facts["tokens"]
    rows = counted(count, "sample")
    print(t(f"{facts['run']}, step {facts['step']:,}: {rows}, tokens {first:,} to {end - 1:,}{loss}{state}"))
    for sample in samples:
        begin, behind = sample.split_tokens or (0, 0)
        where = "" if sample.split_tokens is None else t(f", its tokens {begin:,} to {behind - 1:,}")
        row_loss = "" if sample.loss is None else t(f", loss {sample.loss:.4f}")
        print(
            t(
                f"\n── sample {sample.row}: source {sample.source}, channel {sample.channel}, shard {sample.shard}, "
                f"sample {sample.sample:,} of it{where}, epoch {sample.epoch}, stage {sample.stage}{row_loss}"
            )
        )
        for document in sample.documents:
            last = document.first_column + document.tokens - 1
            title = f"  {terminal_safe(document.title)}" if document.title else ""
            gid = "" if document.gid is None else f"; gid {document.gid}"
            origin = f"; {document.origin}" if document.origin else gid
            tokens = t(f"tokens {document.first_column:,} to {last:,}")
            print(t(f"   document {document.number:,}, {tokens}{terminal_safe(origin)}{title}"))
            print(terminal_safe(document.text, keep=TEXT_MARKS) + (" …" if document.is_cut else ""))
