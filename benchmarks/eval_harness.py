"""Our engine beside lm-eval's own `hf` model: the same weights, the same requests, in one process.

    python benchmarks/eval_harness.py --work quickstart      the trained quickstart run: log-likelihoods and speed; then
                                                             the speed of z2all-100m (CPU) or z2all-1b (GPU)
    python benchmarks/eval_harness.py --work quickstart --only speed --items 200

Requests are 5-shot multiple choice with options of several tokens, of our own making: facts and sums of the
quickstart's world in Chinese and English, and lines of Python's own library. The five examples are the same for all
items of a subject, as in most benchmarks. For the larger config, whose weights are random, examples and items have
passages before them.

Log-likelihoods: those of our adapter against those of `hf` on the exported folder, in float32 on the CPU. Requests
where a token spans the border are listed apart, with the exact value, lm-eval's own on our engine, and hf's.
Speed: after a search for hf's best batch size, both in turns; the medians are compared. Needs the extra `lmeval` and
transformers; without lm-eval it says so and measures ours alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.generate import random_model
from benchmarks.machine import BILLION, save_result
from zero2all.common.progress import say, show_log
from zero2all.common.workspace import open_workspace
from zero2all.evals.forms import Shots, cloze
from zero2all.evals.items import CONTINUE, Item, Task
from zero2all.evals.scorer import Question, Scored, score_questions
from zero2all.infer.engine import Engine
from zero2all.infer.load import LoadedModel, load_model
from zero2all.measure.clock import wait_for
from zero2all.model.hf import write_hf_folder
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import load_measured_config
from zero2all.quickstart.world import documents, probes

CONFIGS = {"cuda": BILLION, "cpu": "z2all-100m"}
ITEMS = {"cuda": 400, "cpu": 12}
"""Items of the larger config."""
BATCHES = {"cuda": (16, 64, 128), "cpu": (1, 8)}
TURNS = {"cuda": 2, "cpu": 3}
SHOTS, OPTIONS, CODE_ITEMS = 5, 4, 400
PASSAGES = {"cuda": (620, 160), "cpu": (120, 40)}
"""Characters before an example and before an item of the larger config: prompts of about 1,200 and 300 tokens."""
WITHIN = 1e-3
LIBRARY = (argparse, textwrap, inspect, ast, json, dataclasses, random, shutil, statistics, tempfile)

Pair = tuple[str, str]


# ---- items -------------------------------------------------------------------------------------------------------


def world_tasks() -> list[Task]:
    """Facts and sums in two languages, lines of code: one task for each language."""
    return [_world_task("zh"), _world_task("en"), _code_task()]


def _world_task(language: str) -> Task:
    rng = random.Random(language)
    found: dict[Any, Item] = {}
    for seed in range(3):
        for probe in probes(language, seed):
            options = [probe.answer, *probe.foils[: OPTIONS - 1]]
            rng.shuffle(options)
            more: dict[str, Any] = {"language": language, "subject": probe.family, "shape": CONTINUE}
            item = Item(
                f"{seed}/{probe.id}", probe.prompt, tuple(options), options.index(probe.answer), probe.answer, **more
            )
            found.setdefault((probe.prompt, frozenset(options)), item)
    return _with_shots(language, list(found.values()))


def _code_task() -> Task:
    """What is assigned to a name: the right expression among those of other lines."""
    lines: dict[str, str] = {}
    for module in LIBRARY:
        for line in inspect.getsource(module).splitlines():
            name, equals, value = line.strip().partition(" = ")
            if equals and name.replace("_", "").replace(".", "").isalnum() and 8 <= len(value) <= 40:
                lines.setdefault(f"{name} =", value)
    rng, items = random.Random("code"), []
    for number, (prompt, value) in enumerate(list(lines.items())[:CODE_ITEMS]):
        options = [value, *rng.sample(sorted(set(lines.values()) - {value}), OPTIONS - 1)]
        rng.shuffle(options)
        items.append(
            Item(f"code/{number}", prompt, tuple(options), options.index(value), value, "code", shape=CONTINUE)
        )
    return _with_shots("code", items)


def _with_shots(name: str, items: list[Item]) -> Task:
    """The first items of each subject become its examples."""
    shots: list[Item] = []
    kept: list[Item] = []
    for item in items:
        of_subject = [shot for shot in shots if shot.subject == item.subject]
        (shots if len(of_subject) < SHOTS else kept).append(item)
    return Task(name, name, tuple(kept), tuple(shots), ("cloze",))


def with_passages(task: Task, items: int, of_shot: int, of_item: int) -> Task:
    """The same with text before every example and item."""
    language = "zh" if task.language == "zh" else "en"
    texts = (document.text for document in documents(language, 4_000_000, 0))
    scale = 0.4 if language == "zh" else 1.0  # a Han character is about as much as two or three letters

    def before(item: Item, length: int) -> Item:
        passage = ""
        while len(passage) < length * scale:
            passage += next(texts) + "\n"
        return dataclasses.replace(item, question=passage[: int(length * scale)] + "\n" + item.question)

    shots = tuple(before(shot, of_shot) for shot in task.shots)
    return dataclasses.replace(task, items=tuple(before(item, of_item) for item in task.items[:items]), shots=shots)


def questions_of(tasks: Sequence[Task], engine: Engine) -> list[Question]:
    """One for each item that fits the model."""
    shots = {task.name: Shots(task, SHOTS) for task in tasks}
    asked = [cloze(item, shots[task.name].of(item)).questions[0] for task in tasks for item in task.items]
    lengths = engine.tokenizer.encode_batch([q.prompt + max(q.continuations, key=len) for q in asked])
    return [each for each, ids in zip(asked, lengths, strict=True) if len(ids) <= engine.max_len - 16]


# ---- the two models ----------------------------------------------------------------------------------------------


def hf_model(folder: Path, device: torch.device, dtype: torch.dtype, batch: int) -> Any:
    """lm-eval's own model on an exported folder."""
    from lm_eval.models.huggingface import HFLM

    name = str(dtype).removeprefix("torch.")
    return HFLM(str(folder), device=str(device), dtype=name, batch_size=batch, add_bos_token=True)


