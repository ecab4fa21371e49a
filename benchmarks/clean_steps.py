"""Do the guards refuse clean data? Runs over mixtures with rare domains, default guards: no update may be refused.

    python benchmarks/clean_steps.py --work FOLDER --prepare --text en=FILE --text zh=FILE    packs the data (a CPU)
    python benchmarks/clean_steps.py --work FOLDER                  40 M, five mixtures, 4,000 steps of 32,768 tokens
    python benchmarks/clean_steps.py --work FOLDER --size tiny --mixtures 2 --steps 600       a CPU: some minutes
    python benchmarks/clean_steps.py --replay RUN RUN                    recorded losses and norms, judged again

The common text is what --text names (any format that `z2a corpus` reads); without it, sentences of words drawn from
the documentation of the installed Python. The rare domains are generated: code, Chinese verse, tables of numbers,
base64 (whose loss never falls), another language. Each is a source of its own, so a mixture is a choice of weights; the
last mixture has all of it in one source, where nothing tells a rare document from the others. One in 200 to one in
2,000 rows is rare, and a step has 16 rows: such a row comes so seldom that the last 128 steps say little about it.

Exit code 1 when an update was refused. The JSON also says how near the steps came to the limits.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import itertools
import json
import math
import pkgutil
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import config_from_values
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed.writer import pack_corpus
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.track.reader import RunReader, read_run
from zero2all.train.guards.detector import Detector
from zero2all.train.guards.ledger import SkipLedger
from zero2all.train.run import train
from zero2all.train.saved_config import load_run_config

ROWS = 16
"""Of a step, at either size."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"seq_len": 128, "hidden": 64, "layers": 2, "heads": 2, "vocabulary": 1024, "lr": 4e-3, "steps": 4000},
    "40m": {"seq_len": 2048, "hidden": 512, "layers": 8, "heads": 4, "vocabulary": 16384, "lr": 2e-3, "steps": 4000},
}
COMMON = ("en", "zh", "docs")
RARE = ("code", "verse", "tables", "base64", "finnish")
MIXTURES: dict[str, dict[str, float]] = {
    "one rare row in 500, all kinds": {"en": 600, "zh": 400, **dict.fromkeys(RARE, 0.4)},
    "base64 once in 2,000 rows": {"en": 800, "zh": 200, "base64": 0.5, "code": 2},
    "verse and tables in text": {"en": 1000, "docs": 200, "verse": 3, "tables": 2},
    "three common, five rare": {"en": 400, "zh": 300, "docs": 300, **dict.fromkeys(RARE, 1)},
    "one source for all": {"pile": 1},
}
PILE_SHARES = {**dict.fromkeys(COMMON, 0.33), **dict.fromkeys(RARE, 0.002)}


