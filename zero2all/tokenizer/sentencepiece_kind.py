"""Train with the `sentencepiece` library, then convert its model to a tokenizer.json with equal ids.

Training runs in a child process: its memory returns to the system when it ends, and an error or abort of the C++
library becomes one clear message. The training text goes through a file of lines in the scratch folder. SentencePiece
silently drops lines longer than `max_sentence_length` and lines with ▅ (U+2585) or NUL: such lines are cut, such
characters removed, and both are counted.

Such a tokenizer has no pretoken pattern, and writes spaces as ▁ (U+2581): a ▁ of the text comes back as a space.
"""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.common.files import human_bytes, require_free_space
from zero2all.common.progress import Bar, progress
from zero2all.tokenizer.config import SentencePieceConfig, TokenizerConfig
from zero2all.tokenizer.save import NORMALIZERS
from zero2all.tokenizer.sentencepiece_model import read_sentencepiece, sentencepiece_json
from zero2all.tokenizer.text import CountedText

UNKNOWN = "<unk>"
LEFT_OUT = re.compile("[\u2585\0]")
"""SentencePiece keeps these for itself and drops every line that has one."""
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]

CHILD = """
import json, sys
import sentencepiece
options = json.load(open(sys.argv[1], encoding="utf-8"))
def lines():
    with open(sys.argv[2], encoding="utf-8", newline="") as file:
        for line in file:
            yield json.loads(line)
try:
    with open(sys.argv[3], "wb") as model:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines(), model_writer=model, **options)
except Exception as error:
    print(f"FAILED {error}", file=sys.stderr)
    sys.exit(3)
"""


def _require_library() -> None:
    """An error that says how to get the library, where it is missing; before any work."""
    try:
        import sentencepiece  # noqa: F401
    except ImportError:
        raise UsageError(
            "--kind sentencepiece needs the sentencepiece library, which is not installed. Install it with "
            "`pip install sentencepiece` (or `pip install 'zero2all[sentencepiece]'`), or use --kind bpe, "
            "which needs no library and less memory."
        ) from None


def learn_sentencepiece(
    text: CountedText, config: TokenizerConfig, scratch: Path
) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """tokenizer.json, the library's own model file, and what to note in the manifest."""
    _require_library()
    require_free_space(scratch, int(text.expected_bytes * 1.1), "the training text of SentencePiece")
    lines_path, options_path, model_path = (scratch / name for name in ("lines.jsonl", "options.json", "model"))
    facts: dict[str, Any] = {"lines": 0, "lines_cut": 0, "characters_left_out": 0}
    with progress("tokenizer", total=text.expected_bytes, unit="B") as bar:
        _write_lines(text, config, lines_path, facts, bar)
        options = _options(config)
        options_path.write_text(json.dumps(options, ensure_ascii=False), encoding="utf-8")
        if text.text_bytes:
            _run_child([str(options_path), str(lines_path), str(model_path)], config, bar)
    model = model_path.read_bytes() if text.text_bytes else b""
    converted: dict[str, Any] = {"model": {"vocab": {}}}
    if model:
        read = read_sentencepiece(model, model_path)
        converted = sentencepiece_json(read, model_path, NORMALIZERS[config.normalise])
    return converted, model, {"sentencepiece": dataclasses.asdict(config.sentencepiece), **facts}


def _write_lines(text: CountedText, config: TokenizerConfig, path: Path, facts: dict[str, Any], bar: Bar) -> None:
    """One JSON string a line: with its line end, so that line ends can become pieces too."""
    limit = config.sentencepiece.max_sentence_length
    with open(path, "w", encoding="utf-8", newline="") as file:
        for document in text.stream(bar):
            kept, left_out = LEFT_OUT.subn("", document)
            facts["characters_left_out"] += left_out
            for line in kept.split("\n"):
                for number, piece in enumerate(_short_enough(f"{line}\n" if line else "", limit)):
                    facts["lines"] += 1
                    facts["lines_cut"] += number == 1
                    file.write(json.dumps(piece, ensure_ascii=False) + "\n")
        if config.sentencepiece.model_type == "unigram":
            file.write(json.dumps(" ".join(_spelling(config)), ensure_ascii=False) + "\n")


