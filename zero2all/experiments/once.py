"""R17: the questions are read once, and asked again. A gain that as much other text does not bring shows that they
carry their answers (in the options), or were half known.

Two short runs of a study begin with the weights of one checkpoint, at a small constant rate: one reads passage,
question and options of every item, without the answer; the other, the control, as many tokens of the text that the run
was trained on. Gains are paired, item by item. Steps are whole, so up to one step of rows is read twice.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.engine import EngineConfig
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import crc32c_of, write_atomic
from zero2all.common.progress import say
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, config_values
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.evals.items import CONTINUE, LABELS, QUESTION, Item, Task
from zero2all.evals.judge import JudgeOptions, judge, limited
from zero2all.evals.options import report_path, write_report
from zero2all.evals.rewrites.measure import COMPARED, mean_gap
from zero2all.evals.rewrites.options import listed
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

LR_SHARE = 0.1  # of the run's highest rate
READ = "once"


def measure_once(
    base: str, workspace: Workspace, questions: TaskQuestions, name: str, step: Step, lr: float | None
) -> dict[str, Any]:
    """Train both runs (`name`: of the study), or what is left of them, and ask; the report is written, too."""
    tasks: list[Task] = []
    for task in questions.read()[0]:
        fitting = [item for item in task.items if item.choices and item.shape in (QUESTION, CONTINUE)]
        if lacking := len(task.items) - len(fitting):
            say(f"left out: {lacking:,} items of {task.name} that are no question with options")
        tasks += [replace(task, items=tuple(limited(task.name, fitting, questions.limit, 0)))] if fitting else []
    if not tasks:
        raise BadInputError("There is nothing to read: none of these items is a question with options.")
    loaded = prepare.base_model(base, workspace, f"{name}-{READ}", step)
    assert loaded.config is not None, "it is a run"
    if loaded.config.finetune.has_objective:
        raise UsageError(f"{base} was trained with {loaded.config.finetune.method}. Ask the run that it began with.")
    lr = lr or float(f"{LR_SHARE * loaded.config.optim.lr_max:.4g}")
    folder = workspace.root / "studies" / name
    texts = [jsonio.dumps_line({"text": unanswered(item)}) for task in tasks for item in task.items]
    write_atomic(folder / "questions.jsonl", b"".join(texts))
    plan = {"run": base, "step": loaded.step, "lr": lr, "questions": crc32c_of(folder / "questions.jsonl")}
    with open_study(workspace, name, plan) as study:
        rows = _pack(folder, workspace.tokenizer, loaded.config.data.seq_len)
        planned = [_config(f"{name}-{kind}", loaded, workspace, lr, rows, folder) for kind in (READ, "control")]
        configs = [prepare.begin_run(loaded, each, workspace, {"inputs": str(rows)}).config for each in planned]
        run_tasks(study, [task_of(each, each.train.steps, 1.0) for each in configs], lambda *_: [], 1)
        results = [study.results[each.train.name] for each in configs]
    if failed := [each for each in results if "failed" in each]:
        raise UsageError(f"{failed[0]['task']} was not trained to its end: {failed[0]['failed']}. Lower --lr.")
    judging, kinds = JudgeOptions(questions.forms or COMPARED, questions.shots), ("before", "after", "control")
    models = [(loaded.name, loaded.step), *((each.train.name, None) for each in configs)]
    found = [judge(Engine(load_run(workspace, *model)), tasks, judging) for model in models]
    report: dict[str, Any] = {"run": loaded.name, "step": loaded.step, "tokens": loaded.tokens, "results": []}
    report["settings"] = {**plan, "forms": judging.forms, "shots": judging.shots}
    report |= {"trained_tokens": results[0]["trained_tokens"], "steps": results[0]["step"]}
    for three in zip(*found, strict=True):  # one task in one form
        right = [[float(each.correct) for each in one.per_item if each.correct is not None] for one in three]
        if right[0]:
            row = {"task": three[0].task, "form": three[0].form, "items": len(right[0])}
            row |= {kind: sum(each) / len(each) for kind, each in zip(kinds, right, strict=True)}
            for gain, other in (("gain", right[0]), ("over_control", right[2])):
                gaps = mean_gap([after - before for after, before in zip(right[1], other, strict=True)])
                row |= dict(zip((gain, f"{gain}_interval", f"{gain}_p"), gaps, strict=True))
            report["results"].append(row)
    write_report(path := report_path(workspace.run(loaded.name), loaded.step, "once-"), report, say)
    return {**report, "path": path}


def unanswered(item: Item) -> str:
    """Passage, question and options, and nothing that tells which is right."""
    return f"{item.context}\n{listed(item, LABELS)}".lstrip("\n")


def _pack(folder: Path, tokenizer: Path, seq_len: int) -> int:
    """Pack the questions as they are; how many rows they fill."""
    options = BuildOptions(valid_share=0.0, rules="none", dedup=DedupConfig(exact=False, near="off"))
    source, here = Source(READ, folder / "questions.jsonl", READ), EngineConfig(workers=1)
    build_corpus(folder / "corpus", [source], options, here)
    pack_corpus(folder / "corpus", tokenizer, folder / "packed", engine=here)
    return int(build_best_fit(open_split(folder / "packed", READ, "train"), seq_len)["rows"])


def _config(name: str, loaded: LoadedModel, workspace: Workspace, lr: float, rows: int, folder: Path) -> RunConfig:
    """The config of the run that reads the questions, or of the control, which has the data of the base."""
    assert loaded.config is not None, "it is a run"
    changes = prepare.run_length(name, loaded.config, rows, loaded.config.data.seq_len)
    changes["optim"] = {"lr_max": lr, "weight_decay": 0.0}
    changes["schedule"] = {"kind": "constant", "warmup_steps": 0}
    changes["validation"] = {"every_steps": 0}
    changes["data"] = {"max_epochs": None}
    if name.endswith(READ):
        changes["data"] = prepare.packed_data((folder / "packed").resolve(), {READ: 1.0}, loaded.config.data.seq_len)
    config = prepare.changed_config(config_values(loaded.config), changes, [])
    open_data(config, workspace, None)  # or an error: the text of the run is not there
    return config