def requests_of(pairs: Sequence[Pair]) -> list[Any]:
    """As the harness hands them to a model."""
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


def without_refused(pairs: Sequence[Pair], engine: Engine) -> list[Pair]:
    """Without requests at which lm-eval's own models stop: the last token of the context swallows the continuation."""
    both = engine.tokenizer.encode_batch([text for context, more in pairs for text in (context, context + more)])
    return [pair for pair, one, whole in zip(pairs, both[::2], both[1::2], strict=True) if len(whole) > len(one)]


def apart_of(questions: Sequence[Question], engine: Engine) -> dict[Pair, float]:
    """The exact values of the requests whose question has a token across the border of context and continuation."""
    return {
        (question.prompt, continuation): each.logprob
        for question, scored in zip(questions, score_questions(engine, questions), strict=True)
        for continuation, each in zip(question.continuations, scored, strict=False)
        if isinstance(each, Scored) and each.spans_border
    }


# ---- log-likelihoods ---------------------------------------------------------------------------------------------


def compare_values(loaded: LoadedModel, folder: Path, tasks: Sequence[Task]) -> dict[str, Any]:
    """Our log-likelihoods against hf's."""
    from zero2all.evals.lm_harness import HarnessModel

    ours = HarnessModel(Engine(loaded))
    theirs = hf_model(folder, loaded.device, torch.float32, 16)
    rows: dict[str, Any] = {}
    spans: list[dict[str, Any]] = []
    for task in tasks:
        questions = questions_of([task], ours.engine)
        pairs = [(each.prompt, option) for each in questions for option in each.continuations]
        values = dict(zip(pairs, ours.loglikelihood(requests_of(pairs), disable_tqdm=True), strict=True))
        asked = without_refused(list(values), ours.engine)
        beside = dict(zip(asked, theirs.loglikelihood(requests_of(asked), disable_tqdm=True), strict=True))
        apart = apart_of(questions, ours.engine)
        plain = [pair for pair in asked if pair not in apart]
        differences = [abs(values[pair][0] - beside[pair][0]) for pair in plain]
        for pair, exact in apart.items():
            if pair in values:
                hf = beside[pair][0] if pair in beside else None
                pieces = ours._encode_pair(*pair)  # as lm-eval cuts them; no ids of the continuation: it stops there
                own = ours._loglikelihood_tokens([(None, *pieces)])[0][0] if pieces[1] else None
                three = {"exact": exact, "lm_eval_on_ours": own, "hf": hf}
                spans.append({"language": task.name, "context_end": pair[0][-24:], "continuation": pair[1], **three})
        rows[task.name] = {
            "items": len(questions), "requests": len(values), "compared": len(plain),
            "largest_difference": max(differences), "greedy_differs": sum(values[p][1] != beside[p][1] for p in plain),
            "apart": sum(pair in apart for pair in values), "refused_by_lm_eval": len(values) - len(asked),
        }  # fmt: skip
        say(f"{task.name}: {rows[task.name]}")
    known = [each for each in spans if each["hf"] is not None and each["lm_eval_on_ours"] is not None]
    return {
        "languages": rows,
        "items": sum(row["items"] for row in rows.values()),
        "is_within": all(row["largest_difference"] <= WITHIN for row in rows.values()),
        "apart_lm_eval_value_differs": max((abs(e["lm_eval_on_ours"] - e["hf"]) for e in known), default=0.0),
        "apart_exact_differs": max((abs(e["exact"] - e["hf"]) for e in known), default=0.0),
        "apart": spans,
    }