def _short_enough(line: str, limit_bytes: int) -> Iterator[str]:
    while line:
        if len(line) * 4 <= limit_bytes or len(line.encode()) <= limit_bytes:
            yield line
            return
        head = line[:limit_bytes].encode()[:limit_bytes].decode("utf-8", "ignore")
        head = head or line[0]
        yield head
        line = line[len(head) :]


def _spelling(config: TokenizerConfig) -> str:
    """The characters of control tokens and byte pieces. A unigram encoder takes a listed piece over unknown
    characters, so these must all be known: then spelling always wins (see `_unreachable_score`)."""
    return "".join(sorted(set("".join([*config.specials.names(), UNKNOWN, *BYTE_PIECES]))))


def _options(config: TokenizerConfig) -> dict[str, Any]:
    """The options of the library's trainer, under its own names."""
    names, own = config.specials.names(), config.sentencepiece
    roles = {"bos": 0, "eos": 1, "pad": 5}
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": True,
        **{f"{role}_id": number for role, number in roles.items()},
        **{f"{role}_piece": names[number] for role, number in roles.items()},
        "unk_id": len(names),
        "unk_piece": UNKNOWN,
        "control_symbols": [name for number, name in enumerate(names) if number not in roles.values()],
        "minloglevel": 0,
    }
    options |= {field.name: getattr(own, field.name) for field in dataclasses.fields(SentencePieceConfig)}
    options["input_sentence_size"] = own.input_sentence_size or 0
    options["max_sentence_length"] = own.max_sentence_length + 8  # lines were cut already, no shorter than this
    if own.model_type == "unigram":
        options["required_chars"] = _spelling(config)
    if config.threads is not None:
        options["num_threads"] = config.threads
    return options


def _run_child(arguments: list[str], config: TokenizerConfig, bar: Bar) -> None:
    said: list[str] = []
    command = [sys.executable, "-c", CHILD, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as child:
        assert child.stderr is not None, "a pipe was asked for"
        try:
            for line in child.stderr:
                said = [*said[-200:], line.rstrip()]
                bar.advance(0, note=_note(line))
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise _failure(child.returncode, said, config)


def _note(line: str) -> str:
    """What the library is doing, from its log."""
    found = re.search(r"\] (.*)", line)
    return f"sentencepiece: {(found[1] if found else line).strip()[:50]}"


def _failure(code: int, said: list[str], config: TokenizerConfig) -> UserError:
    """What went wrong in the child, in our words where we know it."""
    log = "\n".join(said)
    if found := re.search(r"Vocabulary size too high \((\d+)\).*?<= (\d+)", log):
        return BadInputError(
            f"This text cannot support a vocabulary of {int(found[1]):,} ids: SentencePiece finds pieces for "
            f"at most {int(found[2]):,}. Set --vocab-size to {found[2]} or less, or train on more text."
        )
    if found := re.search(r"smaller than required_chars\. (\d+) vs (\d+)", log):
        return BadInputError(
            f"A vocabulary of {config.vocab_size:,} ids is too small for SentencePiece: control tokens, bytes and the "
            f"characters it must cover ({config.sentencepiece.character_coverage:.2%} of the text) need "
            f"{int(found[2]):,}. Set --vocab-size to more than {found[2]}, or lower character_coverage."
        )
    if code == -signal.SIGKILL:
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return BadInputError(
            f"SentencePiece was killed while training, most likely because memory ran out (it held "
            f"{human_bytes(peak)}). Train on less text (--take), set sentencepiece.input_sentence_size, or use "
            f"--kind bpe, which keeps to --max-memory."
        )
    reason = next((line.removeprefix("FAILED ") for line in reversed(said) if line.startswith("FAILED ")), None)
    reason = reason or next((line for line in reversed(said) if "Check failed" in line), f"it ended with code {code}")
    return BadInputError(
        f"SentencePiece could not train on this text: {reason.strip()}. Change its options under "
        "tokenizer.sentencepiece in the config, or use --kind bpe."
    )
