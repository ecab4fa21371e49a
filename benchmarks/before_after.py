"""Is this checkout as fast as an earlier one? Training steps and decoding of both, by turns: A B A, on one machine.

    git worktree add /tmp/before 79f530b8
    python benchmarks/before_after.py /tmp/before                               z2all-1b with AdamW, 4 minutes
    python benchmarks/before_after.py /tmp/before --config quickstart --batch 8x256x1    anywhere

Every measurement is a process of its own, which imports the package of its checkout. Training: the trainer's own step
on random tokens, in bfloat16 (float32 without a GPU) and, where the GPU has it, with float8 linear layers. Decoding: a
greedy batch of 1 and of 64 from prompts of 128 ids. What is compared is the mean of both A with B.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure by turns, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the earlier checkout")
    parser.add_argument("--config", default=str(HERE / "benchmarks/z2all-1b-adamw.yaml"))
    parser.add_argument("--batch", default="16x2048x4", help="samples a pass x tokens x passes a step")
    parser.add_argument("--seconds", type=float, default=9.0, help="of each measurement of training")
    parser.add_argument("--new", type=int, default=256, help="tokens to decode")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        arguments.child.write_text(json.dumps(measure(arguments)))
        return
    if arguments.before is None:
        parser.error("name the folder of the earlier checkout")
    found = [one_turn(tree, sys.argv[1:]) for tree in (arguments.before, HERE, arguments.before)]
    ratios = {name: found[1][name] / statistics.mean((found[0][name], found[2][name])) for name in found[1]}
    for name, ratio in ratios.items():
        print(f"{name:<10} " + "  ".join(f"{each[name]:12,.0f}/s" for each in found) + f"  after/before {ratio:.4f}")
    sys.path.insert(0, str(HERE))
    from benchmarks.machine import save_result

    save_result("before_after", {"config": arguments.config, "batch": arguments.batch, "a b a": found, "ratio": ratios})


def one_turn(tree: Path, words: list[str]) -> dict[str, float]:
    """Measure one checkout in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        subprocess.run(
            [sys.executable, __file__, *words, "--child", str(answer)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=tree,
            check=True,
        )
        result: dict[str, float] = json.loads(answer.read_text())
        return result


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of training and decoding of the package that is imported."""
    sys.path[0] = ""  # the checkout of this process, not the one of this file
    import torch

    try:
        from zero2all.measure.short_run import measure_steps
        from zero2all.predict.batch import load_measured_config, parse_batch
    except ImportError:  # before 19 November 2026
        from zero2all.perf.batch import load_measured_config, parse_batch  # type: ignore[no-redef]
        from zero2all.perf.short_run import measure_steps, shaped  # type: ignore[no-redef]
    else:

        def shaped(config: Any, _: Any) -> Any:
            return config

    from benchmarks.generate import ours, random_model

    on_gpu, batch, found = torch.cuda.is_available(), parse_batch(arguments.batch), dict[str, float]()
    kinds = {"train": ["--train.precision=bfloat16"], "train fp8": ["--train.precision=bfloat16", "--ops.linear=fp8"]}
    for name, overrides in kinds.items() if on_gpu else {"train": ["--train.precision=float32"]}.items():
        config, _ = load_measured_config(arguments.config, overrides)
        row = measure_steps(shaped(config, batch), batch, arguments.seconds, False)
        found[name] = batch.tokens / row["step_seconds"]
        print(f"{name}: {found[name]:,.0f} tokens/s; {row['gpu']}", flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    config, _ = load_measured_config(arguments.config, [])
    model = random_model(config.model, torch.device("cuda" if on_gpu else "cpu"), None)
    for size in (1, 64):
        generate, _ = ours(model, size, 128 + arguments.new)
        seconds = []
        for seed in range(4):
            ids = torch.randint(0, config.model.vocab_ids, (size, 128), generator=torch.Generator().manual_seed(seed))
            began = time.perf_counter()
            generate(ids, arguments.new if seed else 8)
            seconds.append(time.perf_counter() - began)
        found[f"decode {size}"] = size * arguments.new / statistics.median(seconds[1:])
        print(f"decode {size}: {found[f'decode {size}']:,.0f} tokens/s", flush=True)
    return found


if __name__ == "__main__":
    main()
