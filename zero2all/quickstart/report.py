"""`report.html` of a speedrun: what was expected and what came out, in one page that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from zero2all.common.files import write_atomic
from zero2all.common.html import html_page
from zero2all.common.language import translate as t
from zero2all.common.progress import human_count, human_seconds, terminal_safe
from zero2all.estimate.flops import flops_per_token
from zero2all.quickstart.speedrun import REPORT_NAME
from zero2all.train.validate import all_rows

if TYPE_CHECKING:
    from zero2all.quickstart.pipeline import QuickstartRun
    from zero2all.quickstart.speedrun import Speedrun

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1e293b; background: #fff }
main { max-width: 56rem } td, th { padding: .15rem 1rem .15rem 0; text-align: left; font-variant-numeric: tabular-nums }
pre { background: #f1f5f9; padding: .6rem; white-space: pre-wrap }
@media (prefers-color-scheme: dark) { body { background: #0f172a; color: #e2e8f0 } pre { background: #1e293b } }
"""


def write_report(run: QuickstartRun, speedrun: Speedrun) -> None:
    """Write the page."""
    stages = [(t(stage.name), f"{human_seconds(stage.seconds)}, {t(stage.in_words())}") for stage in run.stages]
    scores = [
        (channel, f"{values['bits_per_byte']:.4f}" + (f" (gzip -9 {gzip:.4f})" if (gzip := _gzip(values)) else ""))
        for channel, values in run.evaluation["held_out"].items()
    ]
    samples = [f"<pre>{escape(terminal_safe(prompt + text))}</pre>" for _, prompt, text in run.samples]
    body = [
        f"<h1>{escape(t('Speedrun'))}</h1>",
        _table(t("what it took"), figures(run, speedrun)),
        _table(t("bits per byte of held-out text"), scores),
        _table(t("stages"), stages),
        f"<h2>{escape(t('Samples'))}</h2>",
        *samples,
    ]
    write_atomic(run.workspace.root / REPORT_NAME, html_page(t("Speedrun"), STYLE, body).encode())


def figures(run: QuickstartRun, speedrun: Speedrun) -> list[tuple[str, str]]:
    """Name and value: time, work, energy and money, and the loss that was expected beside the one reached."""
    seconds = sum(stage.seconds for stage in run.stages)
    training = next((stage.seconds for stage in run.stages if stage.name == "train"), 0.0)
    model, tokens = run.config.model, run.last_step * run.config.train.tokens_per_step
    work = tokens * flops_per_token(model, run.config.data.seq_len)["causal"]
    asked, expected = speedrun.budget.seconds, speedrun.kept["run"]["predicted_loss"]
    found = [
        (t("time"), f"{human_seconds(seconds)} of {human_seconds(asked)} ({seconds / asked - 1:+.1%})"),
        (t("model"), f"{run.parameters / 1e6:.2f} M parameters, {model.layers} layers, width {model.hidden_size}"),
        (t("tokens"), f"{human_count(tokens)}, {tokens / speedrun.kept['unique_tokens']:.1f} times the text"),
        (t("work"), f"{work:.3g} FLOP, {work / max(training, 1e-9) / 1e12:.3g} TFLOP/s"),
    ]
    if run.watts is not None:
        found.append((t("energy"), f"{run.watts * training / 3600:,.1f} Wh, {run.watts:,.0f} W"))
    if speedrun.budget.price_per_hour is not None:
        found.append((t("money"), f"{seconds / 3600 * speedrun.budget.price_per_hour:,.2f}"))
    if run.curve:
        reached = dict(run.curve).get(run.best_step, run.curve[-1][1])
        found.append((t("held-out loss"), f"{reached:.4f}, expected {expected:.4f} ({reached / expected - 1:+.1%})"))
        if rows := all_rows(run.evaluation["held_out"]):
            found.append((t("bits per byte, all"), f"{rows['bits_per_byte']:.4f}"))
    return found


def _gzip(values: dict[str, float]) -> float | None:
    return values.get("gzip_bits_per_byte")


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<h2>{escape(title)}</h2><table>{cells}</table>" if rows else ""
