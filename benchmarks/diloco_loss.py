"""DiLoCo's loss at equal tokens: data parallel against groups that exchange weights every H steps, on real text.

    python benchmarks/diloco_loss.py --text FOLDER --jobs 10         H200: 10 M parameters, 26 runs, 11 minutes
    python benchmarks/diloco_loss.py --tiny --text FOLDER            a CPU: shows only that everything runs
    python benchmarks/diloco_loss.py --small --text FOLDER           a CPU: the quickstart's size, local SGD too

The text: every .py, .pyi, .md, .rst and .txt file below FOLDER, each content once, in an order given by its hash, so
that the last 2 % can be held out. At most 280 MB are taken (86.7 M tokens to train on); 100 MB of it will do. An
installed Python with many packages has them:

    --text "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

It is cut into tokens by a byte-level BPE vocabulary of 4,096 that is trained on it (kept in --out; --tokens FILE takes
a .npy of 16-bit token ids instead). Groups are model replicas in one process, joined by `MemoryLink`: the trainer's
own step and the outer optimizer of `zero2all.diloco`. The seed decides initial weights and the order of the data,
so the variants of one seed are a pair. Learning rates, inner and outer, are chosen on another seed, for each variant by
itself: with momentum mu an outer rate r multiplies what a group learns by up to r / (1 - mu). Every run is a process of
its own, some at once; its result is kept in --out, so that a program that was stopped goes on where it was. On a GPU
start `nvidia-cuda-mps-control -d` before: without it processes take turns on the card.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.diloco_memory_link import Hub
from benchmarks.machine import save_result
from zero2all.common.cores import usable_cores
from zero2all.config import RunConfig, config_from_values
from zero2all.config.schedule import learning_rate
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.outer_optimizer import OuterOptimizer
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.parameter_table import draw
from zero2all.parallel.world import World
from zero2all.train.build import empty_state, op_context
from zero2all.train.cuda_graph import choose_cuda_graph
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep
from zero2all.train.train_step import StepPlan, train_step

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data parallel": (1, {}),
    "DiLoCo, 2 groups": (2, {"scheme": "diloco", "compress": "bf16"}),
    "streaming int4, 2 groups": (2, {"scheme": "streaming", "compress": "int4"}),
    "DiLoCo, 1 group": (1, {"scheme": "diloco", "compress": "float32"}),
    "local SGD, 2 groups": (2, {"scheme": "diloco", "compress": "bf16", "outer_lr": 1.0, "momentum": 0.0}),
}
"""Groups, and fields of the section diloco; none: data parallel."""
MAIN = ("data parallel", "DiLoCo, 2 groups", "streaming int4, 2 groups", "DiLoCo, 1 group")
LIMITS = {"DiLoCo, 2 groups": 1.5, "streaming int4, 2 groups": 2.0}
"""Percent of loss above data parallel that must not be exceeded, in the main size: others are too short to judge."""
TUNING_SEED, SEEDS = 1000, (1, 2, 3)


class Rates(NamedTuple):
    """What is tuned: the highest inner learning rate, and fields of the outer optimizer (None: the default)."""

    lr: float
    outer_lr: float | None = None
    momentum: float | None = None
    alpha: float | None = None

    @property
    def outer(self) -> dict[str, float]:
        """Fields of the section diloco."""
        return {name: value for name, value in self._asdict().items() if name != "lr" and value is not None}

    def __str__(self) -> str:
        signs = {"outer_lr": "r", "momentum": "mu", "alpha": "alpha"}
        return " ".join([f"{self.lr:g}", *(f"{signs[name]} {value:g}" for name, value in self.outer.items())])


TRIALS: dict[str, tuple[Rates, ...]] = {
    "data parallel": (Rates(1.4e-3), Rates(2e-3), Rates(3e-3)),
    "DiLoCo, 2 groups": (
        *(Rates(lr, 0.6, 0.7) for lr in (1e-3, 1.4e-3, 2e-3, 3e-3)),
        Rates(1.4e-3, 0.67, 0.5),
    ),
    "streaming int4, 2 groups": tuple(Rates(lr, 0.6, 0.7, 0.0) for lr in (1e-3, 1.4e-3, 2e-3, 3e-3)),
    "DiLoCo, 1 group": (Rates(1.4e-3, 0.67, 0.5), Rates(2e-3, 0.67, 0.5)),
}
"""What is tried on the seed for tuning, by the main size; the others take the rates of their size and the config."""
SAVED = Path(__file__).parent / "results/diloco_loss.json"
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
VOCABULARY, MOST_TEXT_BYTES, TOKENIZER_BYTES = 4096, 280_000_000, 20_000_000


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the length of its runs."""

    hidden: int
    layers: int
    heads: int
    inner: int
    rows: int
    seq_len: int
    steps: int
    every: int
    lr: float
    variants: tuple[str, ...] = MAIN


