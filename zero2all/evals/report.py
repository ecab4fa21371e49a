"""One evaluation of one checkpoint: gathered, written to `runs/<name>/eval/`, and shown."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import write_json
from zero2all.common.workspace import Workspace
from zero2all.evals.contamination import read_contamination
from zero2all.evals.perplexity import held_out_bits_per_byte, validation_bits_per_byte
from zero2all.evals.probe_file import read_probes
from zero2all.evals.probes import run_probes, summarize
from zero2all.evals.rewrites.report import rewrite_figures, rewrite_lines, rewrite_section
from zero2all.evals.task_report import TaskQuestions, task_figures, task_lines, task_section
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.load import LoadedModel
from zero2all.packed.layout import packed_sources
from zero2all.packed.remote import packed_root
from zero2all.track.writer import Run
from zero2all.train.validate import open_valid_splits

PROBE_SCORES = ("accuracy", "probability", "share_among_foils")


def evaluate_run(
    loaded: LoadedModel,
    workspace: Workspace,
    probes: Path | None,
    max_bytes_per_source: int,
    int8: bool = False,
    tasks: TaskQuestions | None = None,
) -> dict[str, Any]:
    """Judge a checkpoint; writes the report beside the run, adds its figures to the metrics, and returns it."""
    report = judge_checkpoint(loaded, workspace, probes, max_bytes_per_source, int8, tasks)
    run = workspace.run(loaded.name)
    write_json(report_path(run, loaded.step), report)
    log_report(run, report)
    return report


def judge_checkpoint(
    loaded: LoadedModel,
    workspace: Workspace,
    probes: Path | None,
    max_bytes_per_source: int,
    int8: bool = False,
    tasks: TaskQuestions | None = None,
) -> dict[str, Any]:
    """Score held-out text (once more with 8-bit weights, if asked for) and, where they are given, probes and
    benchmarks."""
    report: dict[str, Any] = {"run": loaded.name, "step": loaded.step, "tokens": loaded.tokens}
    asked = [] if probes is None else read_probes(probes)  # first: a bad file should not cost the scoring of all text
    items = tasks.read() if tasks is not None else []
    engine = Engine(loaded)
    report["held_out"] = held_out_bits_per_byte(engine, loaded.window, workspace.corpus, max_bytes_per_source)
    if int8:
        narrow = Engine(loaded, EngineSettings(int8=True))
        found = held_out_bits_per_byte(narrow, loaded.window, workspace.corpus, max_bytes_per_source)
        for channel, values in found.items():
            report["held_out"][channel]["int8_bits_per_byte"] = values["bits_per_byte"]
    report["validation"] = _validation(engine, loaded, workspace)
    if probes is not None:
        results = run_probes(engine, asked)
        report["probes"] = summarize(results)
        report["probe_results"] = [asdict(result) for result in results]
    if tasks is not None:
        report["tasks"] = task_section(engine, tasks, items, read_contamination(workspace))
        if tasks.rewrites:
            once = workspace.run(loaded.name) / "eval" / "once"
            report["rewrites"] = rewrite_section(engine, items, tasks.rewrites, tasks.shots, tasks.limit, once)
    return report


def report_path(run: Path, step: int) -> Path:
    """Where the report of a checkpoint lies."""
    return run / "eval" / f"step-{step:08d}.json"


def _validation(engine: Engine, loaded: LoadedModel, workspace: Workspace) -> dict[str, dict[str, float]]:
    """What training's own validation says of this checkpoint; nothing where its data are gone."""
    if loaded.config is None:
        return {}
    data = loaded.config.data
    try:
        packed = packed_root(workspace.packed, data)
        splits = open_valid_splits(packed, packed_sources(packed))
    except BadInputError:
        return {}
    return validation_bits_per_byte(engine, splits, data, loaded.config.eval)


def log_report(run: Path, report: dict[str, Any]) -> None:
    """Add the figures of a report to the metrics of the run, so that the board shows them over its checkpoints."""
    with Run(run, writer="eval") as metrics:
        metrics.log(figures(report), report["step"], report.get("tokens", 0))


def figures(report: dict[str, Any]) -> dict[str, float]:
    """The figures of a report by the names of their metrics."""
    bits = {channel: values["bits_per_byte"] for channel, values in report.get("held_out", {}).items()}
    values = {f"eval/held_out/bpb/{channel}": value for channel, value in bits.items()}
    for channel, found in report.get("probes", {}).get("channels", {}).items():
        for score in PROBE_SCORES:
            if score in found:
                values[f"eval/probes/{score}/{channel}"] = found[score]
            for group, means in found["groups"].items():
                values[f"eval/probes/{channel}/{score}/{group}"] = means[score]
    if "tasks" in report:
        values |= task_figures(report["tasks"])
    if "rewrites" in report:
        values |= rewrite_figures(report["rewrites"])
    return values


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    lines = [
        f"{report['run']} at step {report['step']}",
        "",
        "held-out text        bits/byte   gzip -9   documents      bytes",
    ]
    for channel, values in report["held_out"].items():
        lines.append(
            f"  {channel:<18} {values['bits_per_byte']:>9.4f} {values['gzip_bits_per_byte']:>9.4f} "
            f"{values['documents']:>11,} {values['bytes']:>10,}"
        )
        if "int8_bits_per_byte" in values:
            cost = values["int8_bits_per_byte"] - values["bits_per_byte"]
            lines.append(f"    with 8-bit weights {values['int8_bits_per_byte']:>7.4f}  ({cost:+.5f})")
    if report.get("validation"):
        lines += ["", "rows that training scores     bits/byte   loss"]
        for channel, values in report["validation"].items():
            lines.append(f"  {channel:<27} {values['bits_per_byte']:>9.4f} {values['loss']:>7.4f}")
    if "probes" in report:
        lines += ["", "probes                          accuracy   P(answer)  among foils  probes"]
        for channel, values in report["probes"]["channels"].items():
            if "accuracy" in values:
                lines.append(_probe_line(channel, values))
            lines += [_probe_line(f"  {group}", means) for group, means in values["groups"].items()]
    if "tasks" in report:
        lines += task_lines(report["tasks"])
    if "rewrites" in report:
        lines += ["", *rewrite_lines(report["rewrites"])]
    return lines


def _probe_line(name: str, means: dict[str, float]) -> str:
    return (
        f"  {name:<28} {means['accuracy']:>8.1%} {means['probability']:>11.3f} {means['share_among_foils']:>12.3f} "
        f"{means['probes']:>7}"
    )
