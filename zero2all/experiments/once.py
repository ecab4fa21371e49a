"""R17: the questions are read once, and asked again. A gain that as much other text does not bring shows that they
carry their answers (in the options), or were half known.

Two short runs begin with the weights of one checkpoint, at a small constant rate: one reads passage, question and
options of every item, without the answer; the other, the control, as many tokens of the text that the run was trained
on. The items are asked before, after, and after the control; gains are paired, item by item. The runs are those of a
study (`study`): a command that was killed goes on where it was. Steps are whole, so that up to the last step of rows
is read twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.engine import EngineConfig
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import crc32c_of, write_atomic
from zero2all.common.progress import say
from zero2all.common.workspace import Workspace
from zero2all.config import config_values
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.evals.items import CONTINUE, QUESTION, Task
from zero2all.evals.judge import JudgeOptions, judge, limited
from zero2all.evals.options import report_path, write_report
from zero2all.evals.rewrites.measure import COMPARED, mean_gap, unanswered
from zero2all.evals.tasks.list import TaskQuestions
from zero2all.experiments.study import open_study, run_tasks, task_of
from zero2all.finetune import prepare
from zero2all.infer.engine import Engine
from zero2all.infer.load import LoadedModel, load_run
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.shard_format import open_split
from zero2all.packed.writer import pack_corpus
from zero2all.train.checkpoints.manifest import Step
from zero2all.train.run_data import open_data

LR_SHARE = 0.1
"""Of the run's highest rate."""
READ, CONTROL = "once", "control"
Answers = Mapping[tuple[str, str], Mapping[str, bool]]


@dataclass(frozen=True)
class OnceOptions:
    """What a person may choose."""

    name: str
    """Of the study, and beginning of the names of its runs."""
    step: Step = None
    lr: float | None = None


def measure_once(
    run: str, workspace: Workspace, questions: TaskQuestions, options: OnceOptions
) -> tuple[dict[str, Any], Path]:
    """Train both runs, or what is left of them, and ask; the report, and where it was written."""
    tasks = [fitting for task in questions.read()[0] if (fitting := _fitting(task, questions.limit)).items]
    if not tasks:
        raise BadInputError(f"No item of {', '.join(questions.names)} has options and a question, as R17 needs.")
    loaded = prepare.base_model(run, workspace, f"{options.name}-{READ}", options.step)
    assert loaded.config is not None
    assert loaded.folder is not None
    if loaded.config.finetune.has_objective:
        raise UsageError(f"{run} was trained with {loaded.config.finetune.method}. Ask the run that it began with.")
    lr = options.lr or float(f"{LR_SHARE * loaded.config.optim.lr_max:.4g}")
    texts = b"".join(jsonio.dumps_line({"text": unanswered(item)}) for task in tasks for item in task.items)
    folder = workspace.root / "studies" / options.name
    write_atomic(text := folder / "questions.jsonl", texts)
    plan = {"run": run, "step": loaded.step, "lr": lr, "questions": crc32c_of(text)}
    with open_study(workspace, options.name, plan) as study:
        rows = _pack(text, folder, workspace, loaded.config.data.seq_len)
        runs = [_begin(kind, loaded, workspace, options.name, lr, rows, folder / "packed") for kind in (READ, CONTROL)]
        steps = runs[0].config.train.steps
        run_tasks(study, [task_of(each.config, steps, 1.0) for each in runs], lambda *_: [], 1)
        results = [study.results[each.config.train.name] for each in runs]
    for result in results:
        if "failed" in result:
            raise UsageError(f"{result['task']} was not trained to its end: {result['failed']}. Lower --lr.")
    judging = JudgeOptions(questions.forms or COMPARED, questions.shots)
    models = [load_run(workspace, run, loaded.step), *(load_run(workspace, each.config.train.name) for each in runs)]
    answers = [_answers(model, tasks, judging) for model in models]
    report: dict[str, Any] = {"run": run, "step": loaded.step, "tokens": loaded.tokens}
    report["settings"] = {**plan, "forms": judging.forms, "shots": judging.shots}
    report |= {"trained_tokens": results[0]["trained_tokens"], "steps": steps, "results": list(_rows(*answers))}
    path = report_path(loaded.folder, loaded.step, "once-")
    write_report(path, report, say)
    return report, path


def _fitting(task: Task, limit: int | None) -> Task:
    items = [item for item in task.items if item.choices and item.shape in (QUESTION, CONTINUE)]
    return replace(task, items=tuple(limited(task.name, items, limit, 0)))


def _pack(text: Path, folder: Path, workspace: Workspace, seq_len: int) -> int:
    """Pack the questions as they are; how many rows they fill."""
    options = BuildOptions(valid_share=0.0, rules="none", dedup=DedupConfig(exact=False, near="off"))
    build_corpus(folder / "corpus", [Source(READ, text, READ)], options, EngineConfig(workers=1))
    pack_corpus(folder / "corpus", workspace.tokenizer, folder / "packed", engine=EngineConfig(workers=1))
    rows: int = build_best_fit(open_split(folder / "packed", READ, "train"), seq_len)["rows"]
    return rows


def _begin(
    kind: str, loaded: LoadedModel, workspace: Workspace, name: str, lr: float, rows: int, packed: Path
) -> prepare.PreparedRun:
    """The run that reads the questions, or the control with the data of the run, from the same weights."""
    assert loaded.config is not None
    data = loaded.config.data
    changes: dict[str, dict[str, Any]] = {
        **prepare.run_length(f"{name}-{kind}", loaded.config, rows, data.seq_len),
        "optim": {"lr_max": lr, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "data": prepare.packed_data(packed.resolve(), {READ: 1.0}, data.seq_len)
        if kind == READ
        else {"max_epochs": None},
    }
    changes["validation"]["every_steps"] = 0
    config = prepare.changed_config(config_values(loaded.config), changes, [])
    open_data(config, workspace, None)  # or an error: the text of the run is not there
    return prepare.begin_run(loaded, config, workspace, {"inputs": str(rows)})


def _answers(loaded: LoadedModel, tasks: Sequence[Task], options: JudgeOptions) -> Answers:
    """By task and form, whether each item was answered right."""
    return {
        (found.task, found.form): {each.id: each.correct for each in found.per_item if each.correct is not None}
        for found in judge(Engine(loaded), tasks, options)
    }


def _rows(before: Answers, after: Answers, control: Answers) -> list[dict[str, Any]]:
    """A row for each task and form: accuracies, the gain, and how much larger it is than that of the control."""
    rows = []
    for (task, form), asked in before.items():
        three = [[float(each[task, form][item]) for item in asked] for each in (before, after, control)]
        row = {"task": task, "form": form, "items": len(asked)}
        if not asked:
            continue
        row |= {name: sum(each) / len(each) for name, each in zip(("before", "after", "control"), three, strict=True)}
        for name, base in (("gain", three[0]), ("over_control", three[2])):
            found = mean_gap([one - other for one, other in zip(three[1], base, strict=True)])
            row |= dict(zip((name, f"{name}_interval", f"{name}_p"), found, strict=True))
        rows.append(row)
    return rows
