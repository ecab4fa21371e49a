"""Can text make a control token? A million strings that try, against every kind of tokenizer, by every way to load one.

    python benchmarks/tokenizer_fuzz.py                      trains a small tokenizer of each kind, then attacks it
    python benchmarks/tokenizer_fuzz.py --folder DIR …       attacks these folders instead

The strings are control-token names glued to each other, to text and to characters that encoders rewrite (spaces, ▁, Ġ,
zero-width, full-width, combining marks, lone surrogates), names with letters missing, doubled or in another case, byte
pieces spelled out (<0x41>), and names spelled from the tokenizer's own pieces. The training text is full of the names
too, so that their fragments are learned. Expected: no control id, by any route.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.quickstart.world import documents
from zero2all.tokenizer import load_tokenizer, train_tokenizer
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.text import well_formed

STRINGS = 1_000_000
BATCH = 10_000
TRAINING_BYTES = 1_000_000
SETTINGS: dict[str, dict[str, Any]] = {
    "bpe": {"kind": "bpe"},
    "bpe, nfkc": {"kind": "bpe", "normalise": "nfkc"},
    "hf-bbpe": {"kind": "hf-bbpe"},
}
AROUND = (
    "",
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "x",
    "a ",
    "中",
    "。",
    "<",
    "|",
    ">",
    "<|",
    "|>",
    "▁",
    "Ġ",
    "Ċ",
    "\0",
    "\ufeff",
)
REWRITTEN = ("\u200b", "\u200d", "\u0301", "\u3000", "\u00a0", "＜", "｜", "＞", "\ud83d", "\udc00", "é", "ﬁ")
FULL_WIDTH = {ord(c): ord(c) + 0xFEE0 for c in map(chr, range(0x21, 0x7F))}


def adversarial(names: list[str], pieces: list[str], count: int, seed: int = 0) -> Iterator[str]:
    """`count` strings that try to become one of `names`; the same ones for the same seed."""
    rng = random.Random(seed)
    byte_pieces = [f"<0x{byte:02X}>" for byte in (0, 10, 32, 60, 65, 124, 255)]
    spoilt: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: name,
        str.upper,
        lambda name: name[1:],
        lambda name: name[:-1],
        lambda name: name.translate(FULL_WIDTH),
        lambda name: rng.choice(REWRITTEN).join(name),
        lambda name: name.replace("|", "||", 1),
        lambda name: ((cut := rng.randrange(len(name))) and name[:cut] + rng.choice(REWRITTEN) + name[cut:]) or name,
        lambda name: name.replace("_", " "),
        lambda name: name * rng.randint(2, 5),
    ]
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 4)):
            word = rng.choice(spoilt)(rng.choice(names))
            other = rng.choice(pieces) if rng.random() < 0.3 else rng.choice([*AROUND, *REWRITTEN, *byte_pieces])
            parts += [rng.choice(AROUND), word, other]
        yield "".join(parts)


def attack(folder: Path, strings: int = STRINGS) -> dict[str, Any]:
    """How many control ids the strings produce, by each way to load the folder; and failed round trips."""
    import tokenizers
    import transformers

    tokenizer = load_tokenizer(folder)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    routes: dict[str, Callable[[list[str]], list[list[int]]]] = {
        "zero2all": tokenizer.encode_batch,
        "tokenizers": lambda texts: [found.ids for found in raw.encode_batch_fast(texts)],
        "AutoTokenizer": lambda texts: auto(texts)["input_ids"],
    }
    found = dict.fromkeys(routes, 0)
    differing = 0
    started = time.perf_counter()
    for batch in _batches(adversarial(list(tokenizer.control), _pieces(tokenizer), strings)):
        whole = [well_formed(text) for text in batch]
        results = {name: route(whole) for name, route in routes.items()}
        for name, ids in results.items():
            found[name] += sum(not tokenizer.control_ids.isdisjoint(one) for one in ids)
        differing += sum(
            ours != theirs or ours != others for ours, theirs, others in zip(*results.values(), strict=True)
        )
    return {
        "strings": strings,
        "strings_with_a_control_id": found,
        "strings_where_the_routes_differ": differing,
        "seconds": round(time.perf_counter() - started, 1),
    }


def run(strings: int = STRINGS, folders: dict[str, Path] | None = None) -> dict[str, Any]:
    """Attack every folder, or a small tokenizer of each kind; prints a line for each."""
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, folder) in enumerate((folders or _trained(Path(scratch))).items()):
            # All of them on the default kind; the others share its layout and get a tenth.
            results[name] = attack(folder, strings if number == 0 else max(1, strings // 10))
            hits = results[name]["strings_with_a_control_id"]
            print(
                f"{name:<24} {results[name]['strings']:,} strings: control ids {hits}, routes differ on "
                f"{results[name]['strings_where_the_routes_differ']}, {results[name]['seconds']} s",
                flush=True,
            )
    return results


def _trained(work: Path) -> dict[str, Path]:
    from zero2all.tokenizer import CONTROL_TOKENS

    texts = list(_training_texts(list(CONTROL_TOKENS)))
    folders = {}
    for name, settings in SETTINGS.items():
        folder = work / name.replace(" ", "-").replace(",", "")
        train_tokenizer(texts, 4_000, folder, name, **settings)
        folders[name] = folder
    return folders


def _training_texts(names: list[str]) -> Iterator[str]:
    """Chinese and English of the small world, Python's own library, and the names in pieces."""
    for language in ("en", "zh"):
        for document in documents(language, TRAINING_BYTES // 3, seed=1):
            yield document.text
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        size += len(text.encode())
        if size > TRAINING_BYTES / 3:
            break
    for text in adversarial(names, ["x"], 2_000, seed=1):
        yield well_formed(text)


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """Pieces of the vocabulary as text, to spell names with."""
    pieces = [tokenizer.token_bytes(number) for number in range(tokenizer.vocab_size)]
    likely = [piece for piece in pieces if any(mark in piece for mark in (b"<", b"|", b">", b"_"))]
    return [piece.decode("utf-8", "replace") for piece in (likely or pieces)[:500]]


def _batches(strings: Iterator[str]) -> Iterator[list[str]]:
    batch = []
    for text in strings:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strings", type=int, default=STRINGS)
    parser.add_argument("--folder", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.folder:
        run(arguments.strings, {str(folder): folder for folder in arguments.folder})
    else:
        save_result("tokenizer_fuzz", {"attacks": run(arguments.strings)})
