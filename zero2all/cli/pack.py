"""`z2a pack`."""

from __future__ import annotations

import argparse
from typing import Any

from zero2all.cli.benchmarks import add_data, look_for, named_tasks, names
from zero2all.cli.verb import Subparsers, add_verb, add_work, whole, workspace_of
from zero2all.common.language import translate as t

EXAMPLES = """z2a pack --work my-workspace
  z2a pack --work my-workspace --best-fit 2048,4096 --workers 8
  z2a pack --work my-workspace --engine ray --address auto"""

MOST_UNKNOWN = 0.001
"""Share of unknown tokens above which packing warns."""


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "pack", "encode the corpus into token shards for training", EXAMPLES, _pack)
    add_work(parser)
    about = "also build the index of data.packing best_fit for these sequence lengths"
    parser.add_argument("--best-fit", type=_lengths, default=(), metavar="N,…", help=about)
    about = "in conversations, count every token in the loss (default: only what the assistant writes)"
    parser.add_argument("--learn-prompts", action="store_true", help=about)
    parser.add_argument(
        "--encoder",
        default="auto",
        metavar="NAME",
        help="encoder: auto, fastokens, numba or tokenizers; all give the same "
        "tokens (default auto: the fastest that runs here and agrees with tokenizers)",
    )
    about = "stop if the named encoder cannot be used (default: use another)"
    parser.add_argument("--strict-encoder", action="store_true", help=about)
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where tasks run (default local)")
    parser.add_argument("--workers", type=whole(1), metavar="N", help="parallel tasks (default: one per core)")
    about = "address of a Ray cluster whose nodes share the workspace (default: start Ray here)"
    parser.add_argument("--address", help=about)
    about = "then search the training text for items of these benchmarks (see contamination.json)"
    parser.add_argument("--against", type=names, default=(), metavar="NAME,…", help=about)
    add_data(parser)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(whole(2)(part) for part in text.split(","))


def _pack(arguments: argparse.Namespace) -> None:
    from zero2all.common.engine import EngineConfig
    from zero2all.common.progress import human_count, say
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
        print(
            t(
                f"{name:<24} {manifest['documents']:>9,} documents  {human_count(manifest['tokens']):>8} tokens  "
                f"{ratio:.2f} bytes/token  channel {manifest['channel']}{talks}"
            )
        )
        if unknown > MOST_UNKNOWN * manifest["tokens"]:
            share = f"{unknown / manifest['tokens']:.1%}"
            say(
                f"Warning: {share} of the tokens of {name} are <unk>: the tokenizer cannot spell this text, and what "
                "it cannot spell is lost. Bits per byte of this source will look too good. Add what is missing with "
                "`z2a tokenizer extend`, or use a tokenizer with byte fallback."
            )
    for reason, splits in _by_encoder(manifests).items():
        print(t(f"{', '.join(splits)}: encoded by {reason}"))
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
