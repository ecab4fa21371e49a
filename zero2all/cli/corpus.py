"""`z2a corpus build` and `z2a corpus show`."""

from __future__ import annotations

import argparse

from zero2all.cli.verb import Subparsers, add_group, add_verb, add_work, real, whole, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    inner = add_group(
        verbs, "corpus", "turn raw files into clean records", "z2a corpus build news=raw/news.jsonl --work my-workspace"
    )

    build = add_verb(
        inner,
        "build",
        "read raw files, clean them, drop duplicates, hold out a valid split",
        "z2a corpus build news=raw/news.json:zh wiki=raw/wiki.parquet:en --work my-workspace",
        _build,
    )
    build.add_argument(
        "sources",
        nargs="+",
        metavar="NAME=PATH[:CHANNEL]",
        help="a file or folder (text, JSON lines, JSON array, parquet), the name it gets, and the channel its loss is "
        "reported under, such as zh, en or code (default: guessed from the text)",
    )
    add_work(build)
    build.add_argument(
        "--map",
        default=None,
        metavar="FIELD=RAW,…",
        help="which raw field is which: content=body,title=headline (default: guessed by name)",
    )
    build.add_argument(
        "--valid-share",
        type=real(0, 0.5),
        default=0.01,
        metavar="SHARE",
        help="share of the records held out for validation (default 0.01)",
    )
    build.add_argument(
        "--max-damaged-share",
        type=real(0, 1),
        default=0.01,
        metavar="SHARE",
        help="stop when a larger share of a source is damaged (default 0.01)",
    )

    show = add_verb(
        inner, "show", "print records of a source", "z2a corpus show news --count 3 --work my-workspace", _show
    )
    show.add_argument("source", help="name of the source")
    add_work(show)
    show.add_argument("--split", choices=("train", "valid"), default="train", help="which split (default train)")
    show.add_argument("--count", type=whole(1), default=3, metavar="N", help="how many records (default 3)")


def _build(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.corpus import (
        BuildOptions,
        build_corpus,
        check_sources,
        parse_mapping,
        parse_source,
        summary_notes,
        summary_rows,
    )

    mapping = parse_mapping(arguments.map) if arguments.map else None
    sources = [parse_source(text, mapping) for text in arguments.sources]
    options = BuildOptions(valid_share=arguments.valid_share, max_damaged_share=arguments.max_damaged_share)
    check_sources(sources, options)  # before a mistyped path makes a workspace of this folder
    report = build_corpus(workspace_of(arguments, create=True).corpus, sources, options)
    print_table(summary_rows(report))
    for note in summary_notes(report):
        print(note)


def _show(arguments: argparse.Namespace) -> None:
    import itertools

    from zero2all.common.errors import UsageError
    from zero2all.common.records import corpus_sources, iter_records
    from zero2all.common.schema import nearest_hint

    corpus = workspace_of(arguments).corpus
    known = corpus_sources(corpus)
    if arguments.source not in known:
        raise UsageError(f"There is no source `{arguments.source}`. {nearest_hint(arguments.source, known)}")
    records = list(itertools.islice(iter_records(corpus, arguments.source, arguments.split), arguments.count))
    for record in records:
        print(f"── gid {record['gid']}  {record['title']}\n{record['content']}\n")
    if not records:
        print(f"The {arguments.split} split of `{arguments.source}` is empty.")
