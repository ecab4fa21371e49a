"""`z2a pack`."""

from __future__ import annotations

import argparse

from zero2all.cli.verb import Subparsers, add_verb, add_work, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "pack", "encode the corpus into token shards for training", "z2a pack --work my-workspace", _pack
    )
    add_work(parser)


def _pack(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import human_count
    from zero2all.packed.writer import pack_corpus

    workspace = workspace_of(arguments)
    for name, manifest in pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed).items():
        ratio = manifest["text_bytes"] / max(1, manifest["tokens"])
        print(
            f"{name:<24} {manifest['documents']:>9,} documents  {human_count(manifest['tokens']):>8} tokens  "
            f"{ratio:.2f} bytes/token  channel {manifest['channel']}"
        )
