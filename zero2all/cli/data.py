"""`z2a data show`, `stats`, `verify`, `export` and `import`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import Subparsers, add_group, add_output, add_verb, add_work, count, whole, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.config import RunConfig


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    inner = add_group(verbs, "data", "show, count, verify, export and import packed data", STATS_EXAMPLE)
    _register_show(inner)
    _register_stats(inner)
    example = "z2a data verify --work my-workspace"
    add_work(add_verb(inner, "verify", "read every packed file and report damage", example, _verify))
    _register_exchange(inner)


STATS_EXAMPLE = "z2a data stats --work my-workspace --config z2all-100m --tokens 2000000000"
SHOW_EXAMPLES = """z2a data show --at 12345 --config my-run --work my-workspace
  z2a data show --source zh --sample 7 --data.seq_len 512 --work my-workspace"""
IMPORT_EXAMPLES = """z2a data import pile=data/pile_text_document --from megatron --channel en --work my-workspace
  z2a data import own=tokens.bin --from numpy --dtype uint16 --work my-workspace"""


def _register_show(inner: Subparsers) -> None:
    summary = "print a sample: its documents, where each begins and ends, and where it came from"
    show = add_verb(inner, "show", summary, SHOW_EXAMPLES, _show)
    show.set_defaults(takes_overrides=True, reads_config=True)
    add_work(show)
    show.add_argument("--at", type=whole(0), default=None, metavar="N", help="number of the sample in the run, from 0")
    _add_config(show)
    show.add_argument("--source", default=None, metavar="NAME", help="instead of --at: a sample of this source")
    show.add_argument("--sample", type=whole(0), default=0, metavar="N", help="which one of --source (default 0)")
    show.add_argument("--split", choices=("train", "valid"), default="train", help="split of --source (default train)")


def _register_stats(inner: Subparsers) -> None:
    summary = "count tokens, document lengths, tokens lost in packing, and epochs per source"
    stats = add_verb(inner, "stats", summary, STATS_EXAMPLE, _stats)
    stats.set_defaults(takes_overrides=True, reads_config=True)
    add_work(stats)
    _add_config(stats)
    stats.add_argument(
        "--tokens", type=count, metavar="N", help="tokens that the run reads (default: as in the config)"
    )
    add_output(stats, "--json", help="also write the figures as JSON")
    add_output(stats, "--png", help="also draw the figures")


def _register_exchange(inner: Subparsers) -> None:
    example = "z2a data export --to megatron --out exported --work my-workspace"
    export = add_verb(inner, "export", "write packed sources as token files that other tools read", example, _export)
    export.add_argument("sources", nargs="*", metavar="SOURCE", help="which sources (default: all)")
    export.add_argument("--to", choices=("megatron", "numpy"), required=True, help="the format")
    add_output(export, "--out", is_folder=True, required=True, help="folder to write to")
    add_work(export)

    summary = "make a packed source of a token file from elsewhere"
    bring = add_verb(inner, "import", summary, IMPORT_EXAMPLES, _import)
    bring.add_argument(
        "source", metavar="NAME=PATH", help="name of the new source, and Megatron's PREFIX or the .npy or .bin file"
    )
    bring.add_argument("--from", dest="form", choices=("megatron", "numpy"), required=True, help="the format")
    about = "channel its loss is reported under (default: as in the .json beside the file, else its name)"
    bring.add_argument("--channel", default=None, help=about)
    bring.add_argument("--split", choices=("train", "valid"), default="train", help="which split (default train)")
    bring.add_argument("--dtype", metavar="TYPE", help="type of the tokens in a plain .bin file: uint16, int32, …")
    bring.add_argument(
        "--tokenizer-fingerprint", metavar="HEX", help="fingerprint of the tokenizer that made the tokens, to check it"
    )
    add_work(bring)


def _add_config(parser: argparse.ArgumentParser) -> None:
    about = "a run of this workspace, a preset or a YAML file (default: sources weighted by their tokens)"
    parser.add_argument("--config", metavar="CONFIG", help=about)


def config_of(arguments: argparse.Namespace, workspace: Workspace) -> tuple[RunConfig, bool]:
    """The config that --config names, and whether it is that of a run."""
    from zero2all.common.schema import apply_overrides
    from zero2all.config import config_from_values, load_config
    from zero2all.train.saved_config import CONFIG_FILE

    if arguments.config is None:
        values: dict[str, Any] = {}
        problems: list[Any] = []
        apply_overrides(values, arguments.overrides, problems)
        data = values.get("data")
        if isinstance(data, dict) and "seq_len" in data and "train" not in values:
            values["train"] = {"tokens_per_step": data["seq_len"]}  # no run, no steps: any length will do
        return config_from_values(values, "(defaults and command line)", problems), False
    run = workspace.run(arguments.config) / CONFIG_FILE
    return load_config(run if run.exists() else arguments.config, arguments.overrides), run.exists()


# ---- looking --------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import TEXT_MARKS, terminal_safe
    from zero2all.packed.remote import packed_root
    from zero2all.packed.shard_format import open_split, packed_sources
    from zero2all.packed.show import sample_at, split_sample
    from zero2all.tokenizer import load_tokenizer
    from zero2all.train.setup import open_run_data

    workspace = workspace_of(arguments)
    config, is_run = config_of(arguments, workspace)
    if arguments.source is not None:
        root = packed_root(workspace.packed, config.data)
        known = packed_sources(root)
        if arguments.source not in known:
            raise UsageError(f"There is no packed source `{arguments.source}`; there are: {', '.join(known)}.")
        split = open_split(root, arguments.source, arguments.split)
        sample = split_sample(split, arguments.sample, config.data.seq_len, config.data.packing, workspace.corpus)
    elif arguments.at is not None:
        data, end = open_run_data(config, workspace, is_run)
        sample = sample_at(data, arguments.at, workspace.corpus, None if arguments.config is None else end)
    else:
        raise UsageError("Name a sample: --at N of a run, or --source NAME --sample N.")
    tokenizer = load_tokenizer(workspace.tokenizer)
    print(t(sample.heading()))
    for document in sample.documents:
        count = t(f"tokens {document.column:,} to {document.column + len(document.tokens) - 1:,}")
        if document.number is None:
            print(t(f"── padding, {count}"))
            continue
        origin = document.origin.in_words() if document.origin is not None else "origin unknown"
        title = f"  {document.origin.title}" if document.origin is not None and document.origin.title else ""
        print(t(f"── document {document.number:,}, {count}; {origin}{terminal_safe(title, ' ')}"))
        print(terminal_safe(document.text(tokenizer), keep=TEXT_MARKS))


def _stats(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import write_json
    from zero2all.packed.remote import packed_root
    from zero2all.packed.stats import draw_stats, packed_stats
    from zero2all.train.setup import open_run_data

    workspace = workspace_of(arguments)
    config, is_run = config_of(arguments, workspace)
    data, budget = None, arguments.tokens
    if arguments.config is not None or budget is not None:
        data, end = open_run_data(config, workspace, is_run)
        budget = budget or end
    stats = packed_stats(packed_root(workspace.packed, config.data), config.data.seq_len, data, budget)
    _print_stats(stats)
    if arguments.json is not None:
        write_json(arguments.json, stats)
        print(arguments.json)
    if arguments.png is not None:
        draw_stats(stats, arguments.png)
        print(arguments.png)


def _print_stats(stats: dict[str, Any]) -> None:
    from zero2all.cli.table import print_table
    from zero2all.common.progress import human_count

    rows = [["source", "channel", "split", "documents", "tokens", "share", "bytes/token", "mean length", "longest"]]
    for row in stats["sources"]:
        share = f"{row['share']:.1%}" if "share" in row else ""
        figures = [f"{row['documents']:,}", f"{row['tokens']:,}", share, f"{row['bytes_per_token']:.2f}"]
        lengths = [f"{row['mean_length']:,.0f}", f"{row['longest']:,}"]
        rows.append([row["source"], row["channel"], row["split"], *figures, *lengths])
    print_table(rows, "tokens")
    channels = [["channel", "documents", "tokens", "share"]]
    for name, channel in stats["channels"].items():
        channels.append([name, f"{channel['documents']:,}", f"{channel['tokens']:,}", f"{channel['share']:.1%}"])
    print_table(channels, "channels (train)")
    lost = [["source", "packing", "samples", "tokens lost", "share lost", "documents cut", "counted in the loss"]]
    for row in stats["sources"]:
        for name, kind in row["packing"].items() if row["split"] == "train" else ():
            name = f"{name} {stats['seq_len']}" if name == "concat" else name
            cut, counted = f"{kind['documents_cut_share']:.1%}", f"{row['counted_share']:.1%}"
            figures = [f"{kind['samples']:,}", f"{kind['lost_tokens']:,}", f"{kind['lost_share']:.3%}", cut, counted]
            lost.append([row["source"], name, *figures])
    print_table(lost, "packing")
    if "budget" in stats:
        epochs = [["source", "channel", "tokens", "read", "share", "epochs"]]
        for name, source in stats["budget"]["sources"].items():
            counts = [f"{source['tokens']:,}", f"{source['read']:,}"]
            epochs.append([name, source["channel"], *counts, f"{source['share']:.2%}", f"{source['epochs']:.2f}"])
        print_table(epochs, f"a run of {human_count(stats['budget']['tokens'])} tokens")


def _verify(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import human_bytes
    from zero2all.common.progress import progress
    from zero2all.packed.verify import packed_bytes, verify_packed
    from zero2all.tokenizer import load_tokenizer

    workspace = workspace_of(arguments)
    has_tokenizer = (workspace.tokenizer / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(workspace.tokenizer).fingerprint if has_tokenizer else None
    total = packed_bytes(workspace.packed)
    with progress("verify", total=total, unit="B") as bar:
        problems = verify_packed(workspace.packed, tokenizer, bar.advance)
    if problems:
        lines = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
        raise BadInputError(f"The packed data in {workspace.packed} is damaged:\n{lines}\nRun `z2a pack` again.")
    print(t(f"{workspace.packed}: {human_bytes(total)}, no damage found"))


# ---- in and out -----------------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> None:
    from zero2all.common.records import SPLITS
    from zero2all.common.schema import nearest_hint
    from zero2all.packed.foreign import export_split
    from zero2all.packed.shard_format import open_split, packed_sources

    workspace = workspace_of(arguments)
    known = packed_sources(workspace.packed)
    for name in arguments.sources:
        if name not in known:
            raise UsageError(f"There is no packed source `{name}`. {nearest_hint(name, known)}")
    for name in arguments.sources or known:
        for split in SPLITS:
            opened = open_split(workspace.packed, name, split)
            if opened.tokens:
                for path in export_split(opened, arguments.out, arguments.to):
                    print(path)
                if opened.masks is not None and arguments.to == "megatron":
                    print(t(f"{name}/{split}: this format has no place for the loss mask, so it was left out"))


def _import(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import counted
    from zero2all.packed.foreign import Import, import_source
    from zero2all.tokenizer import load_tokenizer

    name, equals, path = arguments.source.partition("=")
    if not equals or not path:
        raise UsageError(f"`{arguments.source}` is not understood. Write NAME=PATH, such as pile=data/pile_document.")
    workspace = workspace_of(arguments, create=True)
    tokenizer = load_tokenizer(workspace.tokenizer)
    channel, split, fingerprint = arguments.channel, arguments.split, arguments.tokenizer_fingerprint
    asked = Import(name, Path(path), arguments.form, channel, split, arguments.dtype, fingerprint)
    manifest = import_source(workspace.packed, tokenizer, asked)
    print(
        t(
            f"{name}/{arguments.split}: {counted(manifest['documents'], 'document')}, {manifest['tokens']:,} tokens, "
            f"channel {manifest['channel']}"
        )
    )
