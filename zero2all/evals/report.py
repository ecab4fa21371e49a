"""One evaluation of one checkpoint: gathered, written to `runs/<name>/eval/`, and shown."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.language import cells, table_lines
from zero2all.common.language import translate as t
from zero2all.common.progress import say, terminal_safe
from zero2all.common.workspace import Workspace
from zero2all.evals.contamination import contaminated_ids, read_contamination, split_accuracy, split_words
from zero2all.evals.items import CODE, Task
from zero2all.evals.judge import FormResult, JudgeOptions, judge, summary
from zero2all.evals.options import EvalOptions, report_path, text_files, write_report
from zero2all.evals.perplexity import Windows, file_bits_per_byte, held_out_bits_per_byte, held_out_rows
from zero2all.evals.probes import compare_pairs, run_probes, summarize, summarize_pairs
from zero2all.evals.question_files import read_pairs, read_probes
from zero2all.evals.rewrites.list import chosen_rewrites
from zero2all.evals.rewrites.measure import measure_rewrites, rewrite_figures, rewrite_lines
from zero2all.evals.sandbox import is_isolated, protection
from zero2all.evals.suites import SUITES, VERSION, SuiteQuestions, ask_task, mean_score
from zero2all.evals.tasks.list import TaskQuestions
from zero2all.infer.chat import chat_prompt
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.load import LoadedModel
from zero2all.infer.spread import make_engine
from zero2all.infer.weights import bits_per_weight
from zero2all.packed.remote import packed_root
from zero2all.track.writer import MetricsWriter
from zero2all.train.validate import Scores, all_rows, held_out_in_words, open_valid_splits, valid_sources

PROBE_SCORES = ("accuracy", "probability", "share_among_foils", "logprob")
PAIR_SCORES = ("accuracy", "nats")


def evaluate_run(loaded: LoadedModel, workspace: Workspace, options: EvalOptions) -> dict[str, Any]:
    """Judge a checkpoint; writes the report beside the run, adds its figures to the metrics, and returns it."""
    report = judge_checkpoint(loaded, workspace, options)
    run = workspace.run(loaded.name)
    write_report(report_path(run, loaded.step), report, say)
    log_report(run, report)
    return report


def judge_checkpoint(loaded: LoadedModel, workspace: Workspace, options: EvalOptions) -> dict[str, Any]:
    """Score held-out text and files, ask probes and benchmarks, compare pairs, as the options say."""
    report: dict[str, Any] = {"run": loaded.name, "step": loaded.step, "tokens": loaded.tokens}
    report["settings"] = options.record()
    # Files are read first: a bad one should not cost the scoring of all text.
    if options.suites is not None:
        options.suites.check(loaded)
    probes = [] if options.probes is None else read_probes(options.probes)
    pairs = [] if options.pairs is None else read_pairs(options.pairs)
    tasks, unread = ([], {}) if options.tasks is None else options.tasks.read()
    windows = Windows(loaded.window, options.stride)
    engine = make_engine(loaded)
    report["held_out"], report["documents"] = {}, {}
    if options.held_out:
        report["documents"] = held_out_bits_per_byte(engine, windows, workspace.corpus, options.max_bytes)
        report["held_out"] = _held_out(loaded, workspace)
        if report["held_out"] and loaded.config is not None:
            report["held_out_in_words"] = held_out_in_words(report["held_out"], loaded.config.data)
        for channel, values in report["held_out"].items():
            if channel in report["documents"]:
                values["gzip_bits_per_byte"] = report["documents"][channel]["gzip_bits_per_byte"]
    for kind in options.weights if options.held_out else ():
        narrow = make_engine(loaded, EngineSettings(weights=kind))
        found = held_out_bits_per_byte(narrow, windows, workspace.corpus, options.max_bytes)
        for channel, values in found.items():
            report["documents"][channel][f"{kind}_bits_per_byte"] = values["bits_per_byte"]
        report.setdefault("bits_per_weight", {})[kind] = bits_per_weight(narrow.forward.weights)
    if options.texts:
        report["texts"], report["texts_skipped"] = file_bits_per_byte(
            engine, windows, text_files(options.texts), options.max_bytes
        )
    if probes:
        asked = run_probes(engine, probes)
        report["probes"] = summarize(asked)
        report["probe_results"] = [asdict(result) for result in asked.results]
        report["probes_skipped"] = asked.skipped
    if pairs:
        compared = compare_pairs(engine, pairs)
        report["pairs"] = summarize_pairs(compared)
        report["pair_results"] = [asdict(result) for result in compared.results]
        report["pairs_skipped"] = compared.skipped
    if options.tasks is not None:
        same = ("forms", "shots", "limit", "run_code", "samples", "think_tokens")
        chat = functools.partial(chat_prompt, loaded) if options.tasks.chat else None
        asking = JudgeOptions(**{name: getattr(options.tasks, name) for name in same}, chat=chat)
        report["tasks"] = task_section(engine, options.tasks, tasks, asking, read_contamination(workspace))
        report["tasks_unread"] = unread
        if options.tasks.rewrites:
            chains = chosen_rewrites(options.tasks.rewrites)
            report["rewrites"] = {"tasks": measure_rewrites(engine, tasks, chains, asking)}
    if options.suites is not None:
        report["suites"] = suite_section(engine, options.suites, read_contamination(workspace), loaded)
    return report


def _held_out(loaded: LoadedModel, workspace: Workspace) -> Scores:
    """The held-out loss of this checkpoint by channel; nothing where its packed data are gone, or for a model that is
    spread, which scores documents only."""
    if loaded.config is None or loaded.world is not None:
        return {}
    try:
        packed = packed_root(workspace.packed, loaded.config.data)
        splits = open_valid_splits(packed, valid_sources(packed, loaded.config))
    except BadInputError:
        return {}
    return held_out_rows(loaded, splits, workspace.run(loaded.name))


def log_report(run: Path, report: dict[str, Any]) -> None:
    """Add the figures of a report to the metrics of the run, so that the board shows them over its checkpoints."""
    with MetricsWriter(run, writer="eval") as metrics:
        metrics.log(figures(report), report["step"], report.get("tokens", 0))


def figures(report: dict[str, Any]) -> dict[str, float]:
    """The figures of a report by the names of their metrics."""
    values: dict[str, float] = {}
    for channel, found in report.get("documents", {}).items():
        values[f"eval/documents/bpb/{channel}"] = found["bits_per_byte"]
        for bucket in found.get("by_position", ()):
            values[f"eval/by_position/{channel}/loss/{bucket['from']:04d}"] = bucket["loss"]
    for name, found in report.get("texts", {}).items():
        values[f"eval/texts/bpb/{name}"] = found["bits_per_byte"]
    for section, scores, parts in (("probes", PROBE_SCORES, "groups"), ("pairs", PAIR_SCORES, "kinds")):
        for channel, found in report.get(section, {}).get("channels", {}).items():
            for score in scores:
                if score in found:
                    values[f"eval/{section}/{score}/{channel}"] = found[score]
                for part, means in found[parts].items():
                    if score in means:  # an older report may lack it
                        values[f"eval/{section}/{channel}/{score}/{part}"] = means[score]
    sections = (("tasks", task_figures), ("suites", suite_figures), ("rewrites", rewrite_figures))
    for section, of_section in sections:
        values |= of_section(report[section]) if section in report else {}
    return values


LOSSES = {"loss": ".4f", "bits_per_byte": ".4f", "gzip_bits_per_byte": ".4f"}
PROBE_CELLS = {"accuracy": ".1%", "probability": ".3f", "share_among_foils": ".3f", "share_interval": ".3f"}
PROBE_CELLS |= {"logprob": ".2f", "median_rank": ",.0f", "probes": ","}
PAIR_CELLS = {"accuracy": ".1%", "interval": ".1%", "accuracy_per_byte": ".1%", "nats": "+.2f", "pairs": ","}
STEP_CELLS = {"probes": {"accuracy": ".1%", "share_among_foils": ".3f", "logprob": ".2f"}, "pairs": {"accuracy": ".1%"}}


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    lines = [t(f"{report['run']} at step {report['step']}")]
    if report["held_out"]:
        if "held_out_in_words" in report:  # an older report does not say
            lines += ["", t(report["held_out_in_words"])]
        values = {**report["held_out"], t("all"): all_rows(report["held_out"])}
        rows = [[name, *cells(each, {**LOSSES, "tokens": ",.0f", "bytes": ",.0f"})] for name, each in values.items()]
        lines += ["", *table_lines(t("contiguous rows | loss | bits/byte | gzip -9 | tokens | bytes"), rows)]
    if report["documents"]:
        lines += _document_lines(report) + _position_lines(report["documents"])
    if "texts" in report:
        lines += _text_lines(report)
    if "probes" in report:
        heading = t("probes | accuracy | P(answer) | among foils | (95 %) | log P | rank | asked")
        lines += _channel_lines(report["probes"], heading, "groups", PROBE_CELLS)
    if "pairs" in report:
        heading = t("pairs (chance: 50 %) | accuracy | (95 %) | per byte | nats | pairs")
        lines += _channel_lines(report["pairs"], heading, "kinds", PAIR_CELLS)
    for section, of_section in (("tasks", task_lines), ("suites", suite_lines), ("rewrites", rewrite_lines)):
        lines += of_section(report[section]) if section in report else []
    return lines


def _document_lines(report: dict[str, Any]) -> list[str]:
    rows: list[str | list[str]] = []
    for channel, values in report["documents"].items():
        rows += [[channel, *cells(values, {**LOSSES, "documents": ",", "bytes": ","})], *_unknown_lines(values)]
        for kind, bits in report.get("bits_per_weight", {}).items():
            found = values[f"{kind}_bits_per_byte"]
            cost = found - values["bits_per_byte"]
            rows.append(t(f"    with {kind} weights {found:.4f}  ({cost:+.5f}; {bits:.2f} bits a weight)"))
    return ["", *table_lines(t("each document whole | loss | bits/byte | gzip -9 | documents | bytes"), rows)]


def _unknown_lines(values: dict[str, Any]) -> list[str]:
    unknown = values.get("unknown_tokens", 0)  # an older report does not say
    if not unknown:
        return []
    share = f"{unknown / values['tokens']:.2%}"
    return [t(f"    too good: {share} of its tokens are <unk>, so part of the text was not predicted")]


def _position_lines(documents: dict[str, Any]) -> list[str]:
    """Loss by the number of tokens before: it falls further down for a model that uses its context."""
    losses: dict[int, dict[str, float]] = {}
    ends: dict[int, int] = {}
    for channel, values in documents.items():
        for bucket in values["by_position"]:
            losses.setdefault(bucket["from"], {})[channel] = bucket["loss"]
            ends[bucket["from"]] = max(bucket["to"], ends.get(bucket["from"], 0))
    if not losses:
        return []
    rows = []
    for first, found in sorted(losses.items()):
        name = f"{first:,}" if first == ends[first] else f"{first:,} {t('to')} {ends[first]:,}"
        rows.append([name, *cells(found, dict.fromkeys(documents, ".4f"))])
    return ["", *table_lines([t("loss by tokens before"), *documents], rows)]


def _text_lines(report: dict[str, Any]) -> list[str]:
    rows: list[str | list[str]] = []
    for name, values in report["texts"].items():
        found = cells(values, {**LOSSES, "tokens": ",", "bytes": ","})
        rows += [[terminal_safe(name), *found], *_unknown_lines(values)]
        if not values.get("is_whole", True):
            rows.append(t(f"    only its first {values['bytes']:,} bytes, because of --max-bytes"))
    rows += [t(f"  left out: {terminal_safe(name)} {why}") for name, why in report["texts_skipped"].items()]
    return ["", *table_lines(t("text files | loss | bits/byte | gzip -9 | tokens | bytes"), rows)]


def _channel_lines(found: dict[str, Any], heading: str, part: str, formats: dict[str, str]) -> list[str]:
    """Probes or pairs: the means of each channel, and below them those of its groups or kinds."""
    rows: list[str | list[str]] = []
    for channel, values in found["channels"].items():
        rows += [[terminal_safe(channel), *cells(values, formats)]] if "accuracy" in values else []
        rows += [[terminal_safe(f"  {t(name)}"), *cells(each, formats)] for name, each in values[part].items()]
    rows += [t(f"  {times} left out: {why}") for why, times in found["skipped"].items()]
    return ["", *table_lines(heading, rows)]


def step_lines(reports: list[dict[str, Any]]) -> list[str]:
    """Several checkpoints of a run, a line each."""
    channels = list(dict.fromkeys(channel for report in reports for channel in report["held_out"]))
    suites = list(dict.fromkeys(name for report in reports for name in report.get("suites", {})))
    scores = [t(title) for title in ("probes right", "among foils", "log P", "pairs right")]
    rows = []
    for report in reports:
        bits = {channel: found["bits_per_byte"] for channel, found in report["held_out"].items()}
        found = {name: each["score"] for name, each in report.get("suites", {}).items()}
        row = [f"{report['step']:,}", *cells(bits, dict.fromkeys(channels, ".4f"))]
        row += [cell for section, formats in STEP_CELLS.items() for cell in cells(report.get(section, {}), formats)]
        rows.append([*row, *cells(found, dict.fromkeys(suites, ".1%"))])
    return table_lines([t("step"), *(f"bpb {name}" for name in channels), *scores, *suites], rows, least=10)


# Benchmarks in the report of a checkpoint: the section `tasks`, its table and its metrics.


PROBLEMS_SHOWN = 3
NOT_ISOLATED = (
    "  The programs were NOT isolated: this kernel lacks Landlock and mount namespaces, or seccomp. Checks in Python "
    "held them, which stop accidents, not attacks. Run such code in a virtual machine."
)


def task_section(
    engine: Engine,
    questions: TaskQuestions,
    tasks: list[Task],
    options: JudgeOptions,
    contamination: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The section `tasks` of a report. `contamination`: what is known of the items in the training text."""
    results = judge(engine, tasks, options)
    problems = [line for task in tasks for line in (f"{task.name} {problem}" for problem in task.problems)]
    problems += dict.fromkeys(line for result in results for line in result.problems)  # those of cloze come twice
    without = [task for task in tasks if task.name not in {result.task for result in results}]
    problems += [f"{task.name}: not asked; its forms are {', '.join(task.forms)}" for task in without]
    found = {task.name: contaminated_ids(contamination, task) for task in tasks}
    values = [_as_values(result, found[result.task]) for result in results]
    section = {"results": values, "summary": summary(results), "problems": problems}
    if questions.run_code and any(item.shape == CODE for task in tasks for item in task.items):
        section["protection"] = protection()
    return section


