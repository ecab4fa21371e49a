"""`z2a eval RUN` and the verbs of the same word: `z2a eval run / watch / download / contamination`.

`z2a eval harness`: the standard harness (lm-eval) on a run; `z2a eval export-tasks`: our sets as its tasks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.benchmarks import add_data, files_of, look_for, made_tasks, named_tasks, names
from zero2all.cli.runs import STEP, add_run_name, step_or_best
from zero2all.cli.verb import Subparsers, add_flags, add_group, add_verb, add_work, real, whole, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.evals.options import EvalOptions
    from zero2all.evals.tasks.list import TaskQuestions
    from zero2all.evals.watch import Watcher


WORD = "eval"
VERBS = ("run", "watch", "download", "contamination", "harness", "export-tasks")
"""The second words of `z2a eval`; any other one is the name of a run."""


def with_verb(words: list[str]) -> list[str]:
    """`eval` and `eval NAME …` as `eval run …`, and `chaos PLAN …` as `chaos run PLAN …`; other command lines, and
    `eval --help`, as they are."""
    known = {WORD: VERBS, "chaos": ("run", "soak")}.get("".join(words[:1]))
    if words[:2] == [WORD, "fetch"]:
        raise UsageError("`z2a eval fetch` is `z2a eval download` now.")
    if known is None or (words[1:2] and words[1] in (*known, "-h", "--help")):
        return words
    return [words[0], "run", *words[1:]]


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    inner = add_group(
        verbs,
        WORD,
        "evaluate a run: bits per byte, probes, contrast pairs, benchmarks (`z2a eval RUN` is `z2a eval run RUN`)",
        "z2a eval my-run --work my-workspace",
    )
    _register_run(inner)
    _register_watch(inner)
    _register_download(inner)
    _register_contamination(inner)
    _register_harness(inner)


def _register_run(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "run",
        "evaluate one checkpoint or all: bits per byte on held-out and other text, probes, contrast pairs, benchmarks",
        "z2a eval run my-run --work my-workspace --all-steps",
        _run,
    )
    add_run_name(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=step_or_best, metavar="N|best", help=STEP[-1])
    which.add_argument(
        "--all-steps",
        action="store_true",
        help="evaluate every checkpoint that was not yet evaluated with these settings",
    )
    _add_questions(parser)


def _register_watch(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "watch",
        "evaluate the checkpoints of a run as training saves them; several watchers share the work",
        "z2a eval watch my-run --work my-workspace --steps 1000-9000,20000 --niceness 15",
        _watch,
    )
    add_run_name(parser)
    niceness = "niceness of this process, 0 to 19: higher leaves more of a shared core to training (default 10)"
    add_flags(
        parser,
        ("--steps N,A-B,…", _steps, None, "only checkpoints of these steps (default: all of them)"),
        ("--once", bool, False, "stop when every checkpoint is evaluated, even if training continues"),
        ("--niceness N", whole(0, 19), 10, niceness),
        ("--device DEVICE", str, None, "auto, cpu, cuda or cuda:1 (default: the device that the run trains on)"),
        ("--poll-seconds N", real(0.01), 5.0, "how often to look for a new checkpoint (default 5)"),
    )
    _add_questions(parser)


def _register_contamination(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "contamination",
        "search the training text for benchmark items, to report accuracy on clean and contaminated items",
        "z2a eval contamination cmmlu,arc_easy --data eval-data --work my-workspace",
        _contamination,
    )
    parser.add_argument("tasks", type=names, metavar="NAME,…", help="names of benchmarks")
    add_data(parser)
    add_work(parser)
    parser.add_argument("--workers", type=whole(1), metavar="N", help="processes (default: one per core)")


def _contamination(arguments: argparse.Namespace) -> None:
    from zero2all.common.engine import EngineConfig

    workspace = workspace_of(arguments)
    tasks = named_tasks(arguments.tasks, arguments.data)
    look_for(workspace, tasks, EngineConfig(workers=arguments.workers))


def _register_download(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "download",
        "download public benchmarks from a Hugging Face-style hub",
        "z2a eval download cmmlu piqa --data eval-data --endpoint https://mirror.example",
        _download,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="cmmlu, ceval, mmlu, arc_easy, hellaswag, piqa, …")
    add_data(parser)
    parser.add_argument("--endpoint", metavar="URL", help="hub or mirror (default: HF_ENDPOINT, or the hub)")


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


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """What is asked of a checkpoint: the same flags for every verb that judges one."""
    for name, of in (("probes", "questions to ask"), ("pairs", "contrast pairs to compare")):
        parser.add_argument(
            f"--{name}",
            metavar="FILE",
            help=f"{of}: a YAML file or JSON lines (default: raw/{name}.jsonl of the workspace if it "
            "exists, else the built-in ones; none: skip them)",
        )
    max_bytes = "held-out bytes to score per source, and bytes of each --text file (default 1000000)"
    held_out = "none: do not score the held-out text and the rows that training scores (default all)"
    stride = (
        "score long texts in windows that start N tokens apart, so that every token has context (default 0: no overlap)"
    )
    add_flags(
        parser,
        ("--text PATH", [_path], [], "also score this text file or folder of text files; may be repeated"),
        ("--stride N", whole(0), 0, stride),
        ("--max-bytes N", whole(1), 1_000_000, max_bytes),
        ("--held-out", ("all", "none"), "all", held_out),
        ("--int8", bool, False, "also score the held-out text with 8-bit weights, to see what they cost"),
    )
    about = (
        "benchmarks to run: cmmlu,piqa,my-questions, each a folder of --data; all: every folder there; "
        "quickstart-facts needs no files (default: none)"
    )
    parser.add_argument("--tasks", type=names, metavar="NAMES", help=about)
    add_data(parser)
    about = "question forms: cloze,choice,bits,generate (default: all that fit)"
    parser.add_argument("--forms", type=names, metavar="FORMS", help=about)
    about = "examples in each prompt (default: 5, or the benchmark's usual number)"
    parser.add_argument("--shots", type=whole(0), metavar="N", help=about)
    about = "items per benchmark, the same ones every time (default: all)"
    parser.add_argument("--limit", type=whole(1), metavar="N", help=about)
    about = "also ask rewritten items, and compare: R1,R2,R13+R2, … or all (docs/benchmarks.md lists them)"
    parser.add_argument("--rewrites", type=names, default=(), metavar="NAMES", help=about)
    about = "run the programs that the model writes for HumanEval, in a sandbox (default: they are not run)"
    parser.add_argument("--run-code", action="store_true", help=about)


def _tasks(arguments: argparse.Namespace) -> TaskQuestions | None:
    from zero2all.evals.tasks.list import TaskQuestions

    if arguments.tasks is None:
        return None
    same = ("data", "forms", "shots", "limit", "run_code", "rewrites")
    given = {name: getattr(arguments, name) for name in same}
    return TaskQuestions(files_of(arguments.tasks), **given, made=made_tasks(arguments.tasks))


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
    from zero2all.evals.options import EvalOptions, check_inputs

    options = EvalOptions(
        max_bytes=arguments.max_bytes,
        stride=arguments.stride,
        probes=_file(arguments.probes, workspace, "probes"),
        pairs=_file(arguments.pairs, workspace, "pairs"),
        texts=tuple(arguments.text),
        held_out=arguments.held_out == "all",
        int8=arguments.int8,
        tasks=_tasks(arguments),
    )
    check_inputs(workspace, arguments.run, step, options, is_coming)
    if arguments.rewrites:
        from zero2all.evals.rewrites.list import chosen_rewrites

        chosen_rewrites(arguments.rewrites)
        if arguments.tasks is None:
            raise UsageError("--rewrites needs benchmarks. Name them with --tasks.")
    return options


def _run(arguments: argparse.Namespace) -> None:
    workspace = workspace_of(arguments)
    options = _checked_options(arguments, workspace, arguments.step)
    if arguments.all_steps:
        _run_all(arguments, workspace, options)
        return

    from zero2all.evals.report import evaluate_run, report_lines
    from zero2all.infer.load import load_run

    loaded = load_run(workspace, arguments.run, arguments.step)
    report = evaluate_run(loaded, workspace, options)
    print("\n".join([*report_lines(report), *_overview(workspace.run(arguments.run))]))
    _name_unread(options)


def _name_unread(options: EvalOptions) -> None:
    """End with an error that names the benchmarks whose files could not be used; the others have been asked."""
    unread = options.tasks.read()[1] if options.tasks is not None else {}
    if unread:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in unread.items())
        raise BadInputError(f"Not asked, because their files cannot be used: {', '.join(unread)}.\n{reasons}")


def _overview(run: Path) -> list[str]:
    """Write the page of all evaluations of a run; returns lines with the verdicts on its curves and the page's path."""
    from zero2all.evals.evaluation_page import write_page
    from zero2all.evals.signal import signal_lines

    page, signals = write_page(run)
    return [*signal_lines(signals), "", t(f"page: {page}")]


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
    from zero2all.common.progress import say
    from zero2all.evals.evaluation_page import write_page
    from zero2all.evals.options import kept_report
    from zero2all.evals.report import judge_checkpoint
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
    watcher.on_report = lambda _: write_page(run)
    return watcher


