"""`z2a pack`."""

from __future__ import annotations

import argparse
from typing import Any

from zero2all.cli.verb import Subparsers, add_verb, add_work, whole, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "pack", "encode the corpus into token shards for training", "z2a pack --work my-workspace", _pack
    )
    add_work(parser)
    parser.add_argument(
        "--engine",
        default="auto",
        metavar="NAME",
        help="what encodes: auto, fastokens, numba, gigatoken, tiktoken or tokenizers; the tokens are the same with all"
        " of them (default auto: the fastest that runs here and agrees with tokenizers)",
    )
    parser.add_argument(
        "--strict-engine", action="store_true", help="stop when the engine named cannot be used (default: take another)"
    )
    parser.add_argument(
        "--threads", type=whole(1), default=None, metavar="N", help="threads of the engine (default: one per core)"
    )


def _pack(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import human_count
    from zero2all.packed.writer import pack_corpus
    from zero2all.tokenizer.engines import EngineConfig

    workspace = workspace_of(arguments)
    engine = EngineConfig(arguments.engine, arguments.strict_engine, arguments.threads)
    manifests = pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed, engine)
    for name, manifest in manifests.items():
        ratio = manifest["text_bytes"] / max(1, manifest["tokens"])
        print(
            f"{name:<24} {manifest['documents']:>9,} documents  {human_count(manifest['tokens']):>8} tokens  "
            f"{ratio:.2f} bytes/token  channel {manifest['channel']}"
        )
    for reason, names in _by_engine(manifests).items():
        print(f"{', '.join(names)}: encoded by {reason}")


def _by_engine(manifests: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Engine and reason, and the splits that were packed with it."""
    found: dict[str, list[str]] = {}
    for name, manifest in manifests.items():
        choice = manifest.get("engine")
        if choice:
            parity = choice["parity"]
            checked = (
                f"; equal to the reference on {parity['documents'] + parity['hard_strings']:,} texts" if parity else ""
            )
            found.setdefault(f"{choice['got']} ({choice['reason']}{checked})", []).append(name)
    return found
