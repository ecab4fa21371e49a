"""Deciding on small models: is a sweep that was killed the same, and does halving choose what the full grid chooses?

    python benchmarks/decide.py kills --work W      24 small runs: at one go, and with the command killed five times
    python benchmarks/decide.py halving --work W    four tasks: a grid of nine rates, and the same with --halving
    python benchmarks/decide.py ladder --work W     on a GPU: the law of speedruns (laws.json), about 6 minutes
    python benchmarks/decide.py equal --work W      on a GPU: the size it chooses beside four others, about 2 minutes
    python benchmarks/decide.py mixture --work W    on a GPU: three channels, the predicted best beside 20 others
    python benchmarks/decide.py speedrun --work W --name TEXT --machine TEXT    note a finished speedrun in W
    python benchmarks/decide.py equal-time --work W [--nanochat FOLDER]         W's speedrun beside other sizes
    python benchmarks/decide.py show                what was found, as tables

W is a workspace with packed text, such as `z2a quickstart` leaves behind; studies and runs named decide-* in it are
replaced. Models of 0.3 M parameters, on CPUs; `ladder` and `equal` have their own sizes, and
need 59 M tokens of 8,192 ids.

kills: eight rates x three seeds. The command of the second sweep is killed with SIGKILL at random moments (its workers
are left to notice), and given again until it ends. Everything in both ledgers but seconds is compared, digit by digit.
halving: the steps that were trained, by the ledgers, and the loss of the rate that halving chose beside the best of the
grid; both train the best one to its end with the same bits.
ladder: `z2a sweep` over sizes with smaller budgets as branches; `show` has the law without the largest size beside it.
equal: the size and tokens that the law chooses for FLOPs which no run had, and four other sizes at equal FLOPs.
mixture: `z2a mixture try` fits 12 runs; 20 mixtures that it did not see are measured; then the one that it predicts and
the best of the 20 are trained again with five new seeds each, because the best of 20 is the luckiest one, too.
equal-time: the two next smaller and larger sizes, trained as the finished speedrun in W was and for as many seconds;
and nanochat's classes (a checkout of it) on the same rows for as many seconds of steps (benchmarks/learning.py).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS, machine, save_result
from zero2all.common.jsonio import whole_lines
from zero2all.experiments.law import Point, best_for, fit, held_out_check, predicted

NAME, LAWS = "decide", RESULTS / "laws.json"
KILLS, SEED = 5, 1
SMALL = {
    **{"model.hidden_size": 64, "model.intermediate_size": 128, "model.layers": 2, "model.heads": 2},
    **{"model.kv_heads": 2, "train.tokens_per_step": 512, "train.micro_batch_samples": 4},
    "validation.tokens_per_source": 4096,
}
WSD = {
    **{"schedule.kind": "wsd", "schedule.decay_share": 0.65, "schedule.decay_shape": "linear"},
    **{"schedule.warmup_steps": 10, "optim.decay_schedule": "constant"},
}
"""Of halving, and of the grid beside it: the best rate then ends with the same bits on both sides."""
FACTORS = (0.1, 0.18, 0.32, 0.56, 1, 1.8, 3.2, 5.6, 10)
"""On a rate: two decades, four steps each."""
ADAMW = {"optim.kind": "adamw", "optim.lr_multipliers": "{}", "optim.beta1": 0.9, "optim.eps": 1e-8}
HALF = {"model.hidden_size": 32, "model.intermediate_size": 64}
TASKS: dict[str, tuple[float, dict[str, Any]]] = {
    "Muon": (0.06, {}),
    "AdamW": (0.01, ADAMW),
    "Muon, half the width": (0.06, HALF),
    "AdamW, half the width": (0.01, {**ADAMW, **HALF}),
}
"""The middle of the rates, and fields. The rungs of --halving were chosen with the first three, in runs of 180 steps;
the last one was not looked at before."""

LADDER = {
    **{"train.tokens": "120M", "train.tokens_per_step": 32768, "train.micro_batch_samples": 32, "data.seq_len": 1024},
    **{"schedule.kind": "wsd", "schedule.decay_shape": "linear", "schedule.decay_share": 0.3},
    **{"schedule.min_lr_ratio": 0.05, "validation.tokens_per_source": 1_300_000, "validation.batch_samples": 64},
}
MIXED = {
    **{"train.tokens": "9M", "train.tokens_per_step": 16384, "train.micro_batch_samples": 32, "data.seq_len": 512},
    **{"model.hidden_size": 192, "model.intermediate_size": 512, "model.layers": 3, "model.heads": 3},
    **{"model.kv_heads": 3, "model.vocab_size": 8192},
    **{"schedule.kind": "wsd", "schedule.decay_shape": "linear", "schedule.decay_share": 0.65, "stages": "[]"},
    "validation.tokens_per_source": 200_000,
}
MIXTURES, UNSEEN, SEEDS, AT_ONCE = 12, 20, range(11, 16), 13
NANOCHAT_BATCH = 65_536
"""Its best at so few tokens (docs/learning.md), not that of its own rule."""
SIZES, BUDGETS, HELD_OUT_FLOPS, MOST_EPOCHS = "3.26M,4.47M,11.3M,24.4M,60M", "40M,70M", 4e15, 4


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, steps in (("kills", 60), ("halving", 200)):
        verb = verbs.add_parser(name)
        verb.add_argument("--work", type=Path, required=True)
        verb.add_argument("--steps", type=int, default=steps, help="of a run")
    verbs.choices["halving"].add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    for name in ("ladder", "equal", "mixture", "equal-time"):
        verbs.add_parser(name).add_argument("--work", type=Path, required=True)
    verbs.choices["equal-time"].add_argument("--nanochat", type=Path, help="a checkout of it")
    verbs.choices["equal-time"].add_argument("--only", type=int, nargs="+", help="widths; 0 for nanochat")
    verbs.choices["mixture"].add_argument("--at-once", type=int, default=AT_ONCE)
    verbs.choices["mixture"].add_argument("--tokens", default=MIXED["train.tokens"], help="of a run")
    verbs.choices["ladder"].add_argument("--text", default="", help="what the text is, for the record")
    verb = verbs.add_parser("speedrun")
    for name in ("--name", "--machine"):
        verb.add_argument(name, required=True)
    verb.add_argument("--work", type=Path, required=True)
    verbs.add_parser("show")
    arguments = parser.parse_args()
    if arguments.verb == "ladder":
        ladder(arguments)
    elif arguments.verb in ("equal", "mixture"):
        keep(arguments.verb, (equal if arguments.verb == "equal" else mixture)(arguments))
    elif arguments.verb == "equal-time":
        equal_time(arguments)
    elif arguments.verb == "speedrun":
        noted = json.loads((RESULTS / f"{NAME}.json").read_text()).get("speedrun", {}).get("runs", {})
        keep("speedrun", {"runs": {**noted, arguments.name: speedrun(arguments)}})
    elif arguments.verb != "show":
        found = kills(arguments) if arguments.verb == "kills" else halving(arguments)
        keep(arguments.verb, {"steps": arguments.steps, **found})
    show()


def keep(part: str, values: dict[str, Any]) -> None:
    """Save a part of the results; the other one stays, with its own machine."""
    path = RESULTS / f"{NAME}.json"
    others = json.loads(path.read_text()) if path.exists() else {}
    save_result(NAME, {**others, part: {**values, "machine": machine()}, "machine": machine()})


def command(
    arguments: argparse.Namespace, name: str, rates: list[str], fields: dict[str, Any], *more: str
) -> list[str]:
    """The words of a sweep over rates."""
    words = [sys.executable, "-m", "zero2all", "sweep", "quickstart", "--work", arguments.work, "--name", name]
    words += ["--over", f"optim.lr_max={','.join(rates)}", "--json", arguments.work / f"{name}.json", *more]
    values = {**SMALL, **fields, "train.steps": arguments.steps}
    return [*map(str, words), *(f"--{field}={value}" for field, value in values.items())]


def clear(arguments: argparse.Namespace, name: str) -> None:
    """Remove a study and its runs."""
    for path in (arguments.work / "studies" / name, *arguments.work.glob(f"runs/{name}-*")):
        shutil.rmtree(path, ignore_errors=True)


def ledger(arguments: argparse.Namespace, name: str) -> dict[str, dict[str, Any]]:
    """What is known of each task, by its name without the study's."""
    lines = whole_lines(arguments.work / "studies" / name / "ledger.jsonl")
    return {line.pop("task").removeprefix(name): line for line in lines}


