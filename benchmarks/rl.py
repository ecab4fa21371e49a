"""Does reinforcement learning teach what no written answer shows? Two tasks for two CPU cores, three seeds.

    python benchmarks/rl.py --work FOLDER tool          with a calculator that the model may call
    python benchmarks/rl.py --work FOLDER alone         three-digit sums, without it
    python benchmarks/rl.py show                        what was measured, from benchmarks/results/rl.json

A model of 1.1 M parameters first learns from written conversations (`start`). `tool`: sums of one and two digits, and
sums of twelve digits, which are beyond it; 40 % of those, and 30 % of the easy ones, call the calculator, which no
prompt names: that keeps rows short. All seeds begin with the same one. `alone`: sums of three digits, until it is right
in 30 % of them. Then `z2a rl` runs on other sums; with `tool` a third has one digit, which it can do without. The
reward is 1 where the last number is right, and `tool` costs 0.3 a call. Judged are 1,000 hard sums of pairs of numbers
that stand together in no prompt for training, in whatever order, and easy ones as they come, by the likeliest answer.
The honest row beside `alone`: the written conversations, continued for as long as the RL took.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS, save_result
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import config_from_values
from zero2all.config.finetune import GrpoConfig
from zero2all.finetune.data import DataOptions, pack_conversations
from zero2all.finetune.rewards import last_number
from zero2all.finetune.rl import sums
from zero2all.finetune.rollouts import Sampler
from zero2all.infer.load import load_model
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_files
from zero2all.tokenizer.template import chat_of
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.run import train

MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "layers": 4,
    "heads": 4,
    "kv_heads": 4,
    "qk_norm": True,
}
MODEL |= {"init_std": None, "init_embedding_std": 0.8, "init_head_std": 0.001, "init_residual": "zero"}
MUON = {
    **{"kind": "muon", "lr_max": 0.03, "lr_multipliers": {"embedding": 0.8, "head": 0.07, "norm": 0.2}},
    **{"beta2": 0.98, "eps": 1e-10, "weight_decay": 0.1, "decay_embeddings": False, "muon": {"iterations": 3}},
}
"""As the quickstart."""
TASKS: dict[str, dict[str, Any]] = {
    "tool": {"seq_len": 160, "rows": 20_000, "steps": 450, "vocabulary": 320, "rl_steps": 250, "lr": 2e-4},
    "alone": {"seq_len": 48, "rows": 40_000, "steps": 400, "vocabulary": 300, "rl_steps": 400, "lr": 2e-4},
}
HARD = 12
"""Digits of the sums that `tool` is for."""
HARD_PROMPTS = 60
"""Half as many as there are easy ones: what it learns of calls on the one kind it would do on the other."""
BEGIN_AT = 0.3
"""Of the hard sums are right where the RL begins."""
ASKED, LOOK_EVERY = 1000, 20
CALL_PRICE = -0.3


def conversation(row: dict[str, str], calls: bool) -> dict[str, Any]:
    """A sum with its result, told by the calculator or not."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    if calls:
        call = {"name": "calculator", "arguments": {"expression": row["prompt"].removesuffix("=")}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": row["answer"]})
    messages.append({"role": "assistant", "content": row["answer"]})
    return {"messages": messages}


def written(task: str, seed: int) -> list[dict[str, Any]]:
    """The conversations of the start."""
    draw, rows = random.Random(seed), TASKS[task]["rows"]
    if task == "alone":
        asked = [*sums(3, 3, rows * 4 // 5, seed), *sums(1, 2, rows // 5, seed)]
        found = [conversation(row, False) for row in asked]
    else:
        easy = [*sums(1, 1, rows * 2 // 5, seed), *sums(2, 2, rows // 10, seed)]
        found = [conversation(row, draw.random() < 0.3) for row in easy]
        found += [conversation(row, draw.random() < 0.4) for row in sums(HARD, HARD, rows // 2, seed)]
    draw.shuffle(found)
    return found


def prepare(work: Path, task: str) -> Workspace:
    """A workspace with a tokenizer and the packed conversations, of seed 0."""
    workspace, settings = open_workspace(work / task, create=True), TASKS[task]
    data = work / f"{task}.jsonl"
    if not data.is_file():
        data.write_text("".join(json.dumps(each) + "\n" for each in written(task, 0)), encoding="utf-8")
    if not workspace.tokenizer.is_dir():
        config = TokenizerConfig(kind="hf-bbpe", vocab_size=settings["vocabulary"])
        train_on_files([data], workspace.tokenizer, config)
    pack_conversations([data], workspace.tokenizer, workspace.packed, DataOptions(settings["seq_len"]))
    return workspace


def start(workspace: Workspace, task: str, seed: int, steps: int, name: str) -> float:
    """Learn from the written conversations; returns the seconds."""
    settings, began = TASKS[task], time.perf_counter()
    every = LOOK_EVERY if task == "alone" else steps
    values = {
        "model": {**MODEL, "max_seq_len": settings["seq_len"]},
        "data": {
            "seq_len": settings["seq_len"],
            "packing": "best_fit",
            "document_mask": True,
            "mixture": {"chat": 1.0},
        },
        "train": {
            **{
                "name": name,
                "steps": steps,
                "seed": seed,
                "tokens_per_step": (24 if task == "tool" else 32) * settings["seq_len"],
            },
            "micro_batch_samples": 24 if task == "tool" else 32,
        },
        "optim": MUON,
        "schedule": {"kind": "linear", "warmup_steps": 20, "min_lr_ratio": 0.0},
        "validation": {"every_steps": 0},
        "checkpoint": {"every_steps": every, "keep_every_steps": every},
    }
    train(config_from_values(values, "of the benchmark"), workspace, say=lambda _: None, brief=True)
    return time.perf_counter() - began


def first_step(workspace: Workspace, name: str, task: str, digits: tuple[int, int]) -> int:
    """The first checkpoint that answers at least BEGIN_AT of the hard sums."""
    for folder in sorted(list_checkpoints(workspace.run(name))):
        found = judged(workspace, name, task, digits, step_of(folder), 200)["right"]
        print(name, step_of(folder), found, flush=True)
        if found >= BEGIN_AT:
            return step_of(folder)
    raise SystemExit(f"{name} never answered {BEGIN_AT:.0%} of the sums: give it more steps")


def judged(
    workspace: Workspace, run: str, task: str, digits: tuple[int, int], step: int | None = None, count: int = ASKED
) -> dict[str, float]:
    """How the likeliest answers to held-out sums are."""
    settings, loaded = TASKS[task], load_model(run, workspace, step)
    template = chat_of(workspace.tokenizer, loaded.tokenizer)
    tools = ["calculator"] if task == "tool" else []
    config = GrpoConfig(max_new_tokens=112 if task == "tool" else 8, tools=tools)
    asked = list(sums(*digits, count, seed=7, held_out=digits != (1, 1)))
    prompts = {n: template.encode(Dialogue([Message("user", row["prompt"])])) for n, row in enumerate(asked)}
    answers = Sampler(loaded, template, config, settings["seq_len"] + 1).draw(prompts, 1, "judged", likeliest=True)
    right = [last_number(each.text) == int(asked[each.prompt]["answer"]) for each in answers]
    return {"right": sum(right) / count, "calls": sum(each.calls for each in answers) / count}


def seed_of(work: Path, task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One seed: start, RL, and for `alone` the written conversations continued."""
    settings, workspace = TASKS[task], prepare(work, task)
    kinds = {"easy": (1, 1), "hard": (HARD, HARD)} if task == "tool" else {"hard": (3, 3)}
    name, found = f"start-{1 if task == 'tool' else seed}", dict[str, Any](seed=seed)
    for each in (f"rl-{seed}", f"more-{seed}"):
        shutil.rmtree(workspace.run(each), ignore_errors=True)
    if not list_checkpoints(workspace.run(name)):
        found["start_seconds"] = start(workspace, task, seed, settings["steps"], name)
    step = settings["steps"] if task == "tool" else first_step(workspace, name, task, kinds["hard"])
    found["start_step"] = step
    found["start"] = {kind: judged(workspace, name, task, digits, step) for kind, digits in kinds.items()}
    print(json.dumps(found), flush=True)
    command = [sys.executable, "-m", "zero2all", "rl", name, "--work", str(workspace.root), "--name", f"rl-{seed}"]
    command += ["--step", str(step)]
    command += ["--steps", str(options.steps or settings["rl_steps"]), "--lr", str(options.lr or settings["lr"])]
    command += ["--prompts", str(options.prompts), "--answers", str(options.answers)]
    command += ["--max-new-tokens", str(112 if task == "tool" else 8), "--train.seed", str(seed)]
    command += ["--train.micro_batch_samples", "64", "--parallel.device", "cpu"]
    if task == "tool":
        easy = list(sums(1, 1, 2048, seed + 10))  # of which 90 are different
        hard = list(sums(HARD, HARD, HARD_PROMPTS, seed + 10))
        path = work / f"prompts-{seed}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [*easy, *hard]), encoding="utf-8")
        command += ["--data", str(path), "--tools", "calculator", "--reward", "number=1", f"calls={CALL_PRICE}"]
    else:
        command += ["--arithmetic", "3"]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    found["rl_seconds"] = time.perf_counter() - began
    found["rl"] = {kind: judged(workspace, f"rl-{seed}", task, digits) for kind, digits in kinds.items()}
    if task == "alone":
        share = found["rl_seconds"] / found["start_seconds"]
        start(workspace, task, seed, step + int(settings["steps"] * share), f"more-{seed}")
        found["more"] = {kind: judged(workspace, f"more-{seed}", task, digits) for kind, digits in kinds.items()}
    print(json.dumps(found), flush=True)
    return found


def table(task: str, rows: list[dict[str, Any]]) -> str:
    """The table of docs/rl.md: what was right of 1,000 sums, in percent; calls a sum; seconds of `z2a rl`."""
    heads = ["seed", "start", "RL", "SFT continued", "RL, s"]
    if task == "tool":
        heads = ["seed", "12 digits: start", "RL", "1 digit: start", "RL", "calls: start", "RL", "RL, s"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        before, after = row["start"], row["rl"]
        cells = [percent(before["hard"]["right"]), percent(after["hard"]["right"])]
        if task == "tool":
            cells += [percent(before["easy"]["right"]), percent(after["easy"]["right"])]
            cells += [f"{each['easy']['calls']:.2f}" for each in (before, after)]
        else:
            cells.append(percent(row["more"]["hard"]["right"]))
        lines.append([str(row["seed"]), *cells, f"{row['rl_seconds']:.0f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(share: float) -> str:
    """0.979 as 97.9."""
    return f"{100 * share:.1f}"


def main() -> None:
    """Run a task, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*TASKS, "show"])
    parser.add_argument("--work", type=Path, default=Path("rl-benchmark"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--answers", type=int, default=8)
    options = parser.parse_args()
    path = RESULTS / "rl.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if options.task != "show":
        options.work.mkdir(parents=True, exist_ok=True)
        rows = [seed_of(options.work, options.task, seed, options) for seed in options.seeds]
        known = {**known, options.task: rows}
        save_result("rl", {task: known[task] for task in TASKS if task in known})
    print("\n\n".join(table(task, known[task]) for task in TASKS if task in known))


if __name__ == "__main__":
    main()
