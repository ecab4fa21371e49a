"""`z2a tokenizer train / encode / decode`."""

from __future__ import annotations

import argparse

from zero2all.cli.verb import Subparsers, add_group, add_verb, add_work, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    inner = add_group(
        verbs,
        "tokenizer",
        "train a vocabulary, encode and decode with it",
        "z2a tokenizer train --work my-workspace --vocab-size 32000",
    )

    train = add_verb(
        inner,
        "train",
        "learn a byte-level BPE vocabulary from the corpus",
        "z2a tokenizer train --work my-workspace --vocab-size 32000",
        _train,
    )
    add_work(train)
    train.add_argument("--vocab-size", type=int, default=64000, metavar="N", help="number of token ids (default 64000)")
    train.add_argument(
        "--train-bytes", type=int, default=None, metavar="N", help="learn from the first N bytes (default: all)"
    )
    train.add_argument(
        "--max-piece-bytes", type=int, default=None, metavar="N", help="longest piece in UTF-8 bytes (default: any)"
    )

    encode = add_verb(
        inner,
        "encode",
        "show the tokens of a text",
        'z2a tokenizer encode --work my-workspace "中国的首都是北京"',
        _encode,
    )
    add_work(encode)
    encode.add_argument("text", metavar="TEXT", help="the text, in quotes")

    decode = add_verb(
        inner, "decode", "show the text of tokens", "z2a tokenizer decode --work my-workspace 17 256", _decode
    )
    add_work(decode)
    decode.add_argument("ids", nargs="+", type=int, metavar="ID", help="token ids, as `encode` shows them")


def _train(arguments: argparse.Namespace) -> None:
    from zero2all.common.errors import UsageError
    from zero2all.common.schema import Problem, build
    from zero2all.tokenizer.config import TokenizerConfig
    from zero2all.tokenizer.stage import train_on_corpus

    problems: list[Problem] = []
    values = {name: getattr(arguments, name) for name in ("vocab_size", "train_bytes", "max_piece_bytes")}
    config = build(TokenizerConfig, values, "tokenizer", problems)
    if problems:
        raise UsageError("No tokenizer was trained. " + " ".join(str(problem) for problem in problems))
    workspace = workspace_of(arguments)
    manifest = train_on_corpus(workspace.corpus, workspace.tokenizer, config)
    print(f"{workspace.tokenizer}: {manifest['vocab_size']:,} token ids, fingerprint {manifest['fingerprint']}")


def _encode(arguments: argparse.Namespace) -> None:
    from zero2all.tokenizer.load import load_tokenizer

    tokenizer = load_tokenizer(workspace_of(arguments).tokenizer)
    ids = tokenizer.encode_text(arguments.text)
    for token in ids:
        print(f"{token:>7}  {tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r}")
    print(f"{len(ids)} tokens, {len(arguments.text.encode()) / max(1, len(ids)):.2f} bytes per token")


def _decode(arguments: argparse.Namespace) -> None:
    from zero2all.common.errors import UsageError
    from zero2all.tokenizer.load import load_tokenizer

    try:
        print(load_tokenizer(workspace_of(arguments).tokenizer).decode(arguments.ids, skip_control=False))
    except ValueError as error:
        raise UsageError(f"{error}. `z2a tokenizer encode` shows the ids of a text.") from error
