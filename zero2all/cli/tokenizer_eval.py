"""`z2a tokenizer eval`: registered under the `tokenizer` group by `cli/tokenizer.py`."""

from __future__ import annotations

import argparse

from zero2all.cli.verb import Subparsers, add_output, add_verb, add_work, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "eval",
        "judge the vocabulary on held-out text, side by side with others",
        "z2a tokenizer eval --work my-workspace --against qwen/ tiktoken:o200k_base --html eval.html",
        _eval,
    )
    add_work(parser)
    parser.add_argument(
        "--against",
        nargs="+",
        action="extend",
        default=[],
        metavar="TOKENIZER",
        help="others to compare with: a Hugging Face folder, tiktoken:NAME, or a SentencePiece .model file",
    )
    parser.add_argument(
        "--split", choices=("valid", "train"), default="valid", help="which text of the corpus (default valid)"
    )
    parser.add_argument(
        "--limit", default="20MB", metavar="AMOUNT", help="text to encode, shared among the sources (default 20MB)"
    )
    add_output(parser, "--json", help="write all figures there")
    add_output(parser, "--html", help="write a page with charts and coloured segmentations")


def _eval(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.common.errors import UsageError
    from zero2all.common.files import write_atomic, write_json
    from zero2all.tokenizer.lab.candidates import open_candidates
    from zero2all.tokenizer.lab.measure import evaluate
    from zero2all.tokenizer.lab.page import evaluation_page
    from zero2all.tokenizer.lab.tables import evaluation_tables
    from zero2all.tokenizer.lab.text import held_out_text
    from zero2all.tokenizer.take import parse_bytes

    limit = parse_bytes(arguments.limit)
    if limit is None:
        raise UsageError(f"--limit is {arguments.limit!r}; expected an amount of text such as 20MB.")
    workspace = workspace_of(arguments)
    text = held_out_text(workspace.corpus, arguments.split, limit)
    report = evaluate(open_candidates(workspace.tokenizer, arguments.against, text), text)
    for table in evaluation_tables(report):
        print_table(table.rows, table.title)
        for note in table.notes:
            print(note)
        print()
    if arguments.json:
        write_json(arguments.json, report)
        print(f"all figures: {arguments.json}")
    if arguments.html:
        write_atomic(arguments.html, evaluation_page(report).encode())
        print(f"page: {arguments.html}")
