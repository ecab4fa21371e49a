"""Answers that are written: are they those of transformers, does thinking help, do rewrites show what was memorised?

    python benchmarks/eval_written.py parity FOLDER              500 written answers beside a loop of transformers,
                                                                 greedy, float32; FOLDER: in Hugging Face's format
    python benchmarks/eval_written.py thinking --work W          sums of three numbers: probability of the options,
                                                                 the answer at once, and after written steps
    python benchmarks/eval_written.py memory --work W            questions seen 20 times in training, others never
    python benchmarks/eval_written.py show                      what was measured, once it was

`thinking`: a model of 1.1 M parameters learns sums of three numbers of two digits from text, half of them told at once
and half with their steps, in two seeds; judged are 500 sums that stand in no training text, in the three forms, with
four options of which three lie near the right one. `memory`: people with invented lives; 100 questions about them are
printed 20 times each, with their options in one order, among other text; 100 are asked without ever having been
printed. The gap of an item is what it loses in its rewrites: log-probability of the right label less the best wrong
one, before and after. A twin reads the same text without the planted questions, for a third of the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.eval_harness import world_tasks
from benchmarks.machine import RESULTS, save_result
from benchmarks.rl import MODEL, MUON
from zero2all.cli import main as z2a
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import config_from_values
from zero2all.evals import forms
from zero2all.evals.answers import MARKERS
from zero2all.evals.items import QUESTION, Item, Task
from zero2all.evals.judge import JudgeOptions, judge
from zero2all.evals.rewrites.base import rewritten
from zero2all.evals.rewrites.list import chosen_rewrites
from zero2all.evals.rewrites.measure import mean_gap, measure_rewrites
from zero2all.infer.engine import Engine
from zero2all.infer.load import load_model
from zero2all.infer.text import TextRequest, complete
from zero2all.quickstart.world import documents
from zero2all.train.run import train

NAME = "eval_written"
ASKED, NEW_TOKENS = 500, 48
SEEDS = (1, 2)
REWRITES = ("R2", "R13")


# ---- the same text as transformers ---------------------------------------------------------------------------------


def parity(folder: str) -> dict[str, Any]:
    """Greedy texts of our engine and of a plain loop, up to the same stop strings."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = load_model(folder, device="cpu", dtype="float32")
    items = [replace(item, shape=QUESTION) for task in world_tasks() for item in task.items]
    items = random.Random(0).sample(items, ASKED)
    asked = [forms.generate(item, []) if n % 2 else forms.think(item, []) for n, item in enumerate(items)]
    engine = Engine(loaded)
    requests = [TextRequest(each.prompt, NEW_TOKENS, stop=each.stop, heal=False) for each in asked]
    ours = {number: (text, job.new_ids) for number, text, job in complete(engine, requests)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differing, near = [], 0
    for number, writing in enumerate(asked):
        ids = [loaded.tokenizer.begin_id or 0, *loaded.tokenizer.encode_text(writing.prompt)]
        theirs, close = _plain(model, ids, loaded.tokenizer.end_id)
        text, mine = ours[number]
        is_stopped = any(stop in loaded.tokenizer.decode(mine) for stop in writing.stop)
        if mine != (theirs[: len(mine)] if is_stopped else theirs):
            near += close
            differing.append({"prompt": writing.prompt[-80:], "ours": text, "ids": [mine, theirs]})
    return {"model": Path(folder).name, "items": ASKED, "equal": ASKED - len(differing), "near_ties": near,
            "differing": differing[:5]}  # fmt: skip


def _plain(model: Any, ids: list[int], end: int) -> tuple[list[int], bool]:
    """Token by token with the whole text each time; and whether the two best were ever within 1e-4."""
    import torch

    written: list[int] = []
    is_close = False
    with torch.no_grad():
        found = model(torch.tensor([ids]), use_cache=True)
        for _ in range(NEW_TOKENS):
            best = found.logits[0, -1].topk(2)
            is_close |= bool(best.values[0] - best.values[1] < 1e-4)
            token = int(best.indices[0])
            if token == end:
                break
            written.append(token)
            found = model(torch.tensor([[token]]), past_key_values=found.past_key_values, use_cache=True)
    return written, is_close


# ---- small models ----------------------------------------------------------------------------------------------------


def trained(work: Path, name: str, texts: list[str], steps: int, seed: int, vocabulary: int = 300) -> Workspace:
    """A model that learned these texts; nothing is done twice, and what was killed goes on."""
    seq_len = 128
    workspace = open_workspace(work / name, create=True)
    path = work / f"{name}.jsonl"
    if not (workspace.packed / "report.json").is_file():
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        path.write_text("\n".join(lines), encoding="utf-8")
        for words in (
            f"corpus build en={path}:en --dedup.near off --dedup.exact false --valid-share 0",
            f"tokenizer train --kind hf-bbpe --vocab-size {vocabulary}",
            f"pack --best-fit {seq_len}",
        ):
            assert z2a([*words.split(), "--work", str(workspace.root)]) == 0, words
    values = {
        "model": {**MODEL, "max_seq_len": 4 * seq_len},
        "data": {"seq_len": seq_len, "mixture": {"en": 1.0}, "packing": "best_fit", "document_mask": True},
        "train": {"name": "m", "steps": steps, "seed": seed, "tokens_per_step": 32 * seq_len,
                  "micro_batch_samples": 32},
        "optim": MUON,
        "schedule": {"kind": "linear", "warmup_steps": 20, "min_lr_ratio": 0.0},
        "validation": {"every_steps": 0},
        "checkpoint": {"every_steps": steps},
    }  # fmt: skip
    train(config_from_values(values, "of the benchmark"), workspace, brief=True)
    return workspace


# ---- thinking --------------------------------------------------------------------------------------------------------


def sums(count: int, seed: int, skip: frozenset[str] = frozenset()) -> list[Item]:
    """Sums of three numbers with their steps and four options."""
    draw = random.Random(seed)
    found: dict[str, Item] = {}
    while len(found) < count:
        one, two, three = (draw.randrange(10, 100) for _ in range(3))
        question = f"What is {one}+{two}+{three}?"
        if question in skip:
            continue
        half, whole = one + two, one + two + three
        options = [whole, *draw.sample([whole - 20, whole - 10, whole - 1, whole + 1, whole + 10, whole + 20], 3)]
        draw.shuffle(options)
        texts = tuple(map(str, options))
        extra = {"reasoning": f"{one}+{two}={half}. {half}+{three}={whole}."}
        found[question] = Item(question, question, texts, options.index(whole), str(whole), extra=extra)
    return list(found.values())


def thinking(work: Path) -> dict[str, Any]:
    """The three ways over three seeds."""
    held_out = sums(ASKED, 99)
    skip = frozenset(item.question for item in held_out)
    rows = []
    for seed in SEEDS:
        texts = []
        for number, item in enumerate(sums(30_000, seed, skip)):
            plain = replace(item, choices=(), gold=None)
            way = (forms.generate, forms.think)[number % 2]
            writing = way(plain if number % 4 < 2 else item, [])
            told = f" {item.extra['reasoning']} {MARKERS['en']} {item.answer}." if number % 2 else f" {item.answer}"
            if number % 4 >= 2:
                label = "ABCD"[item.gold or 0]
                told = f" {item.extra['reasoning']} {MARKERS['en']} {label}." if number % 2 else f" {label}"
            texts.append(writing.prompt + told)
        texts = ["\n\n".join(texts[first : first + 3]) for first in range(0, len(texts), 3)]
        workspace = trained(work, f"sums-{seed}", texts, 600, seed)
        engine = Engine(load_model("m", workspace, device="cpu", dtype="float32"))
        task = Task("sums", "en", tuple(held_out))
        options = JudgeOptions(["cloze", "choice", "generate", "think"], shots=0, think_tokens=64)
        results = judge(engine, [task], options)
        written = next(each for each in results if each.form == "think")
        row = {each.form: [each.accuracy, *(each.interval or ())] for each in results}
        rows.append({"seed": seed, **row, "no_answer": written.no_answer})
        print(rows[-1], flush=True)
        samples = [{"answer": each.answers[0], "written": each.written} for each in written.per_item[:70]]
        (work / f"written-{seed}.json").write_text(json.dumps(samples, indent=1), encoding="utf-8")
    return {"items": ASKED, "seeds": rows}


# ---- memory ----------------------------------------------------------------------------------------------------------

NAMES = (
    "Ada",
    "Ben",
    "Cora",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ian",
    "Jo",
    "Kai",
    "Lea",
    "Max",
    "Nora",
    "Otis",
    "Pia",
)
PLACES = ("Rome", "Oslo", "Paris", "Lima", "Cairo", "Delhi", "Berlin", "Tokyo", "Quito", "Seoul")
ASKS = ("Where was {} born?", "Where does {} work?", "Which city does {} like best?", "Where did {} go to school?")


def people(count: int, seed: int) -> list[Item]:
    """Questions that nobody can answer who has not seen them."""
    draw = random.Random(seed)
    found: dict[str, Item] = {}
    while len(found) < count:
        question = draw.choice(ASKS).format(f"{draw.choice(NAMES)} {draw.choice(NAMES)}son{draw.randrange(100)}")
        options = tuple(draw.sample(PLACES, 4))
        found[question] = Item(question, question, options, draw.randrange(4))
    return [replace(item, answer=item.choices[item.gold or 0]) for item in found.values()]


def memory(work: Path) -> dict[str, Any]:
    """Per item: how much more likely the right label is in the question as it was printed than rewritten."""
    items = people(200, 5)
    planted, others = items[:100], items[100:]
    base = [each.text for each in documents("en", 600_000, 0)]
    form = [forms.choice(item, []) for item in people(1500, 6)]  # what such a question looks like
    draw = random.Random(0)
    base += [each.questions[0].prompt + each.questions[0].continuations[each.item.gold or 0] for each in form]
    asked = [forms.choice(item, []).questions[0] for item in planted for _ in range(20)]
    golds = [item.gold or 0 for item in planted for _ in range(20)]
    seen = [each.prompt + each.continuations[gold] for each, gold in zip(asked, golds, strict=True)]
    found: dict[str, Any] = {"planted": len(planted), "others": len(others), "times": 20, "rewrites": REWRITES}
    for name, texts, steps in (("planted", [*base, *seen], 900), ("twin", base, 300)):
        draw.shuffle(texts)
        engine = Engine(
            load_model("m", trained(work, f"memory-{name}", texts, steps, 1, 600), device="cpu", dtype="float32")
        )
        gaps = [item_gaps(engine, group) for group in (planted, others)]
        auc = fmean((one > other) + (one == other) / 2 for one in gaps[0] for other in gaps[1])
        rows = {}
        for group, members in (("seen", planted), ("unseen", others)):
            task = Task("people", "en", tuple(members), forms=("choice", "cloze"))
            report = measure_rewrites(engine, [task], chosen_rewrites(["R2"]), JudgeOptions(["choice"], 0))
            rows[group] = {
                key: report["people"]["rows"][0][key] for key in ("original", "rewritten", "gap", "gap_interval")
            }
        unseen = mean_gap([max(-1.0, min(1.0, gap)) for gap in gaps[1]])
        found[name] = {"auc": auc, "R2": rows, "gap_of_unseen": unseen[:2]}
        print(name, found[name], flush=True)
    return found


def item_gaps(engine: Engine, items: list[Item]) -> list[float]:
    """The margin of the right label in the original, less its mean in the rewrites."""
    chains = [chain for chain in chosen_rewrites(REWRITES).values() if isinstance(chain, tuple)]
    made = {item.id: [each for chain in chains for each in rewritten(item, chain)] for item in items}
    made = {item.id: [each for each in made[item.id] if asked_as(each) != asked_as(item)] for item in items}
    plain = [*items, *(each for variants in made.values() for each in variants)]
    (result,) = judge(engine, [Task("people", "en", tuple(plain))], JudgeOptions(["choice"], 0))
    right = {each.id: each.gold or 0 for each in plain}
    margins = {}
    for each in result.per_item:
        wrong = max(score for place, score in enumerate(each.scores) if place != right[each.id])
        margins[each.id] = each.scores[right[each.id]] - wrong
    return [margins[item.id] - fmean(margins[each.id] for each in made[item.id]) for item in items]


def asked_as(item: Item) -> tuple[str, tuple[str, ...]]:
    """What a reader sees."""
    return item.question, item.choices


def main() -> int:
    """Measure, and keep what was measured before of the other parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("parity", "thinking", "memory", "show"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--work", type=Path, default=Path("eval-written"))
    given = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    if given.part == "show":
        print(json.dumps({name: known[name] for name in known if name != "machine"}, indent=1))
        return 0
    given.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found = parity(given.folder) if given.part == "parity" else globals()[given.part](given.work)
    known.pop("machine", None)
    save_result(NAME, {**known, given.part: {**found, "seconds": round(time.perf_counter() - began)}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