def _as_values(result: FormResult, found: dict[str, set[str]] | None) -> dict[str, Any]:
    values = asdict(result)
    del values["problems"]
    correct = {each.id: each.correct for each in result.per_item if each.correct is not None}
    if found is not None and correct:
        values["contamination"] = split_accuracy(correct, found)
    return {**values, "centred": result.centred, "centred_interval": result.centred_interval}


def task_figures(section: dict[str, Any]) -> dict[str, float]:
    """Metrics: the centred accuracy of each form and task, or the bits per byte of its right answers; the summary."""
    figures = {}
    for each in section["results"]:
        value = each["bits_per_byte"] if each["form"] == "bits" else each["centred"]
        if value is not None:
            figures[f"eval/tasks/{each['form']}/{each['task']}"] = value
        if each["credit"] is not None:
            figures[f"eval/tasks/{each['form']}_credit/{each['task']}"] = each["credit"]
        if each["form"] == "bits" and each["centred"] is not None:
            figures[f"eval/tasks/greedy/{each['task']}"] = each["centred"]
    for language, found in section["summary"].items():
        figures[f"eval/tasks/summary/{language}"] = found["score"]
    return figures


RESULT_CELLS = {"form": "", "shots": "", "items": ",", "accuracy": ".1%", "chance": ".1%", "centred": ".1%"}
RESULT_CELLS |= {"centred_interval": ".1%", "bits_per_byte": ".4f"}


