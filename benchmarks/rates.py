"""Do the rules' rates transfer? Models of five shapes, five rates of the matrices around the rule's, two seeds.

    python benchmarks/rates.py PACKED                      50 runs on a GPU; PACKED: what z2a pack wrote
    python benchmarks/rates.py PACKED --only 512x8 256x4   some shapes; a later call adds the others to the same file
    python benchmarks/rates.py PACKED --small              two tiny shapes, one seed: minutes on a CPU
    python benchmarks/rates.py PACKED --together           embedding, head and norms move with the matrices

Every run goes through the trainer and takes everything but the rate from the rules: batch, warmup, schedule, and the
decay, whose product with the rate stays (tau). The table has the held-out loss (nats per token, mean of the seeds) by
the factor on the rule's rate, and what the rule loses against the best of them. A difference between seeds of the same
size means that the rule cannot be told from the best. Results: benchmarks/results/rates.json, one entry a shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS, save_result
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import load_config
from zero2all.train.run import train

SHAPES = {"256x4": "8M", "256x16": "6M", "512x8": "6M", "768x12": "4M", "1024x4": "4M"}
SMALL_SHAPES = {"64x2": "60K", "96x4": "60K"}
"""Width x layers -> tokens of a run; fewer for larger ones, so that each takes about as long."""
FACTORS = tuple(2 ** (power / 2) for power in (-2, -1, 0, 1, 2))
SEEDS = (1, 2)


def recipe(shape: str, tokens: str, packed: Path, is_small: bool) -> dict[str, Any]:
    """The values of a config: a Qwen3 model, everything else by rule."""
    width, layers = map(int, shape.split("x"))
    heads, seq_len = max(1, width // (32 if is_small else 128)), 256 if is_small else 2048
    return {
        "model": {
            **{"hidden_size": width, "intermediate_size": -(-width * 8 // 3 // 64) * 64, "layers": layers},
            **{"heads": heads, "kv_heads": heads, "max_seq_len": seq_len, "rope_theta": 1e5, "qk_norm": True},
            "embedding_norm": True,
            **{"init_std": None, "init_embedding_std": 0.8, "init_head_std": 0.001, "init_residual": "zero"},
        },
        "data": {"seq_len": seq_len, "packed": str(packed.resolve())},
        "optim": {"kind": "muon"},
        "train": {
            **{"name": "rates", "tokens": tokens, "precision": "float32" if is_small else "bfloat16"},
            **({"tokens_per_step": 4096, "micro_batch_samples": 16} if is_small else {"micro_batch_samples": 32}),
        },
        "validation": {"every_steps": 0, "tokens_per_source": 8192 if is_small else 1 << 18},
        "checkpoint": {"every_steps": 0},
        "resilience": {"memory_every_steps": 0},
    }


def measure(path: Path, work: Workspace, together: bool, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The held-out loss of each factor and seed."""
    rule = load_config(path)
    multipliers = {f"--optim.lr_multipliers.{kind}={times}" for kind, times in rule.optim.lr_multipliers.items()}
    losses: dict[str, list[float]] = {}
    started = time.monotonic()
    for factor in FACTORS:
        words = [f"--optim.lr_max={rule.optim.lr_max * factor}", *(multipliers if together else ())]
        for seed in seeds:
            config = load_config(path, [*words, f"--train.seed={seed}"])
            summary = train(config, work, fresh=True, say=lambda _: None, brief=True)
            losses.setdefault(f"{factor:.3f}", []).append(summary.held_out["eval/valid/loss"])
            print(f"x{factor:.3f} seed {seed}: {losses[f'{factor:.3f}'][-1]:.4f}", flush=True)
    means = {factor: statistics.fmean(found) for factor, found in losses.items()}
    best = min(means, key=means.__getitem__)
    return {
        "lr_max": rule.optim.lr_max,
        "tokens": rule.train.tokens,
        "tokens_per_step": rule.train.tokens_per_step,
        "losses": losses,
        "best_factor": float(best),
        "rule_minus_best": means["1.000"] - means[best],
        "between_seeds": max(max(found) - min(found) for found in losses.values()),
        "seconds": time.monotonic() - started,
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    """A line for each shape."""
    print(f"{'shape':<8} {'lr_max':>8} " + " ".join(f"x{factor:<7.3f}" for factor in FACTORS) + " rule-best  seeds")
    for shape, found in results.items():
        cells = " ".join(f"{statistics.fmean(losses):8.4f}" for losses in found["losses"].values())
        end = f"{found['rule_minus_best']:9.4f} {found['between_seeds']:6.4f} {found['seconds']:7.0f} s"
        print(f"{shape:<8} {found['lr_max']:8.4g} {cells} {end}", flush=True)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path, help="folder that z2a pack wrote, such as work/packed")
    parser.add_argument("--only", nargs="+", metavar="SHAPE", help="these shapes")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--together", action="store_true", help="move the rates of all parameters")
    arguments = parser.parse_args()
    shapes = SMALL_SHAPES if arguments.small else SHAPES
    name = "rates" + ("_small" if arguments.small else "") + ("_together" if arguments.together else "")
    saved = RESULTS / f"{name}.json"
    results = json.loads(saved.read_text())["shapes"] if arguments.only and saved.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = open_workspace(Path(folder) / "work", create=True)
        for shape in arguments.only or shapes:
            path = Path(folder) / "run.yaml"
            path.write_text(yaml.safe_dump(recipe(shape, shapes[shape], arguments.packed, arguments.small)))
            results[shape] = measure(path, work, arguments.together, SEEDS[: 1 if arguments.small else 2])
            show({shape: results[shape]})
            save_result(name, {"shapes": results})
    show(results)


if __name__ == "__main__":
    main()