SIZES = {
    "main": Size(448, 4, 7, 896, rows=64, seq_len=256, steps=6000, every=30, lr=2e-3),
    "small": Size(128, 4, 4, 384, rows=8, seq_len=128, steps=900, every=30, lr=2e-3, variants=tuple(VARIANTS)),
    "tiny": Size(64, 4, 2, 128, rows=4, seq_len=32, steps=40, every=10, lr=2e-3, variants=tuple(VARIANTS)),
}


def main() -> None:
    """Make tokens, run every variant, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a folder with text files")
    parser.add_argument("--tokens", type=Path, help="a .npy of token ids instead")
    parser.add_argument("--out", type=Path, default=Path("diloco_loss"), help="results of single runs")
    parser.add_argument("--jobs", type=int, default=4, help="runs at once")
    parser.add_argument("--steps", type=int, help="instead of those of the size")
    parser.add_argument("--tiny", action="store_const", dest="size", const="tiny", default="main")
    parser.add_argument("--small", action="store_const", dest="size", const="small")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--save", action="store_true", help="also benchmarks/results/diloco_loss.json")
    parser.add_argument("--draw", type=Path, help="draw the curves of the saved result into this file, run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        draw_curves(json.loads(SAVED.read_text())["variants"], arguments.draw)
        return
    size = SIZES[arguments.size]
    size = dataclasses.replace(size, steps=arguments.steps or size.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokens = arguments.tokens or arguments.out / "tokens.npy"
    if arguments.one:
        one_run(size, np.load(tokens), json.loads(arguments.one), arguments.jobs)
        return
    if not tokens.exists():
        if arguments.text is None:
            parser.error("give a folder with --text, or token ids with --tokens")
        np.save(tokens, make_tokens(arguments.text))
    needed, available = size.rows * size.seq_len * size.steps, int(0.98 * len(np.load(tokens, mmap_mode="r")))
    print(f"{available / 1e6:.1f} M tokens to train on; a run reads {needed / 1e6:.1f} M", flush=True)
    chosen, trials = tune(arguments, size)
    seeds = SEEDS[: arguments.seeds]
    asked = [(name, seed, chosen[name]) for seed in seeds for name in size.variants]
    found = run_all(arguments, size, asked)
    report(arguments, size, seeds, chosen, trials, found)


# ---- the text ----


def make_tokens(folder: Path) -> np.ndarray:
    """Token ids of all text below a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and 200 < path.stat().st_size < 2_000_000:
            text = path.read_text("utf-8", "ignore")
            texts[hashlib.blake2b(text.encode(), digest_size=8).hexdigest()] = text
    ordered, total = [], 0
    for _, text in sorted(texts.items()):
        ordered.append(text)
        total += len(text)
        if total > MOST_TEXT_BYTES:
            break
    if total < 100_000:
        raise SystemExit(f"{folder} has only {total} characters of {', '.join(SUFFIXES)} files")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sample, length = [], 0
    for text in ordered:
        sample.append(text)
        length += len(text)
        if length > TOKENIZER_BYTES:
            break
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    ids: list[np.ndarray] = []
    for first in range(0, len(ordered), 512):
        encoded = tokenizer.encode_batch(ordered[first : first + 512])
        ids += [np.array([*one.ids, 0], dtype=np.uint16) for one in encoded]
    print(f"{len(ordered)} files, {total / 1e6:.1f} M characters", flush=True)
    return np.concatenate(ids)