def _table(title: str, results: list[dict[str, Any]]) -> list[str]:
    """Results with their notes, a task and form each."""
    rows: list[str | list[str]] = []
    for each in results:
        chance = None if each["accuracy"] is None else each["chance"]
        rows.append([each["task"], *cells({**each, "chance": chance}, RESULT_CELLS)])
        notes = [t(f"{count:,} skipped: {reason}") for reason, count in each["skipped"].items()]
        if each["chosen_on"]:
            notes.append(t(f"the form is the best of all on {each['chosen_on']:,} items of another split"))
        if each["no_answer"]:
            notes.append(t(f"{each['no_answer']:,} texts without an answer"))
        if each["credit"] is not None:
            low, high = each["credit_interval"]
            notes.append(t(f"{each['credit']:.1%} of the options judged rightly, 95 % {low:.1%} … {high:.1%}"))
        if each["border_spans"]:
            notes.append(t(f"{each['border_spans']:,} with a token across prompt and answer, scored exactly"))
        if "contamination" in each:
            notes.append(t(split_words(each["contamination"])))
        rows += [f"    {'; '.join(notes)}"] if notes else []
    figures = t("form | shots | items | accuracy | chance | above chance | (95 %) | bits/byte")
    return ["", *table_lines(f"{title} | {figures}", rows)]


