"""`z2a tokenizer train / import / extend / eval / show / encode / decode`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from zero2all.cli.terminal import has_colour, print_table
from zero2all.cli.verb import group, print_json, verb, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, counted, tell, terminal_safe

TRAIN_FLAGS = (
    *("vocab_size", "kind", "take", "normalise", "pattern", "min_piece_count", "max_piece_bytes", "max_memory"),
    "threads",
)


group("""
    tokenizer: train, extend, evaluate and try out a tokenizer

    z2a tokenizer train --work my-workspace --vocab-size 32000
    """)


def _folder(arguments: argparse.Namespace) -> Path:
    """The tokenizer that --tokenizer or --work names."""
    given: Path | None = arguments.tokenizer
    return workspace_of(arguments).tokenizer if given is None else given


@verb("""
    tokenizer train: learn a vocabulary from the corpus

    --work
    --vocab-size N:int                number of token ids (default 64000)
    --kind KIND                       bpe (default): the built-in exact trainer; hf-bbpe: that of the tokenizers library
    --take SOURCE=SHARE,…             share of each source to train on: news=20/44,wiki=2GB; or one for all: 2GB
        (default: everything)
    --text+ FILE:path                 train on these text files, not the corpus
    --normalise none|nfc|nfkc         Unicode normalisation of all text (default none: nothing is lost)
    --pattern NAME|REGEX              hf-bbpe: qwen2 (default), isolated-han, or your own
    --min-piece-count N:int           learn only pieces seen this often (default 2)
    --max-piece-bytes N:int           longest piece in bytes (default: any)
    --max-memory SIZE                 memory limit, such as 4GB
    --threads N:int                   threads (default: one per core)
    --approximate                     bpe: allow an approximate result if memory does not suffice
    --ignore-memory                   hf-bbpe: start even if memory will not suffice
    --config CONFIG                   use the tokenizer section of this preset or YAML file
    --section.field

    z2a tokenizer train --work my-workspace --vocab-size 64000 --take news=20/44,wiki=2GB --max-memory 4GB
    """)
def _train(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import human_bytes
    from zero2all.tokenizer.parts import require_text_files
    from zero2all.tokenizer.stage import train_on_corpus, train_on_files
    from zero2all.tokenizer.train import CONSEQUENCES

    config = _train_config(arguments)
    if config.normalise != "none":
        print(f"--normalise {config.normalise}: {t(CONSEQUENCES[config.normalise])}", file=sys.stderr)
    if arguments.text is not None:
        require_text_files(arguments.text)  # before a workspace is made for them
    workspace = workspace_of(arguments, create=arguments.text is not None)
    if arguments.text is not None:
        manifest = train_on_files(arguments.text, workspace.tokenizer, config, arguments.ignore_memory)
    else:
        manifest = train_on_corpus(workspace.corpus, workspace.tokenizer, config, arguments.ignore_memory)
    _print_repairs(manifest["text"])
    tell(
        f"{workspace.tokenizer}: {manifest['tokenizer_kind']}, {manifest['vocab_size']:,} token ids from "
        f"{human_bytes(manifest['text']['bytes'])} of text, fingerprint {manifest['fingerprint']}"
    )


def _train_config(arguments: argparse.Namespace) -> Any:
    """The tokenizer section of --config, with `--tokenizer.field value` and the flags over it; all problems at once."""
    from zero2all.common.schema import Problem, apply_overrides, build
    from zero2all.config import config_values, load_config
    from zero2all.tokenizer.config import TokenizerConfig
    from zero2all.tokenizer.sampling import parse_take

    problems: list[Problem] = []
    source = arguments.config
    sections: dict[str, Any] = {"tokenizer": {} if source is None else config_values(load_config(source))["tokenizer"]}
    apply_overrides(sections, arguments.overrides, problems)
    for name in sections.keys() - {"tokenizer"}:
        raise UsageError(f"`z2a tokenizer train` reads the config's tokenizer section only, not `{name}`.")
    values = sections["tokenizer"]
    values |= {name: flag for name in TRAIN_FLAGS if (flag := getattr(arguments, name)) is not None}
    if arguments.take is not None:
        values["take"] = parse_take(arguments.take)
    if arguments.approximate:
        values["exact"] = False
    if values.get("kind") == "sentencepiece" or "sentencepiece" in values:
        raise UsageError(
            "SentencePiece models are no longer trained here. Use --kind bpe, or train the .model with the "
            "sentencepiece library and take it with `z2a tokenizer import FILE.model`."
        )
    config = build(TokenizerConfig, values, "tokenizer", problems)
    problems += [] if problems else config.problems("tokenizer")
    if problems:
        raise UsageError("No tokenizer was trained. " + " ".join(str(problem) for problem in problems))
    return config


def _print_repairs(text: dict[str, Any]) -> None:
    if text.get("documents_with_repaired_surrogates"):
        count = text["documents_with_repaired_surrogates"]
        tell(f"repaired: {counted(count, 'document')} with invalid UTF-8, replaced by U+FFFD")
    if text.get("control_strings_removed"):
        tell(f"removed from the text: {text['control_strings_removed']:,} strings that spell a control token")


@verb("""
    tokenizer import: use a tokenizer of others in this workspace; its ids stay the same

    source TOKENIZER:path  a Hugging Face folder, a .tiktoken file, or a SentencePiece .model file
    --work
    --pattern NAME|REGEX   an unknown .tiktoken file: how it cuts text (qwen2, isolated-han, cl100k, o200k, or a regular
        expression)
    --special+ NAME =[]    an unknown .tiktoken file: its control tokens, the one that ends a document first
    --out DIR:outdir        folder to write (default: the workspace's tokenizer is replaced)
    --replace              replace the workspace's tokenizer even if data or runs use the old one

    z2a tokenizer import qwen.tiktoken --work my-workspace
    """)
def _import(arguments: argparse.Namespace) -> None:
    from zero2all.tokenizer.extend import require_replaceable
    from zero2all.tokenizer.foreign import find_foreign, read_foreign
    from zero2all.tokenizer.stage import import_tokenizer

    if not arguments.source.exists():
        raise UsageError(f"There is no {arguments.source}. Give a tokenizer folder, a .tiktoken file or a .model file.")
    foreign = find_foreign(arguments.source)
    if foreign is not None:
        read_foreign(foreign, arguments.pattern, arguments.special)  # an error before a workspace is made
    target = _target(arguments, create=True)
    require_replaceable(target)
    done = import_tokenizer(arguments.source, target, arguments.pattern, arguments.special)
    tell(
        f"{target}: {done['tokenizer_kind']}, {done['vocab_size']:,} token ids as in {arguments.source}, "
        f"fingerprint {done['fingerprint']}"
    )


def _target(arguments: argparse.Namespace, create: bool = False) -> Path:
    """The folder to write: --out, or the workspace's tokenizer where nothing was made with it."""
    given: Path | None = arguments.out
    if given is not None:
        return given
    workspace = workspace_of(arguments, create=create)
    used = [path.name for path in (workspace.packed, workspace.runs) if path.is_dir()]
    if used and not arguments.replace:
        raise UsageError(
            f"{', '.join(used)} in {workspace.root} were made with the current tokenizer and "
            "would no longer load. Write the new one elsewhere with --out, or add --replace and make "
            "them again."
        )
    return workspace.tokenizer


@verb(r"""
    tokenizer extend: add pieces to a tokenizer; existing ids stay the same

    --work
    --tokenizer DIR|FILE:path  tokenizer to extend (default: that of the workspace)
    --add FILE:path            pieces from a file, one a line
    --pieces+ PIECE =[]        pieces (\s: space, \n: line end)
    --from-text+ FILE:path     learn pieces from these text files
    --vocab-size N:int>=1      number of token ids after learning, with --from-text
    --out DIR:outdir            folder to write (default: the workspace's tokenizer is replaced)
    --replace                  replace the workspace's tokenizer even if data or runs use the old one

    z2a tokenizer extend --work my-workspace --from-text field.txt --vocab-size 66000 --out larger-tokenizer
    """)
def _extend(arguments: argparse.Namespace) -> None:
    from zero2all.tokenizer.extend import Extender, read_pieces, require_replaceable, unescaped
    from zero2all.tokenizer.parts import file_parts

    if not (arguments.add or arguments.pieces or arguments.from_text):
        raise UsageError("Nothing to add. Give pieces with --pieces or --add FILE, or text with --from-text FILE.")
    if (arguments.from_text is None) != (arguments.vocab_size is None):
        raise UsageError(
            "--from-text and --vocab-size belong together: --vocab-size is the number of ids after learning."
        )
    source, target = _folder(arguments), _target(arguments)
    require_replaceable(target)
    extender = Extender(source)
    extender.add(read_pieces(arguments.add) if arguments.add else [])
    extender.add([unescaped(piece) for piece in arguments.pieces])
    if arguments.from_text:
        texts = (text for part in file_parts(arguments.from_text) for text in part.texts())
        extender.learn(texts, arguments.vocab_size)
    done = extender.save(target)
    tell(
        f"{target}: {done['old_vocab_size']:,} ids before, {done['vocab_size']:,} now; "
        f"{counted(done['pieces_added'] - done['helper_pieces'], 'piece')} and "
        f"{counted(done['helper_pieces'], 'helper')} added, "
        f"{done['already_there']:,} were there already"
    )
    if done["text"]["bytes_left_out"]:
        tell(
            f"only the first {done['text']['bytes']:,} bytes of text were read; "
            f"{done['text']['bytes_left_out']:,} bytes were left out"
        )
    tell(f"give a model rows for them: z2a import FOLDER --tokenizer {target} --resize-embeddings --name NAME")


@verb("""
    tokenizer eval: evaluate the tokenizer on held-out text, and compare it with others

    --work
    --against+* TOKENIZER       others to compare with: a Hugging Face folder, tiktoken:NAME, or a SentencePiece .model
        file
    --split valid|train =valid  which text of the corpus (default valid)
    --limit AMOUNT =20MB        text to encode, shared among the sources (default 20MB)
    --json FILE:out             write all figures there

    z2a tokenizer eval --work my-workspace --against qwen/ tiktoken:o200k_base --json eval.json
    """)
def _eval(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import write_json
    from zero2all.tokenizer.lab.candidates import held_out_text, open_candidates
    from zero2all.tokenizer.lab.measure import evaluate, evaluation_tables
    from zero2all.tokenizer.sampling import parse_bytes

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
        tell(f"all figures: {arguments.json}")


@verb("""
    tokenizer show: show what a tokenizer consists of

    --work
    --tokenizer DIR|FILE:path  any tokenizer (default: that of the workspace)
    --count N:int>=1 =12       sample pieces to show (default 12)
    --json

    z2a tokenizer show --work my-workspace
    """)
def _show(arguments: argparse.Namespace) -> None:
    from zero2all.tokenizer.stage import tokenizer_facts

    facts = tokenizer_facts(_folder(arguments), arguments.count)
    if arguments.json:
        print_json(facts)
        return
    tell(f"{facts['folder']}: {facts['kind']}, fingerprint {facts['fingerprint']}")
    tell(
        f"ids         {facts['vocab_size']:,}: {len(facts['control'])} control tokens and {facts['pieces']:,} "
        f"pieces ({facts['whole_characters']:,} of whole characters, the others with parts of characters), "
        f"{facts['merges']:,} merges; a model pads its rows to {facts['rows_of_a_model']:,}"
    )
    tell(f"pattern     {facts['pattern'] or t('none')}")
    tell(f"normalise   {facts['normalisation']}: {facts['normalisation_means']}")
    tell(f"control     {'  '.join(f'{number} {name}' for name, number in facts['control'].items())}")
    ends = ", ".join(map(str, facts["end_ids"]))
    tell(f"            begin {facts['begin_id']}, end {ends}, pad {facts['pad_id']}")
    if facts["text_reaches_control"]:
        names = ", ".join(facts["text_reaches_control"])
        tell(f"            plain `tokenizers` recognises these in text, z2a does not: {names}")
    for name in ("sample", "longest"):
        pieces = (f"{number}:{piece.replace(' ', '␣')}" for number, piece in facts[name].items())
        print(f"{name:<11} {'  '.join(pieces)}")


@verb("""
    tokenizer encode: show the tokens of a text

    --work
    --tokenizer DIR|FILE:path  any tokenizer (default: that of the workspace)
    text? TEXT                 the text, in quotes; - or nothing reads from a pipe
    --file FILE:path           encode this file
    | --ids                    print only the ids, on one line
    | --json                   print JSON: ids, pieces, bytes per token
    | --colour                 print the text with a colour for each piece

    z2a tokenizer encode --work my-workspace "中国的首都是北京"
    """)
def _encode(arguments: argparse.Namespace) -> None:
    from zero2all.tokenizer.load import load_tokenizer
    from zero2all.tokenizer.stage import coloured, readable

    tokenizer = load_tokenizer(_folder(arguments))
    text = _given_text(arguments)
    pieces = [(number, tokenizer.token_bytes(number)) for number in tokenizer.encode_text(text)]
    size = len(text.encode("utf-8", "replace"))
    per_token = size / max(1, len(pieces))
    if arguments.json:
        shown = [{"id": number, "piece": readable(piece)} for number, piece in pieces]
        print_json({"tokens": len(pieces), "bytes": size, "bytes_per_token": per_token, "pieces": shown})
        return
    if arguments.ids:
        print(" ".join(str(number) for number, _ in pieces))
        return
    if not arguments.colour:
        for number, piece in pieces:
            print(f"{number:>7}  '{readable(piece)}'")
    if arguments.colour or has_colour():
        print(coloured(pieces))
    tell(f"{counted(len(pieces), 'token')}, {per_token:.2f} bytes per token")


@verb("""
    tokenizer decode: show the text of tokens

    --work
    --tokenizer DIR|FILE:path  any tokenizer (default: that of the workspace)
    ids* ID:int                token ids; without any, read from a pipe
    --file FILE:path           decode the ids in this file
    --skip-control             leave control tokens out
    --json

    z2a tokenizer decode --work my-workspace 17 256
    """)
def _decode(arguments: argparse.Namespace) -> None:
    from zero2all.common import jsonio
    from zero2all.tokenizer.load import load_tokenizer

    ids = arguments.ids
    if not ids:
        words = _given_bytes(arguments, "ids").decode("utf-8", "replace").replace(",", " ").strip("[] \n").split()
        for word in words:
            if not word.removeprefix("-").isdecimal():
                raise UsageError(f"`{word[:100]}` is not a token id. Give whole numbers.")
        ids = [int(word) for word in words]
    try:
        text = load_tokenizer(_folder(arguments)).decode(ids, skip_control=arguments.skip_control)
    except ValueError as error:
        raise UsageError(f"{error}. `z2a tokenizer encode` shows the ids of a text.") from error
    if sys.stdout.isatty():  # a pipe gets every byte
        text = terminal_safe(text, keep=TEXT_MARKS)
    print(jsonio.dumps_pretty({"text": text}).decode() if arguments.json else text)


def _given_text(arguments: argparse.Namespace) -> str:
    """The text of the command line, a file or a pipe; bytes that are not UTF-8 are counted and become U+FFFD."""
    if arguments.text not in (None, "-"):
        if arguments.file is not None:
            raise UsageError("Give a TEXT or a --file, not both.")
        return str(arguments.text)
    from zero2all.tokenizer.text import well_formed

    text = _given_bytes(arguments, "text").decode("utf-8", "surrogateescape")
    if bad := sum("\udc80" <= character <= "\udcff" for character in text):
        print(t(f"{bad} bytes are not UTF-8 and are shown as U+FFFD"), file=sys.stderr)
    return well_formed(text)


def _given_bytes(arguments: argparse.Namespace, what: str) -> bytes:
    if arguments.file is not None:
        try:
            return Path(arguments.file).read_bytes()
        except FileNotFoundError:
            raise BadInputError(f"{arguments.file} does not exist. Give a file with --file.") from None
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(f"No {what} given. Use the command line, --file, or a pipe.")
    return sys.stdin.buffer.read()