# ---- speed -------------------------------------------------------------------------------------------------------


def compare_speed(name: str, loaded: LoadedModel, folder: Path, questions: list[Question]) -> dict[str, Any]:
    """Both in turns on the same requests."""
    device, dtype = loaded.device, loaded.model.embedding.weight.dtype
    engine = Engine(loaded)
    pairs = [(each.prompt, option) for each in questions for option in each.continuations]
    pairs = without_refused(pairs, engine)
    ids = engine.tokenizer.encode_batch([context + more for context, more in pairs])
    options = engine.tokenizer.encode_batch([more for _, more in pairs])
    found: dict[str, Any] = {
        "model": name, "requests": len(pairs), "tokens_of_a_request": round(statistics.mean(map(len, ids))),
        "tokens_of_an_option": round(statistics.mean(map(len, options)), 1), "dtype": str(dtype),
    }  # fmt: skip
    if find_spec("lm_eval") is None:
        seconds = [timed(lambda: score_questions(engine, questions), device)[0] for _ in range(3)]
        return {**found, "ours_requests_per_s": len(pairs) / min(seconds[1:])}
    from zero2all.evals.lm_harness import HarnessModel

    ours, requests = HarnessModel(engine), requests_of(pairs)
    theirs = hf_model(folder, device, dtype, 1)
    batch = best_batch(theirs, requests, device)
    ours.loglikelihood(requests[: 4 * OPTIONS], disable_tqdm=True)  # warm-up; hf's was the search
    times: dict[str, list[float]] = {"ours": [], "hf": []}
    values: dict[str, list[tuple[float, bool]]] = {}
    for _ in range(TURNS[device.type]):
        for who, model in (("ours", ours), ("hf", theirs)):
            score = partial(model.loglikelihood, requests, disable_tqdm=True)
            took, values[who] = timed(score, device)
            times[who].append(took)
    apart = apart_of(questions, engine)
    differences = [
        abs(one[0] - other[0])
        for pair, one, other in zip(pairs, values["ours"], values["hf"], strict=True)
        if pair not in apart
    ]
    middle = {who: statistics.median(each) for who, each in times.items()}
    found |= {
        "hf_batch": batch, "seconds": times, "ours_requests_per_s": len(pairs) / middle["ours"],
        "hf_requests_per_s": len(pairs) / middle["hf"], "ratio": middle["hf"] / middle["ours"],
        "compared": len(differences), "mean_difference": statistics.mean(differences),
        "largest_difference": max(differences),
    }  # fmt: skip
    say(json.dumps(found))
    return found