def task_lines(section: dict[str, Any]) -> list[str]:
    """The section as a table for a terminal."""
    lines = _table(t("benchmarks"), section["results"])
    names = {"en": "English", "zh": "Chinese"}
    for language, found in section["summary"].items():
        forms = ", ".join(f"{task} ({form})" for task, form in found["forms"].items())
        low, high = found["interval"]
        score = f"{found['score']:.1%}"
        lines.append(t(f"  {names[language]}: {score} above chance, 95 % {low:.1%} … {high:.1%}, the mean of {forms}"))
    if section["summary"]:
        lines.append(t("  The form of a task is chosen on one half of its items and scored on the other."))
    if not is_isolated(section.get("protection", {})):
        lines.append(t(NOT_ISOLATED))
    problems = section["problems"]
    if problems:
        lines += [t("  left out:"), *(f"    {line}" for line in problems[:PROBLEMS_SHOWN])]
        if len(problems) > PROBLEMS_SHOWN:
            lines.append(t(f"    … and {len(problems) - PROBLEMS_SHOWN:,} more, in the report's file"))
    return lines


def suite_section(
    engine: Engine, questions: SuiteQuestions, contamination: dict[str, Any] | None, loaded: LoadedModel
) -> dict[str, Any]:
    """The section `suites` of a report, each under the name of its curve."""
    tasks, missing = questions.read()
    section = {}
    for suite in questions.names:
        results = [ask_task(engine, tasks[name], form, loaded) for name, form in SUITES[suite].items() if name in tasks]
        values = [_as_values(each, contaminated_ids(contamination, tasks[each.task])) for each in results]
        lacks = {name: missing[name] for name in SUITES[suite] if name in missing}
        name = "-".join([suite, f"v{VERSION}", *(["without", *lacks] if lacks else [])])
        section[name] = {"version": VERSION, **mean_score(results), "missing": lacks, "tasks": values}
    return section


def suite_figures(section: dict[str, Any]) -> dict[str, float]:
    """Metrics: the score of each suite, and the centred accuracies behind it."""
    figures = {f"eval/suites/{name}/score": found["score"] for name, found in section.items()}
    tasks = [(name, each) for name, found in section.items() for each in found["tasks"]]
    return figures | {f"eval/suites/{name}/{each['task']}": each["centred"] for name, each in tasks}


def suite_lines(section: dict[str, Any]) -> list[str]:
    """The suites for a terminal, each with its score last."""
    lines = []
    for name, found in section.items():
        asked, lacks, (low, high) = len(found["tasks"]), len(found["missing"]), found["interval"]
        score = t(f"  score: {found['score']:.1%} above chance, 95 % {low:.1%} … {high:.1%}")
        partial = t(f", PARTIAL: {asked} of {asked + lacks} tasks, not to be compared with all") if lacks else ""
        lines += [*_table(name, found["tasks"]), score + partial]
    return lines
