"""What llama.cpp answers for GGUF files: a program of its own, for the environment of scripts/build_llama_cpp.sh.

    echo '{"files": {"f16": "m.gguf"}, "texts": ["a"], "chats": [], "rows": [[0, 5, 7]], "prompt": 2, "new": 8}' |
        llama/bin/python benchmarks/llama_answers.py answer.json

It needs llama-cpp-python and numpy, nothing of ours. The answer holds the version, the ids of the texts and of the
chats, and by file the log-probabilities of each row from its second id on, and the greedy ids after its first `prompt`
ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))
"""On a busy machine one is many times as fast: each thread waits for the slowest, and turns in a loop meanwhile."""


def picked(logits: Any, ids: list[int]) -> list[float]:
    """Log-probabilities of the ids from the second on."""
    wide = logits[: len(ids) - 1].astype(np.float64)
    top = wide.max(-1, keepdims=True)
    all_of_them = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    return [float(row[number]) for row, number in zip(all_of_them, ids[1:], strict=True)]


def greedy(model: Any, ids: list[int], new: int) -> list[int]:
    """The most likely id, again and again."""
    model.reset()
    model.eval(ids)
    found: list[int] = []
    for _ in range(new):
        found.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(found[-1:])
    return found


def chat_ids(model: Any, messages: list[dict[str, str]]) -> list[int]:
    """A conversation as the file's own template lays it out."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    names = [model._model.token_get_text(number) for number in (model.token_eos(), model.token_bos())]
    made = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], *names)(messages=messages)
    return list(model.tokenize(made.prompt.encode(), add_bos=False, special=True))


def main() -> None:
    """Read the question, write the answer."""
    import llama_cpp

    asked = json.load(sys.stdin)
    longest = max(len(row) for row in asked["rows"]) + asked["new"]
    answer: dict[str, Any] = {"version": llama_cpp.__version__, "files": {}}
    answer["system"] = llama_cpp.llama_print_system_info().decode()
    for kind, path in asked["files"].items():
        model = llama_cpp.Llama(path, n_ctx=longest, n_batch=longest, logits_all=True, n_threads=THREADS, verbose=False)
        if "texts" not in answer:
            answer["texts"] = [model.tokenize(text.encode(), add_bos=False, special=False) for text in asked["texts"]]
            answer["opened"] = model.tokenize(b"a", special=False)
            answer["chats"] = [chat_ids(model, messages) for messages in asked["chats"]]
        found: dict[str, list[Any]] = {"scores": [], "greedy": []}
        for row in asked["rows"]:
            model.reset()
            model.eval(row)
            found["scores"].append(picked(model.scores, row))
            found["greedy"].append(greedy(model, row[: asked["prompt"]], asked["new"]))
        answer["files"][kind] = found
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
