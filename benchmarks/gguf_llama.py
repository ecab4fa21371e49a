"""A run as GGUF files in llama.cpp: the same ids of hard strings and chats, greedy text and log-probabilities as here.

    sh scripts/build_llama_cpp.sh /somewhere/llama                                          once, 20 to 50 minutes
    python benchmarks/gguf_llama.py RUN --work WORK --python /somewhere/llama/bin/python          a minute
    python benchmarks/gguf_llama.py FOLDER --text FILE --python …              a Hugging Face folder, and held-out text

llama.cpp answers in a process of its own (llama_answers.py), with its defaults (among them a float16 cache). Rows are
held-out text of the workspace. For each type three models are compared: ours in float32, ours with the weights that are
in the file (imported back), and llama.cpp with the file. The distance of the first two is the format's error, that of
the last two what llama.cpp computes otherwise: its quantised types round activations to 8 bits as well.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.engine_answers import picked
from benchmarks.machine import RESULTS, save_result
from zero2all.common.progress import say, show_log
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.gguf import GgufType, export_gguf, import_gguf
from zero2all.infer.load import LoadedModel, load_model, load_run
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.template import chat_of

PROGRAM = Path(__file__).with_name("llama_answers.py")
TYPES: tuple[GgufType, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0")
STRINGS, ROWS, PROMPT, NEW = 2_000, 12, 32, 64
TIE = 1e-2
"""Two best logits so near to each other may change places."""
MOST_NATS = {"f32": 0.02, "f16": 0.02, "bf16": 0.05, "q8_0": 0.1, "q4_0": 1.0}
"""Largest mean distance of a log-probability between llama.cpp and our model in float32."""
PARTS = [
    *(
        "🙂",
        "👩‍👩‍👧‍👦",
        "🇫🇷",
        "👍🏽",
        "❤️",
        "שלום",
        "العربية",
        "\u202e",
        "\u200f",
        "\u200d",
        "\u200b",
        "\ufeff",
        "e\u0301",
    ),
    *("n\u0303", "한", "\u1112\u1161\u11ab", "\x00", "\x01", "\x1b[0m", "\x7f", "\x85", "\u2028", "\u2029", "\u00a0"),
    *(
        "\u3000",
        "\r",
        "\n",
        "\r\n",
        "\n\n",
        "\t",
        " ",
        "  ",
        "   ",
        "0",
        "42",
        "3.14159",
        "1,000,000",
        "٣٤",
        "१२",
        "½",
        "²",
    ),
    *(
        "Ⅳ",
        "中文",
        "，",
        "。",
        "日本語の",
        "カタカナ",
        "Кириллица",
        "Ελλ",
        "ไทย",
        "हिन्दी",
        "ǅ",
        "ﬁ",
        "Ａ",
        "ß",
        "İ",
        "ı",
    ),
    *(
        "don't",
        "I'M",
        "we'LL",
        "'s",
        "'",
        "’s",
        "hello",
        " world",
        "def f(x):",
        "    return",
        "!!!",
        "...",
        "--",
        "<|",
        "|>",
    ),
    *("<|end_of_text|>", "<|message_start|>user", "<|message_end|>", "<s>", "</s>", "[PAD5]", "<0x0A>", "▁", "Ġ", "Ċ"),
    *(
        "<|im_end|>",
        "<|endoftext|>",
        "\U0010fffd",
        "\U000e0001",
        "\ufffd",
        "\ue000",
        "𝒳",
        "𠮷",
        "_",
        "~",
        "^",
        "\\n",
        "©",
    ),
]


def hard_strings(count: int, seed: int = 20261119) -> list[str]:
    """Emoji, right-to-left, decomposed, control characters, digits, mixed scripts, look-alikes of control tokens; every
    fourth of any characters at all."""
    draw = random.Random(seed)
    letters = [chr(code) for code in range(0x2FFFF) if not 0xD800 <= code < 0xE000]
    return [
        "".join(draw.choices(letters if number % 4 == 0 else PARTS, k=draw.randrange(1, 16))) for number in range(count)
    ]


def held_out(texts: list[str], loaded: LoadedModel) -> list[list[int]]:
    """Rows of these texts, each behind the token that opens a document."""
    opening = loaded.tokenizer.end_id if loaded.tokenizer.begin_id is None else loaded.tokenizer.begin_id
    ids = [number for text in texts for number in loaded.tokenizer.encode_text(text)]
    length = min(loaded.window - NEW, 128) - 1
    starts = range(0, len(ids) - length, max(length, (len(ids) - length) // ROWS))
    return [[opening, *ids[start : start + length]] for start in starts][:ROWS]


@torch.no_grad()
def logits_of(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """(tokens, vocabulary) in float32."""
    model = loaded.model
    return model.logits(model(torch.tensor([ids])))[0, :, : model.config.vocab_ids].float()


def same_greedy(loaded: LoadedModel, prompt: list[int], theirs: list[int]) -> tuple[int, int]:
    """Ids of theirs that are our best one, and ties (which end the comparison, as the texts differ then)."""
    logits = logits_of(loaded, [*prompt, *theirs])[len(prompt) - 1 : -1]
    for place, (row, token) in enumerate(zip(logits, theirs, strict=True)):
        if int(row.argmax()) != token:
            return place, int(row.max() - row[token] <= TIE)
    return len(theirs), 0


def main() -> int:
    """Export, ask, compare, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--work", type=Path, help="workspace of the run, whose held-out text is taken")
    parser.add_argument("--text", type=Path, help="with a Hugging Face folder: a file of text")
    parser.add_argument("--python", required=True, help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, help="types of files (default: all)")
    parser.add_argument("--name", help="what the row of the results is called (default: the run)")
    arguments = parser.parse_args()
    if (arguments.work is None) == (arguments.text is None):
        parser.error("give --work with a run, or --text with a Hugging Face folder")
    if arguments.work is not None:
        workspace = open_workspace(arguments.work)
        loaded, tokenizer_folder = load_run(workspace, arguments.run), workspace.tokenizer
        shards = sorted((workspace.root / "corpus").glob("*/valid/part-*.jsonl"))
        lines = [line for file in shards for line in file.read_text(encoding="utf-8").splitlines()]
        read = [json.loads(line)["content"] for line in lines]
    else:
        loaded, tokenizer_folder = load_model(arguments.run, dtype="float32"), Path(arguments.run)
        read = [arguments.text.read_text(encoding="utf-8")[:1_000_000]]
    tokenizer, rows, texts = loaded.tokenizer, held_out(read, loaded), hard_strings(STRINGS)
    chats = [[("user", "Who are you? 🙂"), ("assistant", "A model."), ("user", " 1 + 1\né")], [("user", "hi")]]
    with tempfile.TemporaryDirectory(prefix="z2a-gguf-") as place:
        folder = Path(place)
        files = {kind: folder / f"{kind}.gguf" for kind in arguments.types}
        for kind, path in files.items():
            export_gguf(loaded, tokenizer_folder, path, kind)
        dialogues = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
        asked = {"texts": texts, "chats": dialogues, "rows": rows, "prompt": PROMPT, "new": NEW}
        asked["files"] = {kind: str(path) for kind, path in files.items()}
        command = [arguments.python, str(PROGRAM), str(folder / "answer.json")]
        done = subprocess.run(
            command, input=json.dumps(asked), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise SystemExit(f"llama.cpp failed:\n{done.stdout[-4000:]}")
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        imported = Workspace(folder / "imported")
        back = {kind: load_run(imported, import_gguf(path, imported, kind).run.name) for kind, path in files.items()}
        sizes = {kind: path.stat().st_size for kind, path in files.items()}
    wrong = [text for text, ids in zip(texts, answer["texts"], strict=True) if tokenizer.encode_text(text) != ids]
    template = chat_of(tokenizer_folder, tokenizer)
    ours_chats = [template.encode(Dialogue([Message(role, text) for role, text in chat])) for chat in chats]
    chats_equal = [one == other for one, other in zip(ours_chats, answer["chats"], strict=True)]
    say(f"llama-cpp-python {answer['version']}: ids of {len(texts) - len(wrong):,} of {len(texts):,} strings equal")
    for text in wrong[:5]:
        say(f"  {text!r}: {tokenizer.encode_text(text)}, llama.cpp {answer['texts'][texts.index(text)]}")
    say(f"chats equal: {chats_equal}")
    exact = [picked(logits_of(loaded, row).log_softmax(-1), row) for row in rows]
    figures: dict[str, Any] = {}
    for kind, found in answer["files"].items():
        stored = [picked(logits_of(back[kind], row).log_softmax(-1), row) for row in rows]
        of_rows = [same_greedy(back[kind], row[:PROMPT], told) for row, told in zip(rows, found["greedy"], strict=True)]
        figures[kind] = {
            "bytes": sizes[kind],
            "format_nats": distance(exact, stored),
            "engine_nats": distance(stored, found["scores"]),
            "total_nats": distance(exact, found["scores"]),
            "loss_change": mean(found["scores"], exact),
            "greedy_equal": sum(same for same, _ in of_rows),
            "greedy_ties": sum(tie for _, tie in of_rows),
            "greedy_rows_right": sum(same == NEW or tie for same, tie in of_rows),
        }
        say(f"{kind:5} {figures[kind]}")
    fits = all(figures[kind]["total_nats"]["mean"] <= MOST_NATS[kind] for kind in figures)
    greedy_right = "f16" not in figures or figures["f16"]["greedy_rows_right"] == len(rows)
    is_right = not wrong and all(chats_equal) and fits and greedy_right
    name = arguments.name or loaded.name
    path = RESULTS / "gguf.json"
    before = json.loads(path.read_text(encoding="utf-8"))["models"] if path.is_file() else {}
    facts = {
        "parameters": loaded.parameters,
        "strings": len(texts),
        "strings_differ": wrong,
        "chats_equal": chats_equal,
    }
    facts |= {"rows": len(rows), "tokens": len(rows[0]), "prompt": PROMPT, "new": NEW, "right": is_right}
    versions = {"llama_cpp_python": answer["version"], "gguf": version("gguf"), "system": answer["system"].strip()}
    save_result("gguf", {"versions": versions, "models": before | {name: facts | {"types": figures}}})
    return 0 if is_right else 1


def distance(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float]:
    """Mean and largest distance of log-probabilities."""
    off = [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return {"mean": statistics.fmean(off), "most": max(off)}


def mean(theirs: list[list[float]], ours: list[list[float]]) -> float:
    """Change of the loss in nats a token."""
    return statistics.fmean(a - b for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))


if __name__ == "__main__":
    show_log()
    sys.exit(main())