def _watch(arguments: argparse.Namespace) -> None:
    import os

    workspace = workspace_of(arguments)
    options = _checked_options(arguments, workspace, None, is_coming=True)
    os.nice(arguments.niceness)

    from zero2all.common.progress import counted
    from zero2all.evals.scores import read_reports

    watcher = _watcher(arguments.run, workspace, options, arguments.device)
    watcher.poll_seconds = arguments.poll_seconds
    if arguments.steps is not None:
        watcher.is_wanted = arguments.steps
    watcher.watch(arguments.once)
    evaluated = counted(len(watcher.evaluated), "checkpoint")
    print(t(f"{arguments.run}: {evaluated} evaluated, {len(watcher.left_out)} left out"))
    if read_reports(watcher.run):
        print("\n".join(_overview(watcher.run)))
    _name_unread(options)


def _download(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import say
    from zero2all.evals.download import SOURCES, download_benchmark

    for name in arguments.names:
        task = download_benchmark(name, arguments.data, arguments.endpoint, say)
        licence = SOURCES[name].licence or t("see its README.md")
        print(t(f"{name}: {len(task.items):,} items, {len(task.shots):,} examples; licence: {licence}"))
    fetched = ",".join(arguments.names)
    print(t(f"next: z2a eval RUN --tasks {fetched} --data {arguments.data} --work my-workspace"))


def _register_harness(inner: Subparsers) -> None:
    """Add both verbs to `z2a eval`."""
    parser = add_verb(
        inner,
        "harness",
        "run tasks of lm-eval on one checkpoint, offline (pip install 'zero2all[lmeval]')",
        "z2a eval harness my-run --work my-workspace --tasks z2a_my_questions_cloze --include lm-tasks",
        _harness,
    )
    add_run_name(parser)
    parser.add_argument(
        "--tasks", type=names, required=True, metavar="NAMES", help="names of tasks, separated by commas"
    )
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder with tasks that lm-eval does not have")
    add_flags(parser, STEP)
    parser.add_argument("--shots", type=whole(0), metavar="N", help="examples in a prompt (default: as the task says)")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="only the first N items of each task")

    parser = add_verb(
        inner,
        "export-tasks",
        "write benchmarks, or a set of your own, as tasks of lm-eval: YAML and JSON lines",
        "z2a eval export-tasks lm-tasks --data eval-data --tasks cmmlu,my-questions",
        _export,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    add_data(parser)
    parser.add_argument("--tasks", type=names, default=("all",), metavar="NAMES", help="which ones (default: all)")
    parser.add_argument("--shots", type=whole(0), metavar="N", help="examples in a prompt (default: as the set says)")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="only the first N items of each")


def _harness(arguments: argparse.Namespace) -> None:
    from zero2all.evals.lm_harness import harness_lines, require_lm_eval, run_harness

    require_lm_eval()
    workspace = workspace_of(arguments)

    from zero2all.common.progress import say
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
        print(t(f"written to {path}"))


def _export(arguments: argparse.Namespace) -> None:
    from zero2all.evals.lm_tasks import write_tasks
    from zero2all.evals.tasks.list import read_tasks

    for each in write_tasks(
        arguments.folder, read_tasks(arguments.data, arguments.tasks), shots=arguments.shots, limit=arguments.limit
    ):
        left_out = t(f", {each.left_out:,} left out (no such form in lm-eval)") if each.left_out else ""
        print(t(f"{each.name}: {each.items:,} items{left_out}"))
    print(t(f"run them with: z2a eval harness RUN --include {arguments.folder} --tasks NAME"))