# ---- many runs ----


def key_of(size: Size, name: str, seed: int, rates: Rates) -> str:
    """The name of the file of one run."""
    more = "".join(f"-{key}{value}" for key, value in rates.outer.items() if key != "outer_lr")
    text = f"{name}-{seed}-{rates.outer_lr}-{size.hidden}x{size.layers}-{size.rows}x{size.steps}-H{size.every}"
    text = f"{text}-lr{rates.lr}{more}"
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in text)


Job = tuple[str, int, Rates]


def run_all(arguments: argparse.Namespace, size: Size, jobs: list[Job]) -> dict[Job, dict[str, Any]]:
    """Results of all runs; those that are not there yet are made, some at once."""

    def run(job: Job) -> dict[str, Any]:
        path = arguments.out / f"{key_of(size, *job)}.json"
        if not path.exists():
            started = time.perf_counter()
            values = {"name": job[0], "seed": job[1], "rates": job[2], "path": str(path)}
            command = [sys.executable, __file__, "--one", json.dumps(values), "--out", str(arguments.out)]
            command += ["--jobs", str(arguments.jobs)]
            command += ["--steps", str(size.steps)] + ([f"--{arguments.size}"] if arguments.size != "main" else [])
            command += ["--tokens", str(arguments.tokens)] if arguments.tokens else []
            subprocess.run(command, check=True)
            print(f"  {path.stem}: {time.perf_counter() - started:.0f} s", flush=True)
        return dict(json.loads(path.read_text()))

    with ThreadPoolExecutor(arguments.jobs) as threads:
        return dict(zip(jobs, threads.map(run, jobs), strict=True))


def tune(arguments: argparse.Namespace, size: Size) -> tuple[dict[str, Rates], dict[str, dict[str, float]]]:
    """(the best rates of each variant, the loss of all that were tried), on a seed of its own."""
    if arguments.size != "main":
        return dict.fromkeys(size.variants, Rates(size.lr)), {}
    jobs: list[Job] = [(name, TUNING_SEED, rates) for name in size.variants for rates in TRIALS[name]]
    found = run_all(arguments, size, jobs)
    chosen, trials = {}, {}
    for name in size.variants:
        losses = {rates: found[(name, TUNING_SEED, rates)]["loss"] for rates in TRIALS[name]}
        chosen[name] = min(losses, key=losses.__getitem__)
        trials[name] = {str(rates): round(loss, 4) for rates, loss in losses.items()}
        each = ", ".join(f"{rates}: {loss:.4f}" for rates, loss in losses.items())
        print(f"loss by rates, {name}: {each}", flush=True)
    return chosen, trials


def report(
    arguments: argparse.Namespace,
    size: Size,
    seeds: Sequence[int],
    chosen: dict[str, Rates],
    trials: dict[str, dict[str, float]],
    found: dict[Job, dict[str, Any]],
) -> None:
    """Print the table; write all figures and the curves."""
    rows, base = {}, {seed: found[("data parallel", seed, chosen["data parallel"])]["loss"] for seed in seeds}
    first = next(iter(found.values()))
    print(f"\n{first['parameters'] / 1e6:.2f} M parameters, {size.steps} steps of {size.rows * size.seq_len} tokens,")
    print(f"H={size.every}, held-out loss of the outer weights, seeds {seeds}, {first['device']}\n")
    print(f"{'variant':28} {'rates':>18} {'loss':>8} {'spread':>8}   % above data parallel (by seed)   MB sent")
    for name in size.variants:
        of_seed = [found[(name, seed, chosen[name])] for seed in seeds]
        losses = [one["loss"] for one in of_seed]
        above = [100 * (loss / base[seed] - 1) for seed, loss in zip(seeds, losses, strict=True)]
        mean, spread = statistics.mean(above), statistics.stdev(above) if len(seeds) > 1 else math.nan
        limit = LIMITS.get(name) if arguments.size == "main" else None
        verdict = "" if limit is None else f"  (limit +{limit} %: {'met' if mean <= limit else 'NOT met'})"
        rows[name] = {
            "rates": chosen[name]._asdict(),
            "losses": losses,
            "percent_above": above,
            "mean_percent": mean,
            "spread_percent": spread,
            "sent_bytes": of_seed[0]["sent_bytes"],
            "curves": [one["curve"] for one in of_seed],
        }
        each = ", ".join(f"{one:+.2f}" for one in above)
        print(
            f"{name:28} {chosen[name]!s:>18} {statistics.mean(losses):8.4f} {max(losses) - min(losses):8.4f}"
            f"   {mean:+.2f} +- {spread:.2f} ({each}) {of_seed[0]['sent_bytes'] / 1e6:8.1f}{verdict}"
        )
    values = {"size": dataclasses.asdict(size), "device": first["device"], "seeds": seeds, "trials": trials}
    values["variants"] = rows
    (arguments.out / "summary.json").write_text(json.dumps(values, indent=1))
    if arguments.save:
        save_result("diloco_loss", values)
    draw_curves(rows, arguments.out / "curves.png")