# ---- kills -----------------------------------------------------------------------------------------------------------


def kills(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same sweep twice, once with kills."""
    rates, chance = [f"x{factor}" for factor in FACTORS[:8]], random.Random(SEED)
    found, tables = {}, {}
    seconds: dict[str, float] = {}
    for name, count in ((f"{NAME}-whole", 0), (f"{NAME}-killed", KILLS)):
        clear(arguments, name)
        words, begun, moments = command(arguments, name, rates, {}, "--seeds", "3"), time.monotonic(), []
        for _ in range(count):
            moments.append(round(chance.uniform(0, 0.3) * seconds[f"{NAME}-whole"], 1))
            left = killed_after(words, moments[-1])
            print(
                f"killed after {moments[-1]} s; {len(ledger(arguments, name))} runs done, {left} workers left",
                flush=True,
            )
        subprocess.run(words, check=True)
        seconds[name] = round(time.monotonic() - begun, 1)
        found[name] = ledger(arguments, name)
        tables[name] = json.loads((arguments.work / f"{name}.json").read_text())["table"]
    for line in (line for name in found for line in found[name].values()):
        line.pop("seconds")
    whole, killed = found.values()
    return {
        "runs": len(whole),
        "kills_after_seconds": moments,
        "ledgers_equal": whole == killed,
        "tables_equal": tables[f"{NAME}-whole"] == tables[f"{NAME}-killed"],
        "seconds": {"at one go": seconds[f"{NAME}-whole"], "killed": seconds[f"{NAME}-killed"]},
        "table": tables[f"{NAME}-killed"],
    }


def killed_after(words: list[str], seconds: float) -> int:
    """Kill a command, not its workers; how many of them are alive 2 s later."""
    import psutil

    with subprocess.Popen(words) as process:
        try:
            process.wait(timeout=seconds)
            sys.exit("the sweep ended before it was killed")
        except subprocess.TimeoutExpired:
            workers = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
    return len(psutil.wait_procs(workers, timeout=2)[1])


# ---- halving ---------------------------------------------------------------------------------------------------------


def halving(arguments: argparse.Namespace) -> dict[str, Any]:
    """A grid and halving, for each task."""
    return {"tasks": {task: halved(arguments, *TASKS[task]) for task in arguments.tasks}}


def halved(arguments: argparse.Namespace, middle: float, fields: dict[str, Any]) -> dict[str, Any]:
    """The losses of all rates in the grid, and what halving made of them."""
    rates, sides = [f"{middle * factor:.4g}" for factor in FACTORS], {}
    for side in ("grid", "halving"):
        name, begun = f"{NAME}-{side}", time.monotonic()
        clear(arguments, name)
        subprocess.run(
            command(arguments, name, rates, {**WSD, **fields}, *["--halving"] * (side == "halving")), check=True
        )
        lines = ledger(arguments, name)
        losses = {rate: lines.get(f"-{n:03d}", {}).get("bits_per_byte") for n, rate in enumerate(rates)}
        rungs = {key: line.get("bits_per_byte") for key, line in lines.items() if "at" in key}
        steps = sum(line.get("steps", 0) for line in lines.values())
        sides[side] = {"steps": steps, "seconds": round(time.monotonic() - begun, 1), "losses": losses, "rungs": rungs}
    best, chosen = (min(rates, key=lambda rate: of["losses"][rate] or 1e9) for of in sides.values())
    loss, own = sides["grid"]["losses"][best], sides["grid"]["losses"][chosen]
    share = sides["halving"]["steps"] / sides["grid"]["steps"]
    return {"best": best, "chosen": chosen, "share": share, "worse": own / loss - 1, **sides}


# ---- ladder ----------------------------------------------------------------------------------------------------------


def ladder(arguments: argparse.Namespace) -> None:
    """Train the ladder; its points are those of the law of speedruns on a GPU."""
    from zero2all.common.files import write_json
    from zero2all.common.workspace import open_workspace
    from zero2all.experiments.scaling import read_points

    words = ["-m", "zero2all", "sweep", "z2all-100m", "--work", str(arguments.work), "--name", "ladder"]
    words += ["--metric", "loss", "--over", f"size={SIZES}", "--budgets", BUDGETS, "--at-once", "8"]
    words += [f"--{field}={value}" for field, value in LADDER.items()]
    subprocess.run([sys.executable, *words], check=True)
    points, _ = read_points(open_workspace(arguments.work), ["ladder-*"])
    rows = [{"run": p.run, "name": p.name, "parameters": p.n, "tokens": p.tokens, "loss": p.loss} for p in points]
    found = {"machine": machine(), "command": " ".join(words[1:]), "text": arguments.text}
    found |= {"unique_tokens": points[0].unique_tokens, "least_tokens": 0, "points": rows}
    write_json(LAWS, {**json.loads(LAWS.read_text()), "cuda": found})


def measured_points() -> list[Point]:
    """The ladder as it is saved."""
    of = json.loads(LAWS.read_text())["cuda"]
    unique = of["unique_tokens"]
    return [Point(each["run"], each["parameters"], each["tokens"], unique, each["loss"]) for each in of["points"]]


def equal(arguments: argparse.Namespace) -> dict[str, Any]:
    """Five sizes with equal FLOPs, around the one that the law of the ladder chooses."""
    from zero2all.common.workspace import open_workspace
    from zero2all.config import load_config
    from zero2all.config.rules import with_value
    from zero2all.experiments.scaling import read_points
    from zero2all.experiments.shapes import FIELDS, shapes
    from zero2all.experiments.study import open_study, run_tasks, task_of
    from zero2all.experiments.sweep import QUIET
    from zero2all.model.config import parameter_counts

    points = measured_points()
    best = best_for(fit(points, resamples=0).law, HELD_OUT_FLOPS, points[0].unique_tokens)
    fields = {**LADDER, **QUIET, "stages": "[]", "optim.decay_schedule": "constant", "model.vocab_size": 8192}
    base = load_config("z2all-100m", [f"--{field}={value}" for field, value in fields.items()])

    def tokens(model: Any) -> float:
        return HELD_OUT_FLOPS / (6 * parameter_counts(model)["matmul"])

    able = [model for model in shapes(base.model) if tokens(model) <= MOST_EPOCHS * points[0].unique_tokens]
    sizes = sorted(able, key=lambda model: abs(math.log(tokens(model) / best.tokens)))[:5]
    tasks = []
    for model in sizes:
        own = {f"model.{name}": getattr(model, name) for name in FIELDS} | {"train.name": f"equal-{model.hidden_size}"}
        config = load_config("z2all-100m", [f"--{field}={value}" for field, value in {**fields, **own}.items()])
        steps = round(tokens(model) / config.train.tokens_per_step)  # with the rates of the ladder
        config = with_value(with_value(config, "train.tokens", None), "train.steps", steps)
        tasks.append(task_of(config, steps, 1 / len(sizes)))
    workspace = open_workspace(arguments.work)
    with open_study(workspace, "equal", {"flops": HELD_OUT_FLOPS}) as study:
        run_tasks(study, tasks, lambda *_: [], len(sizes))
    measured, _ = read_points(workspace, ["equal-*"])
    return {"chosen": best.n, "flops": HELD_OUT_FLOPS, "points": [asdict(point) for point in measured]}


def show_ladder() -> None:
    """What the law of the smaller sizes says of the largest."""
    points = measured_points()
    print("\n| largest size, tokens | loss | by the law of the smaller ones | off |\n|---|---|---|---|")
    for point, loss in held_out_check(points):
        print(f"| {point.n / 1e6:.1f} M, {point.tokens / 1e6:.0f} M | {point.loss:.4f} | {loss:.4f} |", end=" ")
        print(f"{loss / point.loss - 1:+.2%} |")
    print(f"\n{fit(points, resamples=0).law}")


def show_equal(of: dict[str, Any]) -> None:
    """The chosen size among its neighbours."""
    law, equals = fit(measured_points(), resamples=0).law, [Point(**point) for point in of["points"]]
    best = min(point.loss for point in equals)
    chosen = min(equals, key=lambda point: abs(math.log(point.n / of["chosen"])))
    print(f"\nbest for {of['flops']:.3g} FLOPs by the law: {of['chosen'] / 1e6:.2f} M")
    print("\n| size, tokens | loss | by the law | above the best |\n|---|---|---|---|")
    for point in equals:
        cells = f"{point.n / 1e6:.2f} M, {point.tokens / 1e6:.0f} M{' (chosen)' * (point == chosen)}"
        print(f"| {cells} | {point.loss:.4f} | {predicted(law, point):.4f} | {point.loss / best - 1:.2%} |")


# ---- mixture ---------------------------------------------------------------------------------------------------------


def mixture(arguments: argparse.Namespace) -> dict[str, Any]:
    """The mixture that 12 runs predict, and 20 that they do not have; the two best again with other seeds."""
    from zero2all.common.workspace import open_workspace
    from zero2all.config import load_config
    from zero2all.config.rules import with_value
    from zero2all.experiments.mixture import Trial, choose, propose
    from zero2all.experiments.study import open_study, run_tasks, task_of
    from zero2all.experiments.sweep import QUIET
    from zero2all.packed.shard_format import open_split, packed_sources

    workspace = open_workspace(arguments.work)
    unique = {name: open_split(workspace.packed, name, "train").tokens for name in packed_sources(workspace.packed)}
    fields = {**MIXED, **QUIET, "train.tokens": arguments.tokens}
    base = load_config("z2all-100m", [f"--{field}={value}" for field, value in fields.items()])
    seen, others = propose(unique, MIXTURES), propose(unique, 1 + len(unique) + UNSEEN, seed=7)[1 + len(unique) :]
    with open_study(workspace, "mixed", {"tokens": arguments.tokens}) as study:

        def losses(runs: list[tuple[str, dict[str, float], int]]) -> list[Trial]:
            """Of (name, mixture, seed)."""
            tasks = []
            for name, shares, seed in runs:
                config = base
                for field, value in (("train.name", f"mixed-{name}"), ("data.mixture", shares), ("train.seed", seed)):
                    config = with_value(config, field, value)
                config = with_value(config, "data.seed", seed)
                tasks.append(task_of(config, 1, 1 / arguments.at_once))
            run_tasks(study, tasks, lambda *_: [], arguments.at_once)
            channels = [study.results[task.key]["channels"] for task in tasks]
            bits = [{name: scores["bits_per_byte"] for name, scores in each.items()} for each in channels]
            return [Trial(run[1], each) for run, each in zip(runs, bits, strict=True)]

        first = [(f"seen-{n:02d}", shares, 1) for n, shares in enumerate(seen)]
        first += [(f"other-{n:02d}", shares, 1) for n, shares in enumerate(others)]
        trials = losses(first)
        fitted, unseen = trials[: len(seen)], trials[len(seen) :]
        found = choose(fitted)
        chosen = {name: share.value for name, share in found.mixture.items()}
        best = min(unseen, key=mean_bits).mixture
        again = losses(
            [
                (f"{name}-{seed}", dict(shares), seed)
                for name, shares in (("chosen", chosen), ("best", best))
                for seed in SEEDS
            ]
        )
    by_name = {"chosen": again[: len(SEEDS)], "best of the unseen": again[len(SEEDS) :]}
    return {
        "tokens": arguments.tokens,
        "chosen": chosen,
        "expected": found.objective.value,
        "rank correlation, left out": found.rank_correlation,
        "best of the unseen": dict(best),
        "seen": [[dict(trial.mixture), mean_bits(trial)] for trial in fitted],
        "unseen": [[dict(trial.mixture), mean_bits(trial)] for trial in unseen],
        "seeds": {name: [mean_bits(trial) for trial in runs] for name, runs in by_name.items()},
    }


def mean_bits(trial: Any) -> float:
    """Held-out bits per byte, the mean over channels."""
    return sum(trial.bits_per_byte.values()) / len(trial.bits_per_byte)


def show_mixture(of: dict[str, Any]) -> None:
    """Both mixtures over seeds, and the interval of their difference (paired by seed)."""
    from zero2all.experiments.statistics import mean_interval

    chosen, best = of["seeds"]["chosen"], of["seeds"]["best of the unseen"]
    apart = mean_interval([mine / other - 1 for mine, other in zip(chosen, best, strict=True)])
    count = len(chosen)
    print(f"\nmixture chosen {of['chosen']}: expected {of['expected']:.4f} bits per byte; the best of 20 unseen")
    print(f"{of['best of the unseen']}: {min(bits for _, bits in of['unseen']):.4f} in its first run")
    print(f"over {count} new seeds: chosen {sum(chosen) / count:.4f}, best of the unseen {sum(best) / count:.4f};")
    print(f"chosen above it by {apart.value:+.2%} (95 %: {apart.low:+.2%} to {apart.high:+.2%})")


# ---- speedrun --------------------------------------------------------------------------------------------------------


def equal_time(arguments: argparse.Namespace) -> None:
    """The sizes next to that of a finished speedrun, and nanochat, each for as many seconds."""
    from zero2all.common.workspace import open_workspace
    from zero2all.parallel.device import pick_device
    from zero2all.quickstart.choose import LAWS, PRESETS, choices
    from zero2all.quickstart.speedrun import Budget, Deadline, Speedrun
    from zero2all.train.run import train

    workspace = open_workspace(arguments.work)
    kept, stages = (json.loads((arguments.work / name).read_text()) for name in ("speedrun.json", "quickstart.json"))
    device, seconds = pick_device("auto").type, stages["train"]["seconds"]
    run = Speedrun(workspace, Budget(kept["seconds"]), PRESETS[device], (), device)
    run.take_packed(workspace.packed)
    found = choices(run.config, kept["unique_tokens"], seconds, run.speed, LAWS[device])
    found.sort(key=lambda each: each.size)
    place = [each.model.hidden_size for each in found].index(kept["run"]["model"]["hidden_size"])
    first = max(0, min(place - 2, len(found) - 5))
    path = arguments.work / "equal-time.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    rows["speedrun"] = {"width": found[place].model.hidden_size, **speedrun_row(arguments, run.config.train.name)}
    for choice in [each for each in found[first : first + 5] if each is not found[place]]:
        width = choice.model.hidden_size
        if f"width {width}" in rows or (arguments.only and width not in arguments.only):
            continue
        config = run.run_config(choice, {"train.name": f"equal-time-{width}"})
        watch = Deadline(workspace.run(config.train.name), config, time.monotonic() + seconds, 2 * config.train.steps)
        begun = time.monotonic()
        train(config, workspace, fresh=True, say=lambda _: None, brief=True, watch=watch)
        taken = round(time.monotonic() - begun, 1)
        rows[f"width {width}"] = {"width": width, "wall": taken, **speedrun_row(arguments, config.train.name)}
        path.write_text(json.dumps(rows, indent=2))
        print(rows[f"width {width}"], flush=True)
    if arguments.nanochat and (not arguments.only or 0 in arguments.only):
        rows["nanochat"] = nanochat_row(arguments, found[place].model, rows["speedrun"]["step_seconds"])
    for row in rows.values():
        row["bits_per_byte"] = row["loss"] * kept["bits_per_nat"]
    path.write_text(json.dumps(rows, indent=2))
    keep("equal_time", {"seconds": seconds, "rows": rows})


def speedrun_row(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """The best validation of a run."""
    from zero2all.model.config import parameter_counts
    from zero2all.track.reader import RunReader
    from zero2all.train.saved_config import load_run_config

    folder = arguments.work / "runs" / name
    of, config = RunReader(folder), load_run_config(folder)
    losses, steps = of.series("eval/valid/loss"), of.series("time/step").value
    counts, best = parameter_counts(config.model), int(losses.value.argmin())
    step = float(sum(steps[10:]) / len(steps[10:]))
    return {
        "parameters": counts["total"],
        "in_products": counts["matmul"],
        "tokens": int(losses.tokens[best]),
        "tokens_per_step": config.train.tokens_per_step,
        "step_seconds": step * len(steps),
        "loss": float(losses.value[best]),
    }


def nanochat_row(arguments: argparse.Namespace, model: Any, seconds: float) -> dict[str, Any]:
    """nanochat at the depth of about the same width, for so many seconds of steps; and our run by the same scorer."""
    import numpy as np

    from benchmarks.learning import device, nanochat_model, scorer, train_once
    from zero2all.common.workspace import open_workspace
    from zero2all.infer.load import load_run
    from zero2all.packed.shard_format import open_split, packed_sources
    from zero2all.quickstart.choose import SEQ_LEN

    work, length = arguments.work, SEQ_LEN[device()]
    (source,) = packed_sources(open_workspace(work).packed)
    split = open_split(open_workspace(work).packed, source, "valid")
    tokens = split.read(0, split.tokens)
    for name, part in (("valid", tokens), ("near", tokens[: 8 * length + 1])):
        np.save(work / f"{name}.npy", part)
    depth = max(2, 2 * round(model.hidden_size / 128))
    size = {"depth": depth, "width": 64 * depth, "batch": NANOCHAT_BATCH, "seq_len": length}
    if device() == "cpu":
        size["batch"] = 4096
    job = {"size": size, "windows": "L", "work": str(work), "nanochat": str(arguments.nanochat)}
    ours = load_run(open_workspace(work), "quickstart" if device() == "cpu" else "z2all-100m")
    mine = scorer(lambda rows: ours.model.to(device()).logits(ours.model(rows)), length)(tokens)
    net, call = nanochat_model(job)
    warm = train_once(job | {"tokens": 60 * size["batch"]}, net, call, 1)
    steps = int(seconds / (warm["seconds"] / 60))
    row = train_once(job | {"tokens": steps * size["batch"]}, net, call, 1)
    return {
        "width": size["width"],
        "parameters": row["parameters"],
        "tokens": steps * size["batch"],
        "tokens_per_step": size["batch"],
        "step_seconds": row["seconds"],
        "loss": row["loss"],
        "ours_by_its_scorer": mine,
    }


def show_equal_time(of: dict[str, Any]) -> None:
    """Sizes and nanochat at equal time."""
    ours = {name: row for name, row in of["rows"].items() if name != "nanochat"}
    best = min(row["loss"] for row in ours.values())
    print(
        f"\n| {of['seconds']:.0f} s of training | parameters | tokens | a step | loss | to the best | bits per byte |"
    )
    print(f"|{'---|' * 7}")
    for name, row in sorted(of["rows"].items(), key=lambda item: (item[0] == "nanochat", item[1]["parameters"])):
        cells = [
            name,
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['tokens'] / 1e6:.0f} M",
            f"{row['tokens_per_step']:,}",
        ]
        cells += [f"{row['loss']:.4f}", f"{row['loss'] / best - 1:+.2%}" if name in ours else ""]
        print(f"| {' | '.join(cells)} | {row['bits_per_byte']:.4f} |")


def speedrun(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a speedrun expected, and what came out."""
    from zero2all.model.config import parameter_counts
    from zero2all.track.reader import RunReader
    from zero2all.train.saved_config import load_run_config

    kept, stages = (json.loads((arguments.work / name).read_text()) for name in ("speedrun.json", "quickstart.json"))
    (run,) = (path for path in (arguments.work / "runs").iterdir() if not path.name.endswith("-pilot"))
    of, config = RunReader(run), load_run_config(run)
    losses, bits = (of.series(f"eval/valid/{name}") for name in ("loss", "bpb"))
    best = int(losses.value.argmin())
    return {
        "machine": arguments.machine,
        "seconds_given": kept["seconds"],
        "seconds": round(sum(stage["seconds"] for stage in stages.values()), 1),
        "stages": {name: round(stage["seconds"], 1) for name, stage in stages.items()},
        "unique_tokens": kept["unique_tokens"],
        "parameters": parameter_counts(config.model)["total"],
        "tokens": int(losses.tokens[best]),
        "expected_loss": kept["run"]["predicted_loss"],
        "loss": float(losses.value[best]),
        "bits_per_byte": float(bits.value[best]),
    }


def show_speedruns(of: dict[str, Any]) -> None:
    """Time and loss beside those expected."""
    heads = "speedrun | time | model | tokens | loss expected | reached | bits per byte"
    print(f"\n| {heads} |\n|{'---|' * 7}")
    for name, run in of["runs"].items():
        time_off, loss_off = run["seconds"] / run["seconds_given"] - 1, run["loss"] / run["expected_loss"] - 1
        cells = [name, f"{run['seconds']:.0f} s ({time_off:+.1%})", f"{run['parameters'] / 1e6:.2f} M"]
        cells += [f"{run['tokens'] / 1e6:.1f} M", f"{run['expected_loss']:.3f}", f"{run['loss']:.3f} ({loss_off:+.1%})"]
        print(f"| {' | '.join(cells)} | {run['bits_per_byte']:.4f} |")


def show() -> None:
    """Tables of what is saved."""
    found = json.loads((RESULTS / f"{NAME}.json").read_text())
    show_ladder()
    if "equal" in found:
        show_equal(found["equal"])
    if "speedrun" in found:
        show_speedruns(found["speedrun"])
    if "equal_time" in found:
        show_equal_time(found["equal_time"])
    if "mixture" in found:
        show_mixture(found["mixture"])
    if "kills" in found:
        of = found["kills"]
        print(
            f"{of['runs']} runs of {of['steps']} steps, killed {len(of['kills_after_seconds'])} times: ledgers equal "
            f"{of['ledgers_equal']}, tables equal {of['tables_equal']}; seconds {of['seconds']}"
        )
    print(
        "\n| task | steps of the grid | trained by halving | best rate | chosen | worse by |\n|---|---|---|---|---|---|"
    )
    for task, of in found.get("halving", {}).get("tasks", {}).items():
        cells = (task, f"{of['grid']['steps']:,}", f"{of['share']:.1%}", of["best"], of["chosen"], f"{of['worse']:.2%}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
