"""The packed data of a workspace: `z2a pack` writes it, `z2a data` shows, counts, verifies, exports and imports it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.evaluate import look_for, named_tasks
from zero2all.cli.terminal import has_colour, print_table
from zero2all.cli.verb import TYPES, group, verb, whole, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, counted, human_count, progress, say, tell, terminal_safe

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.config import RunConfig

group("""
    data: show, count, verify, export and import packed data

    z2a data stats --work my-workspace --config z2all-100m --tokens 2000000000
    """)


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


@verb(
    """
    data show: print a sample: its documents, where each begins and ends, and where it came from

    --work
    --at N:int>=0               number of the sample in the run, from 0
    --config CONFIG             a run of this workspace, a preset or a YAML file (default: sources weighted by their
        tokens)
    --source NAME               instead of --at: a sample of this source
    --sample N:int>=0 =0        which one of --source (default 0)
    --split train|valid =train  split of --source (default train)

    z2a data show --at 12345 --config my-run --work my-workspace
    z2a data show --source zh --sample 7 --data.seq_len 512 --work my-workspace
    """,
    defaults={"takes_overrides": True, "reads_config": True},
)
def _show(arguments: argparse.Namespace) -> None:
    from zero2all.packed.remote import packed_root
    from zero2all.packed.shard_format import open_split, packed_sources
    from zero2all.packed.show import sample_at, split_sample
    from zero2all.tokenizer import load_tokenizer
    from zero2all.train.run_data import open_run_data

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
    tell(sample.heading())
    for document in sample.documents:
        count = t(f"tokens {document.column:,} to {document.column + len(document.tokens) - 1:,}")
        if document.number is None:
            tell(f"── padding, {count}")
            continue
        origin = document.origin.in_words() if document.origin is not None else "origin unknown"
        title = f"  {document.origin.title}" if document.origin is not None and document.origin.title else ""
        tell(f"── document {document.number:,}, {count}; {origin}{terminal_safe(title, ' ')}")
        if has_colour() and not document.counted.all():  # what is learned stands out
            shown = ((terminal_safe(text, keep=TEXT_MARKS), counts) for text, counts in document.parts(tokenizer))
            print("".join(f"\x1b[32m{text}\x1b[0m" if counts else f"⟦{text}⟧" for text, counts in shown))
        else:
            print(terminal_safe(document.text(tokenizer), keep=TEXT_MARKS))


@verb(
    """
    data stats: count tokens, document lengths, tokens lost in packing, and epochs per source

    --work
    --config CONFIG   a run of this workspace, a preset or a YAML file (default: sources weighted by their tokens)
    --tokens N:count  tokens that the run reads (default: as in the config)
    --json FILE:out   also write the figures as JSON

    z2a data stats --work my-workspace --config z2all-100m --tokens 2000000000
    """,
    defaults={"takes_overrides": True, "reads_config": True},
)
def _stats(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import write_json
    from zero2all.packed.remote import packed_root
    from zero2all.packed.show import packed_stats
    from zero2all.train.run_data import open_run_data

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


def _print_stats(stats: dict[str, Any]) -> None:
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


@verb("""
    data verify: read every packed file and report damage

    --work

    z2a data verify --work my-workspace
    """)
def _verify(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import human_bytes
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
    tell(f"{workspace.packed}: {human_bytes(total)}, no damage found")


@verb("""
    data export: write packed sources as token files that other tools read

    sources* SOURCE       which sources (default: all)
    --to! megatron|numpy  the format
    --out! DIR:outdir     folder to write to
    --work

    z2a data export --to megatron --out exported --work my-workspace
    """)
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
                    tell(f"{name}/{split}: this format has no place for the loss mask, so it was left out")


@verb("""
    data import: make a packed source of a token file from elsewhere

    source NAME=PATH             name of the new source, and Megatron's PREFIX or the .npy or .bin file
    --from/form! megatron|numpy  the format
    --channel CHANNEL            channel its loss is reported under (default: as in the .json beside the file, else its
        name)
    --split train|valid =train   which split (default train)
    --dtype TYPE                 type of the tokens in a plain .bin file: uint16, int32, …
    --tokenizer-fingerprint HEX  fingerprint of the tokenizer that made the tokens, to check it
    --work

    z2a data import pile=data/pile_text_document --from megatron --channel en --work my-workspace
    z2a data import own=tokens.bin --from numpy --dtype uint16 --work my-workspace
    """)
def _import(arguments: argparse.Namespace) -> None:
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
    tell(
        f"{name}/{arguments.split}: {counted(manifest['documents'], 'document')}, {manifest['tokens']:,} tokens, "
        f"channel {manifest['channel']}"
    )


MOST_UNKNOWN = 0.001
"""Share of unknown tokens above which packing warns."""


TYPES["lengths"] = lambda text: tuple(whole(2)(part) for part in text.split(","))


@verb("""
    pack: encode the corpus into token shards for training

    --work
    --best-fit N,…:lengths =()  also build the index of data.packing best_fit for these sequence lengths
    --learn-prompts             in conversations, count every token in the loss (default: only what the assistant
        writes)
    --encoder NAME =auto        encoder: auto, fastokens, numba or tokenizers; all give the same
        tokens (default auto: the fastest that runs here and agrees with tokenizers)
    --strict-encoder            stop if the named encoder cannot be used (default: use another)
    --engine local|ray =local   where tasks run (default local)
    --workers --address
    --against NAME,…:names =()  then search the training text for items of these benchmarks (see contamination.json)
    --data

    z2a pack --work my-workspace
    z2a pack --work my-workspace --best-fit 2048,4096 --workers 8
    z2a pack --work my-workspace --engine ray --address auto
    """)
def _pack(arguments: argparse.Namespace) -> None:
    from zero2all.common.engine import EngineConfig
    from zero2all.packed.writer import PackOptions, pack_corpus
    from zero2all.tokenizer.encoders import EncoderConfig

    workspace = workspace_of(arguments)
    tasks = named_tasks(arguments.against, arguments.data)  # first: a wrong name should not cost the packing
    options = PackOptions(
        learn_prompts=arguments.learn_prompts,
        best_fit=arguments.best_fit,
        encoder=EncoderConfig(arguments.encoder, arguments.strict_encoder),
    )
    engine = EngineConfig(arguments.engine, arguments.workers, arguments.address)
    manifests = pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed, options, engine)
    for name, manifest in manifests.items():
        ratio = manifest["text_bytes"] / max(1, manifest["tokens"])
        talks = t(f"  {manifest['conversations']:,} conversations") if manifest["conversations"] else ""
        unknown = manifest.get("unknown_tokens", 0)
        talks += t(f"  {unknown:,} <unk>") if unknown else ""
        tell(
            f"{name:<24} {manifest['documents']:>9,} documents  {human_count(manifest['tokens']):>8} tokens  "
            f"{ratio:.2f} bytes/token  channel {manifest['channel']}{talks}"
        )
        if unknown > MOST_UNKNOWN * manifest["tokens"]:
            share = f"{unknown / manifest['tokens']:.1%}"
            say(
                f"Warning: {share} of the tokens of {name} are <unk>: the tokenizer cannot spell this text, and what "
                "it cannot spell is lost. Bits per byte of this source will look too good. Add what is missing with "
                "`z2a tokenizer extend`, or use a tokenizer with byte fallback."
            )
    for reason, splits in _by_encoder(manifests).items():
        tell(f"{', '.join(splits)}: encoded by {reason}")
    if tasks:
        look_for(workspace, tasks, engine)


def _by_encoder(manifests: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Encoder and reason, and the splits that were packed with it."""
    found: dict[str, list[str]] = {}
    for name, manifest in manifests.items():
        choice = manifest["encoder"]
        parity = choice["parity"]
        texts = parity["documents"] + parity["hard_strings"] if parity else 0
        reasons = [*choice["reason"].split("; "), *([f"equal to the reference on {texts:,} texts"] if parity else [])]
        found.setdefault(f"{choice['got']} ({'; '.join(map(t, reasons))})", []).append(name)
    return found