def main() -> None:
    """Prepare, train or replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="workspace with the packed data, and for the runs")
    parser.add_argument("--prepare", action="store_true", help="only pack the data")
    parser.add_argument("--text", action="append", default=[], metavar="en|zh|docs=FILE", help="common text")
    parser.add_argument("--megabytes", type=float, default=20.0, help="of each common source that is not given")
    parser.add_argument("--size", choices=SIZES, default="40m")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--mixtures", type=int, default=len(MIXTURES), help="only the last so many")
    parser.add_argument("--optim", default="adamw", help="optim.kind")
    parser.add_argument("--micro-batch", type=int, default=ROWS, help="rows of a pass")
    parser.add_argument("--replay", type=Path, nargs="+", default=[], metavar="RUN", help="folders of runs")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results alone")
    arguments = parser.parse_args()
    if arguments.replay:
        for run in arguments.replay:
            print(json.dumps({"run": run.name, **replayed(run)}))
        return
    if arguments.work is None:
        parser.error("--work names the folder of the data and the runs")
    size = SIZES[arguments.size] | ({"steps": arguments.steps} if arguments.steps else {})
    work = open_workspace(arguments.work, create=True)
    if not work.packed.exists():
        prepare(work, size["vocabulary"], dict(each.split("=", 1) for each in arguments.text), arguments.megabytes)
    if arguments.prepare:
        return
    found = {}
    for number, (name, mixture) in list(enumerate(MIXTURES.items()))[-arguments.mixtures :]:
        found[name] = measured(work, size, number, mixture, arguments.optim, arguments.micro_batch)
        print(json.dumps({name: found[name]}), flush=True)
    refused = sum(one["refused"] for one in found.values())
    if not arguments.no_save:
        save_result(f"clean_steps_{arguments.size}", {"size": size, "optim": arguments.optim, "mixtures": found})
    print(f"{refused} updates refused in {len(found)} runs of {size['steps']:,} steps")
    raise SystemExit(1 if refused else 0)


# ---- runs ----


def measured(
    work: Workspace, size: dict[str, Any], number: int, mixture: dict[str, float], optim: str, micro: int
) -> dict[str, Any]:
    """Train over a mixture with default guards; what they refused."""
    name = f"clean-{number}"
    width, tokens = size["hidden"], size["seq_len"] * ROWS
    values: dict[str, Any] = {
        "model": {"hidden_size": width, "intermediate_size": width * 8 // 3 // 32 * 32, "layers": size["layers"]},
        "data": {"seq_len": size["seq_len"], "mixture": mixture, "seed": 1234 + number},
        "train": {"name": name, "steps": size["steps"], "tokens_per_step": tokens, "micro_batch_samples": micro},
        "optim": {"lr_max": size["lr"], "kind": optim},
        "schedule": {"kind": "wsd", "decay_share": 0.65, "decay_shape": "linear", "min_lr_ratio": 0.05},
        "checkpoint": {"every_steps": 0},
        "validation": {"every_steps": 0, "tokens_per_source": tokens},
        "resilience": {"supervise": False, "memory_every_steps": 0},
    }
    values["schedule"]["warmup_steps"] = max(1, min(100, size["steps"] // 10))
    values["model"] |= {"heads": size["heads"], "kv_heads": size["heads"], "max_seq_len": size["seq_len"]}
    if size["hidden"] >= 512:
        values["train"]["precision"] = "bfloat16"
    began = time.monotonic()
    summary = train(config_from_values(values, "of a benchmark"), work, fresh=True, say=lambda _: None)
    run = work.run(name)
    refused = SkipLedger.load(run / "incidents").entries
    kinds = [event.kind for event in read_run(run).events]
    return {
        "refused": len(refused) + kinds.count("skip"),
        "reasons": [one.reason for one in refused][:20],
        "drops": kinds.count("drop"),
        "held_out": summary.held_out.get("eval/valid/loss"),
        "seconds": round(time.monotonic() - began, 1),
        **replayed(run),
    }


def replayed(run: Path) -> dict[str, Any]:
    """The recorded losses and gradient norms of a run, judged by a detector of their own: what it would flag, and the
    highest loss and norm as a share of their limits. Without the losses of rows, so it is stricter than a run."""
    reader, config = RunReader(run), load_run_config(run)
    guards = Detector(config.guards, config.schedule.warmup_steps, config.optim.clip_grad_norm)
    losses, norms = reader.series("loss"), reader.series("grad_norm")
    flagged: list[str] = []
    nearest = {"loss": 0.0, "grad_norm": 0.0}
    for step, loss, norm in zip(losses.step.tolist(), losses.value.tolist(), norms.value.tolist(), strict=True):
        if step <= guards.last_step:  # an attempt that went back
            continue
        limits = guards.limits(step)
        if math.isfinite(limits.loss):
            nearest["loss"] = max(nearest["loss"], loss / limits.loss)
            nearest["grad_norm"] = max(nearest["grad_norm"], norm / limits.grad_norm)
        flagged += [
            one.text for one in guards.observe(step, loss, norm, {}, (step, step + 1)) if "drop" not in one.kind
        ]
    return {"replayed_steps": len(losses.step), "replay_flags": len(flagged), "replay_examples": flagged[:5], **nearest}


# ---- data ----


def prepare(work: Workspace, vocabulary: int, given: dict[str, str], megabytes: float) -> None:
    """Corpus, tokenizer and packed sources."""
    shutil.rmtree(work.raw, ignore_errors=True)
    work.raw.mkdir(parents=True)
    amount = int(megabytes * 1e6)
    sentences = _sentences()
    writers: dict[str, Callable[[random.Random], str]] = {
        **dict.fromkeys(COMMON, sentences),
        **{"code": _code, "verse": _verse, "tables": _table, "base64": _base64, "finnish": _finnish},
    }
    sources = []
    for number, (name, write) in enumerate(writers.items()):
        path = Path(given[name]) if name in given else work.raw / f"{name}.jsonl"
        if name not in given:
            _write(path, write, number, amount if name in COMMON else amount // 10)
        sources.append(Source(name, path, name))
    _write_pile(work.raw / "pile.jsonl", writers, amount)
    sources.append(Source("pile", work.raw / "pile.jsonl", "pile"))
    build_corpus(work.corpus, sources, BuildOptions(valid_share=0.02, rules="none"))
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=vocabulary))
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    for folder in (work.raw, work.corpus):  # what is left may have to travel to the machine with the GPU
        shutil.rmtree(folder)


def _write(path: Path, write: Callable[[random.Random], str], seed: int, amount: int) -> None:
    rng, written = random.Random(seed), 0
    with path.open("w") as file:
        while written < amount:
            written += file.write(json.dumps({"text": write(rng)}) + "\n")


def _write_pile(path: Path, writers: dict[str, Callable[[random.Random], str]], amount: int) -> None:
    """Documents of all domains in one file."""
    rng = random.Random(99)
    names = [*PILE_SHARES]

    def write(rng: random.Random) -> str:
        return writers[rng.choices(names, [*PILE_SHARES.values()])[0]](rng)

    _write(path, write, rng.randrange(1000), amount)


def _sentences() -> Callable[[random.Random], str]:
    """Text of words, each drawn from those that follow the word before it in the documentation of this Python."""
    words = [word for text in _documentation() for word in re.findall(r"\S+", text)]
    following: dict[str, list[str]] = {}
    for one, other in itertools.pairwise(words):
        following.setdefault(one, []).append(other)

    def write(rng: random.Random) -> str:
        found = [rng.choice(words)]
        for _ in range(rng.randint(200, 3000)):
            found.append(rng.choice(following.get(found[-1]) or words))
        return " ".join(found)

    return write


def _documentation() -> Iterator[str]:
    """The doc strings of the standard library's modules, and of what is in them."""
    quiet = {"antigravity", "this", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "__phello__"}
    for name in sorted(set(sys.stdlib_module_names) - quiet):
        if name.startswith("_") or pkgutil.resolve_name("importlib.util").find_spec(name) is None:
            continue
        try:
            module = import_module(name)
        except Exception:
            continue
        for _, value in [("", module), *inspect.getmembers(module, lambda one: inspect.isclass(one) or callable(one))]:
            text = inspect.getdoc(value)
            if text:
                yield text


