"""`z2a eval RUN` and the verbs of the same word."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import TYPES, group, share, verb, workspace_of, write_json_result
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, say, tell

if TYPE_CHECKING:
    from zero2all.common.engine import EngineConfig
    from zero2all.common.workspace import Workspace
    from zero2all.evals.items import Task
    from zero2all.evals.options import EvalOptions
    from zero2all.evals.tasks.list import TaskQuestions
    from zero2all.evals.watch import Watcher
    from zero2all.infer.load import LoadedModel

share(
    """
    --probes FILE                  questions to ask: a YAML file or JSON lines (default: raw/probes.jsonl of the
        workspace if it exists, else the built-in ones; none: skip them)
    --pairs FILE                   contrast pairs to compare: a YAML file or JSON lines (default: raw/pairs.jsonl of the
        workspace if it exists, else the built-in ones; none: skip them)
    --text* PATH:text_path         also score this text file or folder of text files; neutral: our own ones, by domain;
        may be repeated
    --stride N:int>=0 =0           score long texts in windows that start N tokens apart, so that every token has
        context (default 0: no overlap)
    --max-bytes N:int>=1 =1000000  held-out bytes to score per source, and bytes of each --text file (default 1000000)
    --held-out all|none =all       none: do not score the held-out text and the rows that training scores (default all)
    --weights* int8|int4           also score the held-out text with 8-bit or 4-bit weights, to see what they cost; may
        be repeated
    --tasks NAMES:names            benchmarks to run: cmmlu,piqa,my-questions, each a folder of --data; all: every
        folder there; quickstart-facts needs no files (default: none)
    --suite NAMES:names            one score to compare models by: core-en,core-zh, each of fixed tasks, forms and
        items; chat-en,chat-zh: what a tuned model answers, without files
    --data
    --forms FORMS:names            question forms: cloze,choice,bits,generate,think (default: all that fit but think);
        best: the one that does best on the split of the examples
    --shots N:int>=0               examples in each prompt (default: 5, or the benchmark's usual number)
    --limit N:int>=1               items per benchmark, the same ones every time (default: all)
    --samples N:int>=1 =1          answers drawn for each item of the forms that write (generate, think); the one given
        most often counts (default 1: the likeliest)
    --think-tokens N:int>=1 =320   tokens to think in (default 320)
    --chat                         ask for written answers in a conversation, for a model that was taught them
    --rewrites NAMES:names =()     also ask rewritten items, and compare: R1,R2,R13+R2, … or all (docs/benchmarks.md
        lists them)
    --run-code                     run the programs that the model writes for HumanEval, in a sandbox (default: they are
        not run)
    """,
    "QUESTIONS",
)
group(
    """
    eval: evaluate a run: bits per byte, probes, contrast pairs, benchmarks (`z2a eval RUN` is `z2a eval run RUN`)

    z2a eval my-run --work my-workspace
    """,
    {"fetch": "z2a eval download", "export-tasks": "z2a eval RUN --tasks NAMES"},
)


def _steps(text: str) -> Callable[[int], bool]:
    """A type for add_argument: `500,1000-2000` -> whether a step is one of them."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected steps such as 500,1000-2000")
        ranges.append(range(int(first), int(last or first) + 1))
    return lambda step: any(step in each for each in ranges)


