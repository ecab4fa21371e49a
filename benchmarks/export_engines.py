"""Exported models in other engines: the log-probabilities and the greedy text that ours has, in float32 on the CPU.

    python benchmarks/export_engines.py              small random models of each layout, a minute
    python benchmarks/export_engines.py --only qwen3 one layout

Every engine that can be imported is asked: transformers, vLLM (its CPU build), MLX (`mlx`, `mlx-lm`; `mlx-cpu` on
Linux). Each loads the folder that `z2a export` would write, scores the same ids and continues them greedily. The
weights are large, so that the model has preferences: with usual initial weights all tokens would be equally likely, and
any order of sums would decide the text. One engine after another may be installed elsewhere and put on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.machine import save_result
from zero2all.common.progress import say
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.hf import write_hf_folder
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.layout import QK_NORMS, init_weights, model_parts

MOST_NATS = 1e-4
"""Largest difference of a log-probability."""
PROMPT, NEW = 64, 48
"""Tokens that are scored, and tokens of greedy text behind them."""
SHAPE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 4}
SHAPE |= {"kv_heads": 2, "head_dim": 64, "max_seq_len": 256, "init_std": 0.15}
SOFTMAX = MoeConfig(experts=8, experts_per_token=2, expert_size=64, router="softmax", balance_rate=0.0)
MODELS = {
    "llama": ModelConfig(**SHAPE),
    "qwen2": ModelConfig(**SHAPE | {"head_dim": None}, attention_bias="qkv", tied_embeddings=True),  # MLX has no other
    "qwen3": ModelConfig(**SHAPE, qk_norm=True, init_qk_gain=1.5),
    "qwen3_moe": ModelConfig(**SHAPE, qk_norm=True, moe=SOFTMAX),
}
Answer = tuple[Tensor, list[int]]
"""Log-probabilities of the ids of the prompt from the second on, and the greedy ids after it."""


def in_transformers(folder: Path, ids: list[int]) -> Answer:
    """By AutoModelForCausalLM."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = torch.tensor([ids])
    with torch.no_grad():
        scores = model(given).logits[0].log_softmax(-1)
        told = model.generate(given, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    return picked(scores, ids), told[0, len(ids) :].tolist()


def in_vllm(folder: Path, ids: list[int]) -> Answer:
    """By its offline engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256)
    asked = SamplingParams(temperature=0, max_tokens=NEW, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    (result,) = engine.generate([{"prompt_token_ids": ids}], asked)
    scored = result.prompt_logprobs[1:]
    scores = [each[token].logprob for each, token in zip(scored, ids[1:], strict=True)]
    return torch.tensor(scores), list(result.outputs[0].token_ids)


def in_mlx(folder: Path, ids: list[int]) -> Answer:
    """By mlx-lm's model, without its cache."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)

    def logits(tokens: list[int]) -> Tensor:
        return torch.tensor(model(mx.array([tokens])).astype(mx.float32).tolist()[0])

    return picked(logits(ids).log_softmax(-1), ids), greedy(logits, ids)


ENGINES: dict[str, tuple[str, Callable[[Path, list[int]], Answer]]] = {
    "transformers": ("transformers", in_transformers),
    "vllm": ("vllm", in_vllm),
    "mlx": ("mlx_lm", in_mlx),
}


def picked(scores: Tensor, ids: list[int]) -> Tensor:
    """Of (T, V) log-probabilities those of the next ids."""
    return scores[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def greedy(logits: Callable[[list[int]], Tensor], ids: list[int]) -> list[int]:
    """The likeliest ids, one after the other."""
    told = list(ids)
    for _ in range(NEW):
        told.append(int(logits(told)[-1].argmax()))
    return told[len(ids) :]


def ours(config: ModelConfig, folder: Path, ids: list[int]) -> Answer:
    """Our own answer; the model is exported to `folder`."""
    model = Z2all(config, resolve(OpsConfig(), "cpu")).eval()
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(QK_NORMS) or parameter.dim() == 1:  # mixing them up must show
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5, generator=generator))
    tensors = {name: part.values for name, part in model_parts(model).items()}
    write_hf_folder(folder, config, tensors, "float32", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None})

    @torch.no_grad()
    def logits(tokens: list[int]) -> Tensor:
        return model.logits(model(torch.tensor([tokens])))[0]

    return picked(logits(ids).log_softmax(-1), ids), greedy(logits, ids)


def main() -> int:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one layout")
    only = parser.parse_args().only
    ids = torch.randint(2, SHAPE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    there = {name: one for name, one in ENGINES.items() if importlib.util.find_spec(one[0]) is not None}
    rows, is_right = [], True
    for layout in [only] if only else MODELS:
        with tempfile.TemporaryDirectory(prefix="z2a-engines-") as folder:
            scores, text = ours(MODELS[layout], Path(folder), ids)
            for name, (_, ask) in there.items():
                found, told = ask(Path(folder), ids)
                off, is_same = float((found - scores).abs().max()), told == text
                is_right &= is_same and off <= MOST_NATS
                say(f"{layout:10} {name:13} log-probabilities within {off:.1e}, greedy text equal: {is_same}")
                version = importlib.metadata.version(name)
                rows.append({"layout": layout, "engine": name, "version": version, "off": off, "text_equal": is_same})
    say(f"not installed: {', '.join(ENGINES.keys() - there.keys()) or 'none'}")
    save_result("export_engines", {"prompt": PROMPT, "new": NEW, "rows": rows})
    return 0 if is_right and rows else 1


if __name__ == "__main__":
    sys.exit(main())