def best_batch(theirs: Any, requests: list[Any], device: torch.device) -> int:
    """hf's fastest batch size, on a part of the requests; it is left set."""
    seconds = {}
    for batch in BATCHES[device.type]:
        theirs.batch_size_per_gpu = batch
        few = requests[:: max(3, len(requests) // (2 * max(BATCHES[device.type])))]
        theirs.loglikelihood(few[:batch], disable_tqdm=True)
        seconds[batch] = timed(partial(theirs.loglikelihood, few, disable_tqdm=True), device)[0]
    theirs.batch_size_per_gpu = min(seconds, key=lambda batch: seconds[batch])
    say(f"hf, seconds by batch size: {seconds}")
    return int(theirs.batch_size_per_gpu)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    wait_for(device)
    began = time.perf_counter()
    found = work()
    wait_for(device)
    return time.perf_counter() - began, found


def random_pair(config: str, base: LoadedModel, folder: Path, device: torch.device, tokenizer: Path) -> LoadedModel:
    """A model with random weights and the tokenizer of `base`; exported to `folder` as well."""
    measured, _ = load_measured_config(config, [])
    model = random_model(measured.model, device)
    loaded = LoadedModel(config, 0, model, base.tokenizer)
    name = str(model.embedding.weight.dtype).removeprefix("torch.")
    own = base.tokenizer
    ids = {"bos_token_id": own.begin_id, "eos_token_id": own.end_id, "pad_token_id": None}
    write_hf_folder(folder, measured.model, loaded.weights(), name, ids)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return loaded


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="workspace of a quickstart")
    parser.add_argument("--run", default="quickstart")
    parser.add_argument("--config", help="the larger model (default: z2all-100m on a CPU, z2all-1b on a GPU)")
    parser.add_argument("--only", choices=("values", "speed"))
    parser.add_argument("--items", type=int, help="items of the larger model")
    given = parser.parse_args()
    device = pick_device("auto", "--device")
    name = "eval_harness" if device.type == "cpu" else "eval_harness_gpu"
    config, count = given.config or CONFIGS[device.type], given.items or ITEMS[device.type]
    found: dict[str, Any] = {}
    if find_spec("lm_eval") is None:
        say("lm-eval is not installed (pip install 'zero2all[lmeval]' transformers): only our own speed is measured.")
    with tempfile.TemporaryDirectory(prefix="z2a-harness-") as scratch:
        workspace, exported = open_workspace(given.work), Path(scratch) / "run"
        small = load_model(given.run, workspace, device="cpu", dtype="float32")
        export(given.work, given.run, exported)
        tasks = world_tasks()
        if find_spec("lm_eval") and given.only != "speed":
            found["values"] = compare_values(small, exported, tasks)
            save_result(name, found)
        if given.only != "values":
            found["speed"] = []
            if device.type == "cpu":
                questions = questions_of(tasks, Engine(small))[::2]
                found["speed"].append(compare_speed(given.run, small, exported, questions))
                save_result(name, found)
            (folder := Path(scratch) / "random").mkdir()
            large = random_pair(config, small, folder, device, exported)
            long = [with_passages(task, -(-count // len(tasks)), *PASSAGES[device.type]) for task in tasks]
            found["speed"].append(compare_speed(config, large, folder, questions_of(long, Engine(large))))
    save_result(name, found)


def export(work: Path, run: str, folder: Path) -> None:
    """The run as a Hugging Face folder."""
    from zero2all.cli import main as z2a

    code = z2a(["export", run, "--work", str(work), "--out", str(folder)])
    assert code == 0, f"z2a export ended with {code}"


if __name__ == "__main__":
    show_log()
    main()