def _path(text: str) -> Path:
    """A type for add_argument: a path; an empty one, as of an unset shell variable, is no folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("got an empty path, expected a text file or a folder of text files")
    return Path(text)


TYPES.update({"steps": _steps, "text_path": _path})


def _tasks(arguments: argparse.Namespace) -> TaskQuestions:
    from zero2all.evals.tasks.list import TaskQuestions

    same = ("data", "forms", "shots", "limit", "run_code", "samples", "think_tokens", "chat", "rewrites")
    given = {name: getattr(arguments, name) for name in same if name in arguments}
    files, made = _files_and_made(arguments.tasks)
    return TaskQuestions(files, **given, made=made)


def _file(given: str | None, workspace: Workspace, name: str) -> Path | None:
    """The file of probes or pairs: the one that is named, or what the workspace brings with it, or our own."""
    from zero2all.evals.options import default_file

    if given is None:
        return default_file(workspace, name)
    return None if given == "none" else Path(given)


def _checked_options(
    arguments: argparse.Namespace, workspace: Workspace, step: int | None, is_coming: bool = False
) -> EvalOptions:
    """What the command line asks for. Refuses what cannot be asked, before torch and the weights are loaded."""
    from zero2all.evals.options import OWN_TEXTS, EvalOptions, check_inputs
    from zero2all.evals.suites import SuiteQuestions

    options = EvalOptions(
        max_bytes=arguments.max_bytes,
        stride=arguments.stride,
        probes=_file(arguments.probes, workspace, "probes"),
        pairs=_file(arguments.pairs, workspace, "pairs"),
        texts=tuple(OWN_TEXTS if str(each) == "neutral" else each for each in arguments.text),
        held_out=arguments.held_out == "all",
        weights=tuple(dict.fromkeys(arguments.weights)),
        tasks=None if arguments.tasks is None else _tasks(arguments),
        suites=None if arguments.suite is None else SuiteQuestions(arguments.suite, arguments.data),
    )
    check_inputs(workspace, arguments.run, step, options, is_coming)
    if arguments.rewrites:
        from zero2all.evals.rewrites.list import chosen_rewrites

        chosen_rewrites(arguments.rewrites)
        if arguments.tasks is None:
            raise UsageError("--rewrites needs benchmarks. Name them with --tasks.")
    return options


@verb("""
    eval run: evaluate one checkpoint or all: bits per byte on held-out and other text, probes, contrast pairs,
    benchmarks

    run? --work
    | --step N|best:step           checkpoint to use: its step, or best: the one with the lowest held-out loss (default:
        the newest)
    | --all-steps                  evaluate every checkpoint that was not yet evaluated with these settings
    --parallel.tensor/tensor --parallel.pipeline/pipeline
    QUESTIONS

    z2a eval run my-run --work my-workspace --all-steps
    """)
def _run(arguments: argparse.Namespace) -> int | None:
    workspace = workspace_of(arguments)
    options = _checked_options(arguments, workspace, arguments.step)
    if arguments.all_steps:
        if arguments.tensor * arguments.pipeline > 1:
            raise UsageError("--all-steps judges on one device. Leave --parallel.tensor and --parallel.pipeline out.")
        _run_all(arguments, workspace, options)
        return None

    from zero2all.cli.generate import over_ranks
    from zero2all.infer.load import load_model, load_run

    def load(world: Any) -> LoadedModel:
        if world is None:
            return load_run(workspace, arguments.run, arguments.step)
        return load_model(arguments.run, workspace, arguments.step, world.device, "float32", world)

    return over_ranks(arguments, load, lambda world: _judge(arguments, workspace, load(world), options))


def _judge(arguments: argparse.Namespace, workspace: Workspace, loaded: LoadedModel, options: EvalOptions) -> None:
    from zero2all.evals.report import evaluate_run, report_lines

    report = evaluate_run(loaded, workspace, options)
    print("\n".join([*report_lines(report), *_overview(workspace.run(arguments.run))]))
    _name_unread(options)


def _name_unread(options: EvalOptions) -> None:
    """End with an error that names the benchmarks whose files could not be used; the others have been asked."""
    asked = (options.tasks, options.suites)
    unread = {name: why for each in asked if each is not None for name, why in each.read()[1].items()}
    if unread:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in unread.items())
        raise BadInputError(f"Not asked, because their files cannot be used: {', '.join(unread)}.\n{reasons}")


def _overview(run: Path) -> list[str]:
    """Write the verdicts on the curves of a run beside its reports; returns them as lines."""
    from zero2all.evals.signal import signal_lines, write_signals

    return signal_lines(write_signals(run))


def _run_all(arguments: argparse.Namespace, workspace: Workspace, options: EvalOptions) -> None:
    from zero2all.evals.options import kept_report
    from zero2all.evals.report import step_lines
    from zero2all.train.checkpoints.layout import list_checkpoints, step_of

    run = workspace.run(arguments.run)
    _watcher(arguments.run, workspace, options, None).watch(once=True)
    reports = [kept_report(run, step_of(folder), options) for folder in reversed(list_checkpoints(run))]
    print("\n".join([*step_lines([report for report in reports if report is not None]), *_overview(run)]))
    _name_unread(options)


def _watcher(name: str, workspace: Workspace, options: EvalOptions, device: str | None) -> Watcher:
    from zero2all.evals.options import kept_report
    from zero2all.evals.report import judge_checkpoint
    from zero2all.evals.signal import write_signals
    from zero2all.evals.watch import Watcher
    from zero2all.infer.load import load_model
    from zero2all.train.saved_config import load_run_config

    run = workspace.run(name)
    place = load_run_config(run).parallel.device if device is None else device

    def evaluate(step: int) -> dict[str, Any]:
        """Of a checkpoint only the weights are read, in float32, as training keeps them."""
        return judge_checkpoint(load_model(name, workspace, step, place, "float32"), workspace, options)

    watcher = Watcher(run, evaluate, say=say)
    watcher.is_done = lambda step: kept_report(run, step, options) is not None
    watcher.on_report = lambda _: write_signals(run)
    return watcher


@verb("""
    eval watch: evaluate the checkpoints of a run as training saves them; several watchers share the work

    run? --work
    --steps N,A-B,…:steps            only checkpoints of these steps (default: all of them)
    --once                           stop when every checkpoint is evaluated, even if training continues
    --niceness N:int>=0..19 =10      niceness of this process, 0 to 19: higher leaves more of a shared core to training
        (default 10)
    --device DEVICE                  auto, cpu, cuda or cuda:1 (default: the device that the run trains on)
    --poll-seconds N:float>=0.01 =5  how often to look for a new checkpoint (default 5)
    QUESTIONS

    z2a eval watch my-run --work my-workspace --steps 1000-9000,20000 --niceness 15
    """)
def _watch(arguments: argparse.Namespace) -> None:
    import os

    workspace = workspace_of(arguments)
    options = _checked_options(arguments, workspace, None, is_coming=True)
    os.nice(arguments.niceness)

    from zero2all.evals.signal import read_reports

    watcher = _watcher(arguments.run, workspace, options, arguments.device)
    watcher.poll_seconds = arguments.poll_seconds
    if arguments.steps is not None:
        watcher.is_wanted = arguments.steps
    watcher.watch(arguments.once)
    evaluated = counted(len(watcher.evaluated), "checkpoint")
    tell(f"{arguments.run}: {evaluated} evaluated, {len(watcher.left_out)} left out")
    if read_reports(watcher.run):
        print("\n".join(_overview(watcher.run)))
    _name_unread(options)


@verb("""
    eval download: download public benchmarks from a Hugging Face-style hub

    names+ NAME  cmmlu, ceval, mmlu, arc_easy, hellaswag, piqa, …
    --data --endpoint

    z2a eval download cmmlu piqa --data eval-data --endpoint https://mirror.example
    """)
def _download(arguments: argparse.Namespace) -> None:
    from zero2all.evals.download import SOURCES, download_benchmark

    for name in arguments.names:
        task = download_benchmark(name, arguments.data, arguments.endpoint, say)
        licence = SOURCES[name].licence or t("see its README.md")
        tell(f"{name}: {len(task.items):,} items, {len(task.shots):,} examples; licence: {licence}")
    fetched = ",".join(arguments.names)
    tell(f"next: z2a eval RUN --tasks {fetched} --data {arguments.data} --work my-workspace")


@verb("""
    eval contamination: search the training text for benchmark items, to report accuracy on clean and contaminated
    items

    tasks NAME,…:names  names of benchmarks, or files with questions (JSON lines, CSV, parquet, txt)
    --data --work
    --workers N:int>=1  processes (default: one per core)

    z2a eval contamination cmmlu,arc_easy --data eval-data --work my-workspace
    """)
def _contamination(arguments: argparse.Namespace) -> None:
    from zero2all.common.engine import EngineConfig

    workspace = workspace_of(arguments)
    tasks = named_tasks(arguments.tasks, arguments.data)
    look_for(workspace, tasks, EngineConfig(workers=arguments.workers))


@verb("""
    eval diff: compare two models or checkpoints item by item, each difference with a paired 95 % interval

    one RUN[@STEP]      a run, its report of a step, or a report's file (step-….json)
    other RUN[@STEP]    what to compare with it
    --work

    z2a eval diff my-run@1000 my-run --work my-workspace
    """)
def _diff(arguments: argparse.Namespace) -> None:
    from zero2all.evals.diff import changed_data, compare, diff_lines, report_of

    workspace = workspace_of(arguments)
    (one, first), (other, second) = (report_of(workspace, name) for name in (arguments.one, arguments.other))
    print("\n".join(diff_lines(one, other, compare(first, second))))
    if changed := sorted(changed_data(first, second)):
        tell(f"left out, because the two were asked from other files: {', '.join(changed)}")


@verb("""
    eval once: let a model read questions once, without answers, and ask before and after (R17): what does it gain?

    run? --work
    --tasks! NAMES:names       benchmarks whose questions have options: cmmlu,my-questions, each a folder of --data
    --data --step
    --forms FORMS:names        question forms (default: cloze,choice)
    --shots N:int>=0           examples in each prompt (default: 5, or the benchmark's usual number)
    --limit N:int>=1           items per benchmark, the same ones every time (default: all)
    --lr X:float>0             the constant learning rate (default: a tenth of the run's highest)
    --name NAME                name of the study and beginning of the names of its two runs (default: RUN-read)

    z2a eval once my-run --work my-workspace --tasks cmmlu --data eval-data --limit 500
    """)
def _once(arguments: argparse.Namespace) -> None:
    from zero2all.cli.terminal import print_table
    from zero2all.experiments.once import measure_once

    name, workspace = arguments.name or f"{arguments.run}-read", workspace_of(arguments)
    report = measure_once(arguments.run, workspace, _tasks(arguments), name, arguments.step, arguments.lr)
    rows = [["task", "form", "items", "before", "after", "control", "gain", "95 %", "over control", "95 %"]]
    for each in report["results"]:
        shares = [f"{each[kind]:.1%}" for kind in ("before", "after", "control")]
        gains = [(each[kind], *each[f"{kind}_interval"]) for kind in ("gain", "over_control")]
        words = [word for gain, low, high in gains for word in (f"{gain:+.1%}", f"{low:+.1%} … {high:+.1%}")]
        rows.append([each["task"], each["form"], f"{each['items']:,}", *shares, *words])
    print_table(rows)
    tell(f"{report['trained_tokens']:,} tokens read in {counted(report['steps'], 'step')}; written to {report['path']}")


@verb("""
    eval completions: judge HumanEval answers that are given in a file: pass@1 and pass@k

    file FILE.jsonl:path  JSON lines, one for each sample, with task_id and completion
    --data
    --run-code            run them, in a sandbox; without it only the file is checked
    --json FILE:out       also write the result as JSON, with the outcome of each sample; - prints only that

    z2a eval completions samples.jsonl --data eval-data --run-code
    """)
def _completions(arguments: argparse.Namespace) -> None:
    from zero2all.evals.completions import judge_completions, read_completions
    from zero2all.evals.report import NOT_ISOLATED, is_isolated
    from zero2all.evals.tasks.list import read_tasks

    (task,) = read_tasks(arguments.data, ["humaneval"])
    found = read_completions(arguments.file, task)
    if not arguments.run_code:
        tell(f"{sum(map(len, found.values())):,} completions can be run, and were not: add --run-code.")
        return
    report = judge_completions(found, task)
    if not write_json_result(arguments.json, report):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in report.items() if name.startswith("pass@"))
        tell(f"{shares}: {report['completions']:,} completions of {report['tasks']:,} of {report['of']:,} tasks")
        if report["tasks"] < report["of"]:
            tell("PARTIAL: not to be compared with the whole benchmark")
        if not is_isolated(report["protection"]):
            tell(NOT_ISOLATED)


@verb("""
    eval harness: run tasks of lm-eval on one checkpoint, offline (pip install 'zero2all[lmeval]')

    run? --work
    --tasks! NAMES:names  names of tasks, separated by commas
    --include DIR:path    folder with tasks that lm-eval does not have
    --step
    --shots N:int>=0      examples in a prompt (default: as the task says)
    --limit N:int>=1      only the first N items of each task

    z2a eval harness my-run --work my-workspace --tasks arc_easy,hellaswag --limit 500
    """)
def _harness(arguments: argparse.Namespace) -> None:
    from zero2all.evals.lm_harness import harness_lines, require_lm_eval, run_harness

    require_lm_eval()
    workspace = workspace_of(arguments)

    from zero2all.evals.options import report_path, write_report
    from zero2all.infer.engine import Engine
    from zero2all.infer.load import load_model

    loaded = load_model(arguments.run, workspace, arguments.step)
    found = run_harness(Engine(loaded), arguments.tasks, arguments.include, arguments.shots, arguments.limit)
    settings = {name: getattr(arguments, name) for name in ("tasks", "shots", "limit")}
    settings["include"] = None if arguments.include is None else str(arguments.include)
    report = {"run": loaded.name, "step": loaded.step, "tokens": loaded.tokens, "settings": settings, **found}
    print("\n".join(harness_lines(report)))
    if loaded.config is not None and loaded.folder is not None:
        path = report_path(loaded.folder, loaded.step, "harness-")
        write_report(path, report, say)
        tell(f"written to {path}")


def names(text: str) -> tuple[str, ...]:
    """A type for add_argument: `a,b` -> the names, each once."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected names such as cmmlu,piqa")
    return found


TYPES["names"] = names


def _files_and_made(wanted: Sequence[str]) -> tuple[tuple[str, ...], tuple[Task, ...]]:
    """The names of tasks that are read from files; and those that need none: the quiz of the quickstart's world."""
    from zero2all.quickstart.world.questions import QUIZ_NAME, quiz_tasks

    if QUIZ_NAME not in wanted:
        return tuple(wanted), ()
    from zero2all.quickstart.pipeline import WORLD_SEED

    return tuple(name for name in wanted if name != QUIZ_NAME), tuple(quiz_tasks(WORLD_SEED))


def named_tasks(wanted: Sequence[str], data: Path) -> list[Task]:
    """The tasks of these names; of a path, the items of that file or folder."""
    from zero2all.evals.tasks.list import read_searched, read_tasks

    paths = [name for name in wanted if ("/" in name or Path(name).is_file()) and Path(name).exists()]
    files, made = _files_and_made([name for name in wanted if name not in paths])
    return [*(read_tasks(data, files) if files else ()), *map(read_searched, map(Path, paths)), *made]


def look_for(workspace: Workspace, tasks: Sequence[Task], engine: EngineConfig) -> None:
    """Look for the items of tasks in the training text, and print what was found."""
    from zero2all.evals.contamination import REPORT_NAME, contamination_lines, find_contamination

    report = find_contamination(workspace, tasks, engine)
    print("\n".join(contamination_lines(report)))
    speed = report["bytes"] / 1e6 / max(report["seconds"], 1e-3)
    tell(f"{report['bytes'] / 1e6:,.1f} MB of corpus at {speed:,.1f} MB/s; {workspace.root / REPORT_NAME}")