def draw_curves(rows: dict[str, Any], path: Path) -> None:
    """Held-out loss over steps, mean of the seeds; and the difference to data parallel, with the range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    base = np.array([[loss for _, loss in curve] for curve in rows["data parallel"]["curves"]])
    for name, row in rows.items():
        steps = [step for step, _ in row["curves"][0]]
        losses = np.array([[loss for _, loss in curve] for curve in row["curves"]])
        above = 100 * (losses / base - 1)
        axes[0].plot(steps, losses.mean(0), label=name)
        axes[1].plot(steps, above.mean(0), label=name)
        axes[1].fill_between(steps, above.min(0), above.max(0), alpha=0.2)
    axes[0].set(xlabel="step", ylabel="held-out loss")
    axes[1].set(xlabel="step", ylabel="% above data parallel", ylim=(-3, 5))
    for each in axes:
        each.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    print(f"curves: {path}")


# ---- one run ----


def one_run(size: Size, ids: np.ndarray, asked: dict[str, Any], jobs: int) -> None:
    """Train one variant with one seed, beside others, and write its result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Threads that wait for a core make every small operation of the outer optimizer wait too.
    torch.set_num_threads(max(1, usable_cores() // jobs) if device.type == "cuda" else 1)
    groups, fields = VARIANTS[asked["name"]]
    rates = Rates(*asked["rates"])
    size, fields = dataclasses.replace(size, lr=rates.lr), {**fields, **rates.outer}
    world = World(device=device)
    configs = [make_config(size, device, asked["seed"], groups, group, fields) for group in range(groups)]
    states = [make_state(config, world) for config in configs]
    hub = Hub(groups)
    outers = [
        OuterOptimizer(config.diloco, state.model_tensors, state.weights, size.layers, size.steps)
        for config, state in zip(configs, states, strict=True)
        if fields
    ]
    for group, outer in enumerate(outers):
        hub.connect(group, outer)
    data, held_out = rows_of(ids, size, device)
    order = torch.from_numpy(np.random.default_rng(asked["seed"]).permutation(len(data))).to(device)
    curve, started = [], time.perf_counter()
    for step in range(size.steps):
        rows = order[torch.arange(step * size.rows, (step + 1) * size.rows, device=device) % len(order)]
        for config, state in zip(configs, states, strict=True):
            one_step(config, state, world, data[rows])
        for state, outer in zip(states, outers, strict=False):
            outer.start(state.step, state.tokens)
        for state, outer in zip(states, outers, strict=False):
            outer.finish(state.step)
        # Also after the last step: only then the outer weights hold everything.
        if step + 1 == size.steps or (step + 1) % (size.steps // (12 if size.steps >= 1000 else 4)) == 0:
            with outers[0].in_model() if outers else nullcontext():
                curve.append((step + 1, held_out_loss(states[0], held_out)))
    result = {
        "loss": curve[-1][1],
        "curve": curve,
        "seconds": time.perf_counter() - started,
        "sent_bytes": hub.links[0].sent_bytes,
        "parameters": sum(one.numel for one in states[0].weights.table),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }
    for outer in outers:
        outer.close()
    path = Path(asked["path"])
    path.with_suffix(".partial").write_text(json.dumps(result))
    path.with_suffix(".partial").rename(path)


def make_config(
    size: Size, device: torch.device, seed: int, groups: int, group: int, fields: dict[str, Any]
) -> RunConfig:
    """The config of one group."""
    on_gpu = device.type == "cuda"
    values = {
        "data": {"seq_len": size.seq_len, "document_mask": False},
        "model": {
            "vocab_size": VOCABULARY,
            "hidden_size": size.hidden,
            "intermediate_size": size.inner,
            "layers": size.layers,
            "heads": size.heads,
            "kv_heads": size.heads,
            "max_seq_len": size.seq_len,
            "tied_embeddings": True,
        },
        "optim": {"lr_max": size.lr},
        "schedule": {"warmup_steps": size.steps // 20, "min_lr_ratio": 0.1},
        "train": {
            "name": "low",
            "seed": seed,
            "steps": size.steps,
            "tokens_per_step": size.rows * size.seq_len,
            "micro_batch_samples": size.rows // groups,
            "precision": "bfloat16" if on_gpu else "float32",
            "cuda_graph": "auto",
        },
        "parallel": {"device": device.type},
    }
    config = config_from_values(values, "benchmarks/diloco_loss.py")
    addresses = [f"group-{at}:1" for at in range(groups)] if fields else []
    diloco = DilocoConfig(groups=addresses, group=group, every=size.every, **fields)  # also one group
    return dataclasses.replace(config, diloco=diloco)


def make_state(config: RunConfig, world: World) -> TrainState:
    """A model with its initial weights; the same in all groups."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    ops = resolve(config.ops, op_context(config, world.device.type, dtype))
    state = empty_state(config, world, ops)
    state.micro_batch_samples = rows = config.samples_per_step // config.groups // world.size
    with state.weights.masters_between_steps() as masters:
        draw(masters, state.model.config, config.train.seed)
    state.weights.publish_masters()
    state.cuda_graph = choose_cuda_graph(config, state.model, world.device, world.size, rows, rows)
    return state


def one_step(config: RunConfig, state: TrainState, world: World, rows: Tensor) -> PendingStep:
    """One step of a group on its rows of the global batch (rows, T + 1)."""
    first, own, _ = rank_rows(len(rows), *config.batch_place(world.rank, world.size))
    zeros = torch.zeros(own, dtype=torch.int64, device=world.device)
    batch = Batch(rows[first : first + own], zeros, zeros, 0, step_samples=len(rows), samples=own, first_row=first)
    lr = learning_rate(state.step, config.train.steps, config.optim.lr_max, config.schedule)
    pending = train_step(state, batch, 1, config, world, StepPlan(lr))
    if state.cuda_graph is not None and state.cuda_graph.problem:
        print(f"no CUDA graph: {state.cuda_graph.problem}", flush=True)
        state.cuda_graph = None
    return pending


def rows_of(ids: np.ndarray, size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Windows of T + 1 tokens: (rows to train on, rows held out)."""
    windows = (len(ids) - 1) // size.seq_len
    starts = torch.arange(windows).unsqueeze(1) * size.seq_len
    every = torch.from_numpy(ids.astype(np.int32))[starts + torch.arange(size.seq_len + 1)].to(device).long()
    held = max(size.rows, min(64 * size.rows, windows // 50))
    return every[: windows - windows // 50], every[-held:]


@torch.no_grad()
def held_out_loss(state: TrainState, rows: Tensor) -> float:
    """Mean nats per token."""
    state.weights.wait()
    state.model.eval()
    total = 0.0
    for part in rows.split(64):
        targets = part[:, 1:]
        hidden = state.model(part[:, :-1])
        wide = torch.promote_types(state.weights.dtype, torch.float32)
        _, losses = state.model.head_loss(hidden, targets, torch.ones(targets.shape, dtype=wide, device=rows.device))
        total += float(losses.double().sum())
    state.model.train()
    loss = total / rows[:, 1:].numel()
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss}")
    return loss


if __name__ == "__main__":
    main()
