"""How fast does it learn? Ours beside nanochat's own classes: same tokens in the same order, same scoring, same card.

    python benchmarks/learning.py prepare --work W --text docs.jsonl                 text -> tokenizer, tokens, held-out
    python benchmarks/learning.py compare --work W --nanochat FOLDER --size d8       runs by turns; JSON and a picture
    python benchmarks/learning.py compare --work W --nanochat FOLDER --size cpu      two minutes without a GPU
    python benchmarks/learning.py changes --work W --nanochat FOLDER --size d8       each change alone, on both sides
    python benchmarks/learning.py preset --work W                                    1.26 B: z2all-1b before and after
    python benchmarks/learning.py show                                               what was found, as a table

FOLDER is a checkout of nanochat; nothing of it is in this repository. Its model and optimizer are used as they are,
with the defaults of its base_train.py (rates, betas, decay by its rule, warmup of 40 steps, linear decay over 65 %).

prepare: documents (JSON lines with `text`) become a workspace: a tokenizer, a train split, and a held-out split of
which no 32 tokens in a row stand in the train split. Beside it, `near.npy`: held-out documents without that rule.
compare: for every seed, nanochat and ours by turns. Ours is the trainer of `z2a train`, with the settings of SIZES and
the rules of the optimizer, run once for each of --shares of nanochat's tokens. The time to nanochat's final loss is
read between the shares, each a run whose schedule ends there. Seconds are the mean time of a step, without the first
10, x steps: compiling, evaluation and saving are left out on both sides. nanochat lives in a process of its own, which
waits while ours runs.
preset: the model of configs/z2all-1b.yaml as it was until 19 November 2026 (AdamW, its rate, an architecture of Llama),
and with QK-norm, Muon and the rules; equal tokens, equal batch.
changes: ours with one setting changed, nanochat without one of its parts; runs of their own by turns, one seed.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS, save_result
from zero2all.common.files import write_json

GRAM = 32
HELD_OUT_TOKENS = 1_300_000
FIRST_STEPS = 10
SEQ_LEN = 2048
SIZES: dict[str, dict[str, Any]] = {
    "d8": {"depth": 8, "width": 512, "inner": 1408, "tokens": 39_321_600, "batch": 131_072, "seq_len": SEQ_LEN},
    "d12": {"depth": 12, "width": 768, "inner": 2048, "tokens": 78_643_200, "batch": 131_072, "seq_len": SEQ_LEN},
    "cpu": {"depth": 4, "width": 128, "inner": 384, "tokens": 200_000, "batch": 4_096, "seq_len": 256},
}
"""`batch` is what nanochat's own rule gives for so many tokens; head width 128, or 64 where 128 would be one head."""
CHANGES: dict[str, dict[str, Any]] = {
    "by the rules": {},
    "whole rows from the start": {"stages": []},
    "short rows for three quarters": {"stages": (8, 0.75)},
    "rows of a quarter of the length": {"stages": (4, 0.5)},
    "half the batch": {"train.tokens_per_step": 0.5},
    "twice the batch": {"train.tokens_per_step": 2.0},
    "matrix rate x 0.7": {"optim.lr_max": 0.7},
    "matrix rate x 1.4": {"optim.lr_max": 1.4},
    "matrices start at 1 / sqrt(width)": {"model.init_std": None},
    "weights of qk_norm start at 1.2": {"model.init_qk_gain": 1.2},
    "z loss 1e-4": {"train.z_loss": 1e-4},
    "decay of the rate over the whole run, to 0": {"schedule.decay_share": 0.95, "schedule.min_lr_ratio": 0.0},
}
"""Settings of ours; a number for a field that a rule fills is a factor on the rule's value. Stages: the run begins with
rows of a part of the length, for a share of its steps."""
FACTORS = ("train.tokens_per_step", "optim.lr_max")
PARTS = ("nothing", "value embeddings", "x0 skip", "smear and backout", "softcap")
"""Parts of nanochat that are left out."""
AT_ONCE = 4
"""Processes: while one trains, the others start and compile."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare_verb = verbs.add_parser("prepare")
    prepare_verb.add_argument("--text", type=Path, nargs="+", required=True)
    prepare_verb.add_argument("--vocab-size", type=int, default=16_384)
    prepare_verb.add_argument("--held-out-tokens", type=int, default=HELD_OUT_TOKENS)
    compare_verb = verbs.add_parser("compare")
    compare_verb.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    compare_verb.add_argument("--shares", type=float, nargs="+", default=[0.8, 1.0, 1.25])
    compare_verb.add_argument("--set", nargs="*", default=[], help="more fields of ours, such as optim.lr_max=0.02")
    changes_verb = verbs.add_parser("changes")
    changes_verb.add_argument("--only", nargs="+", help="names of CHANGES (ours) and PARTS (nanochat)")
    changes_verb.add_argument("--one", help=argparse.SUPPRESS)
    changes_verb.add_argument("--seeds", type=int, nargs=1, default=[1])
    for verb in (compare_verb, changes_verb):
        verb.add_argument("--nanochat", type=Path, required=True)
        verb.add_argument("--size", choices=SIZES, default="d8")
        verb.add_argument("--tokens", type=int, help="of nanochat's run (default: by size)")
        verb.add_argument("--batch", type=int, help="nanochat's tokens of a step (default: by size)")
        verb.add_argument("--windows", default="L", help="nanochat's window_pattern; L: full, its best without FA3")
        verb.add_argument("--name", default="learning", help="of the file in benchmarks/results")
    preset_verb = verbs.add_parser("preset")
    preset_verb.add_argument("--tokens", type=int, default=14_680_064)
    preset_verb.add_argument("--name", default="learning_1b", help="of the file in benchmarks/results")
    preset_verb.add_argument("--set", nargs="*", default=[], help="fields of both sides, such as model.layers=2")
    verbs.add_parser("show")
    child = verbs.add_parser("nanochat-run")
    child.add_argument("--job", required=True)
    for verb in (prepare_verb, compare_verb, changes_verb, preset_verb):
        verb.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    calls = {"prepare": prepare, "compare": compare, "changes": changes, "preset": preset, "show": show}
    calls["nanochat-run"] = run_nanochat
    calls[arguments.verb](arguments)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def prepare(arguments: argparse.Namespace) -> None:
    """Text -> a workspace with a tokenizer and two splits."""
    from zero2all.tokenizer.encoders.choose import open_encoder
    from zero2all.tokenizer.load import load_tokenizer

    texts = [json.loads(line)["text"] for path in arguments.text for line in path.open()]
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    (work / "text.txt").write_text("\n\n".join(texts[: max(1, 50_000_000 * len(texts) // sum(map(len, texts)))]))
    z2a("tokenizer", "train", "--work", work, "--vocab-size", arguments.vocab_size, "--text", work / "text.txt")
    tokenizer = load_tokenizer(work / "tokenizer")
    encoder = open_encoder(tokenizer, sample=texts[:50], text_bytes=sum(map(len, texts)))
    documents: list[np.ndarray] = []
    for first in range(0, len(texts), 2048):
        batch = encoder.encode_batch(texts[first : first + 2048])
        documents += [np.append(batch[at], tokenizer.end_id).astype(np.uint16) for at in range(len(batch))]
    train, held_out, near = split(documents, arguments.held_out_tokens)
    np.save(work / "near.npy", np.concatenate(near))
    for name, part in (("train", train), ("valid", held_out)):
        np.save(work / f"{name}.npy", np.concatenate(part))
        z2a("data", "import", f"text={work / name}.npy", "--from", "numpy", "--split", name, "--work", work)
    print({name: sum(map(len, part)) for name, part in (("train", train), ("held out", held_out), ("near", near))})


def split(documents: list[np.ndarray], wanted: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Documents for training, held-out ones that share no GRAM tokens in a row with them, and held-out ones as they
    come. An eighth of the documents are candidates; those that are not held out are left out."""
    order = np.random.default_rng(7).permutation(len(documents))
    candidates, train = order[: len(order) // 8], [documents[at] for at in order[len(order) // 8 :]]
    known = np.unique(np.concatenate([grams(document) for document in train]))
    held_out: list[np.ndarray] = []
    near: list[np.ndarray] = []
    for at in candidates:
        own = grams(documents[at])
        places = np.minimum(np.searchsorted(known, own), len(known) - 1)
        if sum(map(len, held_out)) < wanted and not (known[places] == own).any():
            held_out.append(documents[at])
        if sum(map(len, near)) < wanted // 2:
            near.append(documents[at])
    return train, held_out, near


def grams(document: np.ndarray) -> np.ndarray:
    """A 64-bit hash of every GRAM tokens in a row: a polynomial in an odd number, modulo 2^64."""
    if len(document) < GRAM:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        powers = np.multiply.accumulate(np.full(len(document), 1_099_511_628_211, np.uint64))
        sums = np.cumsum((document.astype(np.uint64) + np.uint64(1)) * powers[::-1], dtype=np.uint64)
        windows = sums[GRAM - 1 :].copy()
        windows[1:] -= sums[:-GRAM]
        return np.asarray(windows * powers[: len(windows)])


# ---- runs ------------------------------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace) -> None:
    """Both sides by turns, for every seed."""
    size = size_of(arguments)
    tokens, runs = size["tokens"], []
    with nanochat(arguments, size, tokens) as train_nanochat:
        for seed in arguments.seeds:
            runs.append({"seed": seed, "side": "nanochat", "share": 1.0, **train_nanochat(seed)})
            say(runs[-1])
            for share in arguments.shares:
                found = ours(arguments, size, share * tokens, seed)
                runs.append({"seed": seed, "side": "ours", "share": share, **found})
                say(runs[-1])
    ratios = {str(seed): time_ratio([run for run in runs if run["seed"] == seed]) for seed in arguments.seeds}
    print("time to nanochat's final loss / nanochat's time:", ratios)
    state = {"size": size, "tokens": tokens, "settings": arguments.set, "runs": runs, "time ratio": ratios}
    path = save_result(arguments.name, state)
    draw(runs, path.with_suffix(".png"))


def changes(arguments: argparse.Namespace) -> None:
    """A process for every change; each trains alone on the card."""
    names = arguments.only or [*CHANGES, *(f"nanochat without {part}" for part in PARTS)]
    answers = arguments.work / "changes"
    if arguments.one:
        found = change(arguments, arguments.one)
        write_json(answers / f"{names.index(arguments.one)}.json", found)
        say({**found, "side": arguments.one})
        return
    shutil.rmtree(answers, ignore_errors=True)
    answers.mkdir()
    waiting, running = list(names), list[subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(subprocess.Popen([sys.executable, *sys.argv, "--one", waiting.pop(0)]))
        time.sleep(0.2)
        running = [process for process in running if process.poll() is None]
    runs = {name: answers / f"{number}.json" for number, name in enumerate(names)}
    found = {name: json.loads(path.read_text()) for name, path in runs.items() if path.exists()}
    save_result(arguments.name, {"size": size_of(arguments), "seed": arguments.seeds[0], "changes": found})
    failed = [name for name in names if name not in found]
    if failed:
        sys.exit(f"no result, see the errors above: {', '.join(failed)}")


def preset(arguments: argparse.Namespace) -> None:
    """The model of z2all-1b, as it was and by the rules."""
    shape = {"vocab_size": 64_320, "hidden_size": 2048, "intermediate_size": 5632, "layers": 22, "max_seq_len": 2048}
    after = settings_of({"depth": 22, "width": 2048, "inner": 5632, "seq_len": 2048}, arguments.tokens, 1)
    after["model"] |= shape | {"heads": 16, "kv_heads": 4, "init_std": None}
    after["train"] |= {"micro_batch_samples": 16, "tokens_per_step": 65_536}
    steps = arguments.tokens // 65_536
    before = {name: after[name] for name in ("data", "train", "validation", "checkpoint")}
    before |= {"model": shape | {"heads": 32, "kv_heads": 8}, "optim": {"lr_max": 4e-4}}
    before["schedule"] = {"warmup_steps": max(1, steps // 20)}  # 2,000 of 40,000 steps
    runs = {}
    for side, values in (("as it was", before), ("by the rules", after)):
        runs[side] = trained(arguments, values, 2048)
        say({"side": side, "seed": 1, "share": 1.0, **runs[side]})
        save_result(arguments.name, {"tokens": arguments.tokens, "settings": arguments.set, "runs": runs})


def change(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Compile in a run of a few steps, wait for the card, then train."""
    size, (seed,) = size_of(arguments), arguments.seeds
    own_work = arguments.work / f"change-{name.replace('/', 'by')}"
    own_work.mkdir(exist_ok=True)
    for each in ("tokenizer", "packed", "valid.npy", "near.npy"):
        if not (own_work / each).exists():
            (own_work / each).symlink_to((arguments.work / each).resolve())
    arguments.work = own_work
    few = 12 * size["batch"]
    if name.startswith("nanochat"):
        job = nanochat_job(arguments, size, size["tokens"]) | {"without": name.removeprefix("nanochat without ")}
        model, call = nanochat_model(job)

        def run(tokens: int) -> dict[str, Any]:
            return train_once(job | {"tokens": tokens}, model, call, seed)
    else:

        def run(tokens: int) -> dict[str, Any]:
            return ours(arguments, size, tokens, seed, CHANGES[name])

    run(few)
    with (own_work.parent / "card.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {"side": name, "seed": seed, "share": 1.0, **run(size["tokens"])}


def size_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of SIZES, with what the command line sets."""
    size = SIZES[arguments.size]
    return size | {"batch": arguments.batch or size["batch"], "tokens": arguments.tokens or size["tokens"]}


def say(run: dict[str, Any]) -> None:
    """One line about a run."""
    print(f"{run['side']:9} seed {run['seed']} share {run['share']:.2f}: {run['loss']:.4f} nats, ", end="")
    print(f"near {run['near']:.4f}, {run['seconds']:.1f} s, {run['flops']:.3g} FLOP; {run['gpu']}", flush=True)


def time_ratio(runs: list[dict[str, Any]]) -> str:
    """Seconds in which ours reaches nanochat's final loss, divided by nanochat's: on the straight line between two
    shares, or up to one distance outside of them (~); else a limit."""
    goal = next(run for run in runs if run["side"] == "nanochat")
    points = sorted((run["seconds"], run["loss"]) for run in runs if run["side"] == "ours")
    for (before, high), (after, low) in itertools.pairwise(points):
        place = (high - goal["loss"]) / max(high - low, 1e-9)
        if -1 <= place <= 2:
            return f"{'' if 0 <= place <= 1 else '~'}{(before + (after - before) * place) / goal['seconds']:.2f}"
    is_late = points[-1][1] > goal["loss"]
    return f"{'>' if is_late else '<'} {(points[-1] if is_late else points[0])[0] / goal['seconds']:.2f}"


def show(arguments: argparse.Namespace) -> None:
    """The files of runs with a batch that suits so few tokens, as tables in Markdown."""
    del arguments
    print("| text, size | nanochat's batch | seed | nanochat | s | ours, tokens as nanochat | s | time to its loss |")
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(RESULTS.glob("learning_*_32k.json")):
        found = json.loads(path.read_text())
        size, text = path.stem.split("_")[1:3]
        for seed in dict.fromkeys(run["seed"] for run in found["runs"]):
            runs = [run for run in found["runs"] if run["seed"] == seed]
            goal, *others = runs
            mine = max(others, key=lambda run: -abs(run["share"] - 1))
            share = "" if mine["share"] == 1 else f" ({mine['share']:g} of them)"
            cells = [f"{text}, {size}", f"{goal['tokens_per_step']:,}", str(seed), f"{goal['loss']:.4f}"]
            cells += [
                f"{goal['seconds']:.1f}",
                f"{mine['loss']:.4f}{share}",
                f"{mine['seconds']:.1f}",
                time_ratio(runs),
            ]
            print("| " + " | ".join(cells) + " |")
    print()
    show_changes()


def show_changes() -> None:
    """What each change gave alone, from recipe_changes.json."""
    runs = json.loads((RESULTS / "recipe_changes.json").read_text())["runs"]
    loss = {f"{run['what']}, {run['tokens_per_step']}": run["loss"] for run in runs if run["seed"] == 1}
    ours = [
        ("rules of before", "rules of before: 65,536 tokens a step, whole rows", 65_536),
        ("and rows of 512 instead of 2,048 for the first half", "short rows", 65_536),
        ("and 32,768 tokens a step", "short rows, half the batch", 32_768),
        ("and 1.4 times the rate of the matrices", "short rows, half the batch, matrix rate x 1.4", 32_768),
    ]
    parts = [("nanochat, 65,536 tokens a step", "nanochat", 65_536)]
    parts += [(f"without {part}", f"nanochat without {part}", 65_536) for part in PARTS[1:]]
    print("| | loss | change |")
    print("|---|---|---|")
    for rows, follows in ((ours, True), (parts, False)):
        before = loss[f"{rows[0][1]}, {rows[0][2]}"]
        for words, what, batch in rows:
            now = loss[f"{what}, {batch}"]
            print(f"| {words} | {now:.4f} | {f'{now - before:+.4f}' if now != before else ''} |")
            before = now if follows else before


def ours(
    arguments: argparse.Namespace, size: dict[str, Any], tokens: float, seed: int, changed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A run with the settings of SIZES. `changed`: a row of CHANGES."""
    values = settings_of(size, int(tokens), seed)
    if changed:
        values = settings_of(size, int(tokens), seed, config_of(arguments, values), changed)
    return trained(arguments, values, size["seq_len"])


def config_of(arguments: argparse.Namespace, values: dict[str, Any]) -> Any:
    """The config with these values, and those of --set."""
    from zero2all.config import load_config

    path = arguments.work / "learning.json"
    write_json(path, values)
    return load_config(path, ["--train.name=learning", *(f"--{setting}" for setting in getattr(arguments, "set", []))])


def trained(arguments: argparse.Namespace, values: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """The trainer of `z2a train`, then what its record says."""
    import torch

    from zero2all.common.workspace import Workspace
    from zero2all.estimate.flops import flops_per_token
    from zero2all.infer.load import load_run
    from zero2all.model.config import ModelConfig
    from zero2all.track.reader import read_run
    from zero2all.train.guards.ledger import SkipLedger
    from zero2all.train.run import train

    config = config_of(arguments, values)
    name, tokens = config.train.name, config.train.steps * config.train.tokens_per_step
    shutil.rmtree(arguments.work / "runs" / name, ignore_errors=True)
    train(config, Workspace(arguments.work), fresh=True, say=lambda _: None, brief=True)
    run = read_run(arguments.work / "runs" / name)
    loaded = load_run(Workspace(arguments.work), name)
    step = run.series["time/step"].value
    losses = run.series["loss"].value
    assert isinstance(loaded.model.config, ModelConfig)
    per_token = flops_per_token(loaded.model.config, seq_len)["palm"]
    score = scorer(lambda rows: loaded.model.to(device()).logits(loaded.model(rows)), seq_len)
    torch.set_float32_matmul_precision("high")  # as nanochat's side
    return {
        "loss": score(np.load(arguments.work / "valid.npy")),
        "near": score(np.load(arguments.work / "near.npy")),
        "seconds": float(np.mean(step[FIRST_STEPS:]) * len(step)),
        "flops": per_token * tokens,
        "parameters": loaded.parameters,
        "tokens_per_step": config.train.tokens_per_step,
        "steps": config.train.steps,
        "refused": [one.reason for one in SkipLedger.load(arguments.work / "runs" / name / "incidents").entries],
        "curve": [round(float(loss), 4) for loss in losses[:: max(1, len(losses) // 100)]],
        "gpu": gpu_state(),
    }


def settings_of(
    size: dict[str, Any], tokens: int, seed: int, rule: Any = None, changed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Our side: a Llama with QK-norm, of nanochat's depth and width; the rest by rule. `rule`: the config
    that the rules gave, to change."""
    heads = max(size["width"] // 128, 2)
    shape = {"hidden_size": size["width"], "intermediate_size": size["inner"], "layers": size["depth"]}
    shape |= {"heads": heads, "kv_heads": heads, "max_seq_len": size["seq_len"], "rope_theta": 1e5}
    start = {
        "qk_norm": True,
        "embedding_norm": True,
        "init_residual": "zero",
        "init_embedding_std": 0.8,
        "init_head_std": 0.001,
    }
    precision = "bfloat16" if device() == "cuda" else "float32"
    passes = {"seed": seed, "tokens": tokens, "precision": precision, "micro_batch_samples": 32}
    never = 10**9
    values: dict[str, Any] = {
        "model": shape | start,
        "data": {"seq_len": size["seq_len"], "seed": seed},
        "train": passes,
        "optim": {"kind": "muon"},
        "schedule": {"kind": "wsd", "decay_share": 0.65, "decay_shape": "linear", "min_lr_ratio": 0.05},
        "validation": {"every_steps": never},
        "checkpoint": {"every_steps": never},
    }
    for name, value in (changed or {}).items():
        if name == "stages":
            continue
        section, field = name.split(".")
        values[section][field] = getattr(getattr(rule, section), field) * value if name in FACTORS else value
        if name == "train.tokens_per_step":
            values[section][field] = int(values[section][field])
            values[section]["micro_batch_samples"] = min(32, values[section][field] // size["seq_len"])
    if changed and changed.get("stages") == []:
        values["stages"] = []
    elif changed and "stages" in changed:  # last, because the steps follow from the batch
        parts, share = changed["stages"]
        steps = tokens // values["train"].get("tokens_per_step", rule.train.tokens_per_step)
        values["stages"] = [
            {"name": "short rows", "from_step": 0, "seq_len": size["seq_len"] // parts},
            {"name": "whole rows", "from_step": int(share * steps), "seq_len": size["seq_len"]},
        ]
    return values


@contextmanager
def nanochat(arguments: argparse.Namespace, size: dict[str, Any], tokens: int) -> Iterator[Callable[[int], Any]]:
    """nanochat's classes in a process of their own: give it a seed, and it trains."""
    job = nanochat_job(arguments, size, tokens)
    answer = arguments.work / "nanochat.json"
    words = [sys.executable, __file__, "nanochat-run", "--job", json.dumps(job)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None

        def train_nanochat(seed: int) -> Any:
            answer.unlink(missing_ok=True)
            print(seed, file=process.stdin, flush=True)
            while not answer.exists():
                if process.poll() is not None:
                    sys.exit("nanochat's process ended without an answer; its error is above")
                time.sleep(0.1)
            return json.loads(answer.read_text())

        yield train_nanochat
        process.stdin.close()


def nanochat_job(arguments: argparse.Namespace, size: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What nanochat's side needs to know."""
    job = {"size": size, "tokens": tokens, "windows": arguments.windows, "work": str(arguments.work)}
    return job | {"nanochat": str(arguments.nanochat)}


def run_nanochat(arguments: argparse.Namespace) -> None:
    """For every seed that comes: train nanochat's model with its optimizer on the rows that our loader gives."""
    job = json.loads(arguments.job)
    model, call = nanochat_model(job)
    for line in sys.stdin:
        write_json(Path(job["work"]) / "nanochat.json", train_once(job, model, call, int(line)))


def nanochat_model(job: dict[str, Any]) -> tuple[Any, Any]:
    """nanochat's model on the device, and how it is called. `job["without"]`: a row of PARTS that is left out."""
    import torch

    size, work = job["size"], Path(job["work"])
    sys.path.insert(0, job["nanochat"])
    from nanochat import gpt

    if job.get("without") == "value embeddings":
        gpt.has_ve = lambda *_: False
    if job.get("without") == "softcap":  # so wide that no logit comes near it
        source = Path(gpt.__file__).read_text()
        assert "softcap = 15 " in source
        exec(compile(source.replace("softcap = 15 ", "softcap = 1e4 "), gpt.__file__, "exec"), vars(gpt))
    torch.set_float32_matmul_precision("high")
    heads = max(size["width"] // 128, 2)
    ids = int(json.loads((work / "tokenizer" / "manifest.json").read_text())["vocab_size"])
    shape = {"n_layer": size["depth"], "n_head": heads, "n_kv_head": heads, "n_embd": size["width"]}
    with torch.device("meta"):
        config = gpt.GPTConfig(sequence_len=size["seq_len"], vocab_size=ids, window_pattern=job["windows"], **shape)
        model = gpt.GPT(config)
    model.to_empty(device=device())
    return model, torch.compile(model, dynamic=False) if device() == "cuda" else model


def train_once(job: dict[str, Any], model: Any, call: Any, seed: int) -> dict[str, Any]:
    """One run of nanochat; its schedules, restated."""
    import torch

    from zero2all.packed.config import DataConfig
    from zero2all.packed.loader import read_batch
    from zero2all.packed.mixture import open_training_data
    from zero2all.packed.stages import Stage

    size, tokens, work = job["size"], job["tokens"], Path(job["work"])
    length, batch = size["seq_len"], size["batch"]
    torch.manual_seed(seed)
    model.train()
    model.init_weights()
    steps, rate = tokens // batch, math.sqrt(batch / 2**19)
    horizon = 12 * (12 * 12 * 768 * 768 + 768 * 32768)
    decay = 0.28 * rate * horizon / tokens
    rates = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5}
    optimizer = model.setup_optimizer(weight_decay=decay, **{name: value * rate for name, value in rates.items()})
    without = str(job.get("without"))
    fixed = {"x0 skip": [model.x0_lambdas], "smear and backout": [model.smear_lambda, model.backout_lambda]}
    for parameter in fixed.get(without, []):
        parameter.data.zero_()
        next(group for group in optimizer.param_groups if group["params"][-1] is fixed[without][-1])["initial_lr"] = 0.0
    config = DataConfig(seq_len=length, seed=seed)
    data = open_training_data(work / "packed", config, [Stage("main", 0, None, length)])
    fall = round(0.65 * steps)
    curve, begun = [], time.perf_counter()
    for step in range(steps):
        if step == FIRST_STEPS:
            wait()
            begun = time.perf_counter()
        rows = torch.from_numpy(read_batch(data, step * batch, batch // length).tokens).to(device())
        loss = call(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        left = (steps - step) / fall
        share = (step + 1) / 40 if step < 40 else 1.0 if step <= steps - fall else left + (1 - left) * 0.05
        momentum = 0.97 - 0.07 * max(0.0, 1 - left) if step >= 400 else 0.85 + 0.12 * step / 400
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
            if group["kind"] == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % max(1, steps // 100) == 0:
            curve.append(round(float(loss.detach()), 4))
    wait()
    seconds = (time.perf_counter() - begun) * steps / (steps - FIRST_STEPS)
    model.eval()
    score = scorer(lambda rows: model(rows), length)
    found = {"loss": score(np.load(work / "valid.npy")), "near": score(np.load(work / "near.npy"))}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found |= {"seconds": seconds, "flops": model.estimate_flops() * tokens, "parameters": parameters}
    return {**found, "tokens_per_step": batch, "curve": curve, "gpu": gpu_state()}


# ---- the same on both sides ------------------------------------------------------------------------------------------


def scorer(logits: Any, length: int) -> Any:
    """Mean nats per token of contiguous rows; the same code for both sides, from logits to float32."""
    import torch
    import torch.nn.functional as F

    @torch.no_grad()
    def score(tokens: np.ndarray) -> float:
        rows = (len(tokens) - 1) // length
        total, at_once = 0.0, 8
        with torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda"):
            for first in range(0, rows, at_once):
                starts = np.arange(first, min(first + at_once, rows))[:, None] * length
                batch = torch.from_numpy(tokens[starts + np.arange(length + 1)].astype(np.int64)).to(device())
                found = logits(batch[:, :-1].contiguous()).float().flatten(0, 1)
                total += float(F.cross_entropy(found, batch[:, 1:].flatten(), reduction="sum"))
        return total / (rows * length)

    return score


def device() -> str:
    """cuda where there is a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Until the GPU is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gpu_state() -> str | None:
    """Clocks and watts at the end."""
    query = "clocks.sm,power.draw,power.limit,temperature.gpu"
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() if gpu() else None


def gpu() -> bool:
    """Whether nvidia-smi is here."""
    return shutil.which("nvidia-smi") is not None


def z2a(*words: object) -> None:
    """The command, with this checkout's code."""
    subprocess.run([sys.executable, "-m", "zero2all", *map(str, words)], check=True)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Training loss over seconds, and the held-out loss at the end of every run."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed: no picture")
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        color = "tab:orange" if run["side"] == "nanochat" else "tab:blue"
        axes.plot(np.linspace(0, run["seconds"], len(run["curve"])), run["curve"], color=color, alpha=0.3)
        axes.plot(run["seconds"], run["loss"], "o", color=color)
    axes.set(xlabel="seconds of training", ylabel="nats per token (line: training, point: held-out)")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