def _code(rng: random.Random) -> str:
    names = ["total", "value", "items", "count", "left", "right", "node", "index", "result", "key"]
    lines = []
    for _ in range(rng.randint(40, 400)):
        a, b, c = rng.sample(names, 3)
        lines += rng.choice(
            (
                [f"def {a}_{b}({b}, {c}=None):", f"    if {b} is {c}:", f"        return {rng.randint(0, 99)}"],
                [f"for {a} in range({b}, {rng.randint(2, 400)}):", f"    {c}[{a}] = {c}.get({a}, 0) + {b}"],
                [f"{a} = [{b} * {rng.randint(2, 9)} for {b} in {c} if {b} > {rng.randint(0, 9)}]"],
            )
        )
    return "\n".join(lines)


CHARACTERS = (
    "春夏秋冬山水风花雪月江河湖海云雨天地日夜人心白青红远近来去归坐行看听落开长高深寒暖一二三千万里年时"
    "梦酒歌舟马柳松竹梅雁鸟鱼城楼门窗灯烟波声影香色愁思情"
)


def _verse(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(20, 300)):
        width = rng.choice((5, 7))
        lines.append(",".join("".join(rng.choices(CHARACTERS, k=width)) for _ in range(2)) + "。")
    return "\n".join(lines)


def _table(rng: random.Random) -> str:
    columns = rng.randint(3, 9)
    rows = [[f"{rng.gauss(0, 1000):.3f}" for _ in range(columns)] for _ in range(rng.randint(50, 500))]
    return "\n".join("\t".join(row) for row in rows)


def _base64(rng: random.Random) -> str:
    return base64.encodebytes(rng.randbytes(rng.randint(1000, 12000))).decode()


SYLLABLES = [
    a + b + c for a in "kltsmnprvhj" for b in ("a", "aa", "ä", "ää", "o", "uo", "yö", "i", "ii", "e") for c in ("", "n")
]


def _finnish(rng: random.Random) -> str:
    """Words that look like another language."""
    words = ["".join(rng.choices(SYLLABLES[:: rng.choice((1, 2, 3))], k=rng.randint(1, 5))) for _ in range(400)]
    return " ".join(rng.choice(words) for _ in range(rng.randint(200, 2000)))


if __name__ == "__main__":
    main()
