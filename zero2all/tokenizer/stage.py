"""The tokenizer stage of a workspace: train on its corpus or on plain text files, or take over one from elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.files import MANIFEST_NAME, read_json, staged_folder, write_atomic, write_json
from zero2all.common.manifest import fingerprint, write_manifest
from zero2all.common.progress import say
from zero2all.tokenizer.config import PATTERNS, TokenizerConfig
from zero2all.tokenizer.foreign import ForeignTokenizer, find_foreign, read_foreign
from zero2all.tokenizer.load import load_tokenizer, read_tokenizer_files
from zero2all.tokenizer.parts import corpus_parts, file_parts
from zero2all.tokenizer.save import CONFIG_NAME, OTHER_FILES, SENTENCEPIECE_NAME, TOKENIZER_NAME
from zero2all.tokenizer.text import is_utf8
from zero2all.tokenizer.train import CONSEQUENCES, deciding, train_on_parts


def train_on_corpus(corpus: Path, folder: Path, config: TokenizerConfig, ignore_memory: bool = False) -> dict[str, Any]:
    """Train on the training split of every source; does nothing when corpus and settings are those of last time."""
    parts, taken = corpus_parts(corpus, config.take)
    inputs = fingerprint({"parts": [[part.name, part.fingerprint] for part in parts], "config": deciding(config)})
    return train_on_parts(lambda _: parts, config, folder, inputs, {"taken": taken}, ignore_memory)


def train_on_files(
    paths: Sequence[Path], folder: Path, config: TokenizerConfig, ignore_memory: bool = False
) -> dict[str, Any]:
    """The same for plain text files."""
    if config.take is not None:
        raise UsageError("--take chooses among the sources of a corpus. With --text, name the files you want.")
    parts = file_parts(paths)
    inputs = fingerprint({"files": [part.fingerprint for part in parts], "config": deciding(config)})
    taken = {str(path): {"asked": "all", "share": "1", "about_bytes": path.stat().st_size} for path in paths}
    return train_on_parts(lambda _: parts, config, folder, inputs, {"taken": taken}, ignore_memory)


def import_tokenizer(
    source: Path, folder: Path, pattern: str | None = None, control: Sequence[str] = ()
) -> dict[str, Any]:
    """Make a tokenizer of others the one in `folder`: a Hugging Face folder, a .tiktoken file, a SentencePiece .model.

    Its ids stay as they are. `pattern` and `control`: see `read_foreign`. Returns the manifest's content.
    """
    path = find_foreign(source)
    foreign: ForeignTokenizer | None
    if path is not None and (pattern is not None or control):
        foreign = read_foreign(path, pattern, control)
        tokenizer_json, config, special = foreign.json, foreign.config, {}
    else:
        if pattern is not None or control:
            raise UsageError("--pattern and --special are for .tiktoken files; a tokenizer.json has its own.")
        files = read_tokenizer_files(source)
        tokenizer_json, config, special, foreign = files.json, files.config, files.special, files.foreign
    beside = source if source.is_dir() else source.parent
    with staged_folder(folder) as partial:
        write_json(partial / TOKENIZER_NAME, tokenizer_json)
        write_json(partial / CONFIG_NAME, {**special, **config})
        if path is None or source.is_dir():
            for name in (SENTENCEPIECE_NAME, *OTHER_FILES):
                if (beside / name).is_file():
                    write_atomic(partial / name, (beside / name).read_bytes())
        if foreign is not None and foreign.kind == "sentencepiece":
            write_atomic(partial / SENTENCEPIECE_NAME, foreign.data)
        tokenizer = load_tokenizer(partial)
        content = {
            "tokenizer_kind": f"foreign {'tokenizer.json' if foreign is None else foreign.kind}",
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
            "imported_from": str(source),
        }
        write_manifest(partial, "tokenizer", tokenizer.fingerprint, content)
    if tokenizer.unknown_id is not None:
        say(
            "Warning: this tokenizer has no byte pieces (byte fallback). Characters that it does not know become <unk> "
            "and are lost; `z2a pack` counts them. Add what your text needs with `z2a tokenizer extend`, or take a "
            "tokenizer with byte fallback."
        )
    return content


# The facts of a tokenizer for `z2a tokenizer show`, and the coloured view of how a text is cut.


COLOURS = (44, 42, 45, 43, 46, 41)
"""ANSI background colours, one after the other, so that neighbours differ."""


def tokenizer_facts(folder: Path, samples: int = 12) -> dict[str, Any]:
    """Everything about a tokenizer that needs no text, as JSON."""
    tokenizer = load_tokenizer(folder)
    tokenizer_json = read_tokenizer_files(folder).json
    manifest = read_json(folder / MANIFEST_NAME) if (folder / MANIFEST_NAME).is_file() else {}
    pieces = tokenizer.text_pieces
    longest = sorted(pieces, key=lambda number: (-len(pieces[number]), number))[:samples]
    step = max(1, len(pieces) // samples)
    spread = list(pieces)[step // 2 :: step][:samples]
    model = tokenizer_json["model"]
    added = [token["content"] for token in tokenizer_json.get("added_tokens", [])]
    return {
        "folder": str(folder),
        "kind": manifest.get("tokenizer_kind", f"foreign {model.get('type', 'unknown')}"),
        "model": model.get("type"),
        "vocab_size": tokenizer.vocab_size,
        "rows_of_a_model": -(-tokenizer.vocab_size // 64) * 64,
        "pieces": len(pieces),
        "merges": len(model.get("merges", [])),
        "unused_ids": tokenizer.vocab_size - len(pieces) - len(tokenizer.control),
        "fingerprint": tokenizer.fingerprint,
        "normalisation": tokenizer.normalisation,
        "normalisation_means": CONSEQUENCES.get(tokenizer.normalisation, "changed by the folder's own rules"),
        "pattern": _pattern(tokenizer_json),
        "control": tokenizer.control,
        "control_roles": tokenizer.control_roles,
        "begin_id": tokenizer.begin_id,
        "end_ids": list(tokenizer.end_ids),
        "pad_id": tokenizer.pad_id,
        # Those that the plain `tokenizers` library would recognise in text; our loader never does.
        "text_reaches_control": [name for name in added if name in tokenizer.control],
        "whole_characters": sum(map(is_utf8, pieces.values())),
        "sample": {str(number): readable(pieces[number]) for number in spread},
        "longest": {str(number): readable(pieces[number]) for number in longest},
        "made": {name: manifest[name] for name in ("text", "taken", "training", "extension") if name in manifest},
    }


def readable(piece: bytes) -> str:
    """A piece on one line: characters as they are, bytes that form none as \\xe4, a line end as \\n."""
    text = piece.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def coloured(pieces: list[tuple[int, bytes]]) -> str:
    """The text with a background colour for each piece; bytes that form no character alone are shown as \\\\xe4."""
    shown = []
    for place, (_, piece) in enumerate(pieces):
        text = piece.decode("utf-8", "backslashreplace").replace("\n", "⏎\n").replace("\t", "→")
        colour = COLOURS[place % len(COLOURS)]
        lines = [f"\x1b[30;{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n")]
        shown.append("\n".join(lines))
    return "".join(shown)


def _pattern(tokenizer_json: dict[str, Any]) -> str | None:
    """The regular expression that cuts text into pretokens, by its name where it has one."""
    found = tokenizer_json.get("pre_tokenizer") or {}
    for part in (found, *found.get("pretokenizers", [])):
        if part.get("type") == "Split":
            text = next(iter(part["pattern"].values()))
            return next((name for name, known in PATTERNS.items() if known == text), str(text))
    return None
