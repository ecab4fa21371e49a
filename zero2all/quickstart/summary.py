"""What the quickstart prints at its end, `summary.md` with all tables, and `report.html` of a speedrun."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from zero2all.common.files import write_atomic
from zero2all.common.html import html_page
from zero2all.common.language import columns, language, padded
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, human_count, human_seconds, terminal_safe
from zero2all.estimate.flops import flops_per_token
from zero2all.quickstart.pipeline import SUMMARY_NAME, QuickstartRun, by_language
from zero2all.quickstart.speedrun import REPORT_NAME, Speedrun
from zero2all.train.validate import all_rows

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1e293b; background: #fff }
main { max-width: 56rem } td, th { padding: .15rem 1rem .15rem 0; text-align: left; font-variant-numeric: tabular-nums }
pre { background: #f1f5f9; padding: .6rem; white-space: pre-wrap }
@media (prefers-color-scheme: dark) { body { background: #0f172a; color: #e2e8f0 } pre { background: #1e293b } }
"""


def print_summary(journey: QuickstartRun) -> None:
    """Print the results and the next commands; write all tables to `summary.md` in the workspace."""
    write_atomic(journey.workspace.root / SUMMARY_NAME, _markdown(journey).encode())
    if journey.speedrun is not None:
        write_report(journey, journey.speedrun)
    print()
    for line in _results(journey):
        print(line)
    print()
    if journey.is_falling:
        print(t("Next, paste any of these lines: continue a text, look at the curves, train for longer."))
    else:
        print(t("Next, paste any of these lines: continue a text, look at the curves."))
    for command in next_commands(journey):
        print(f"  {command}")


def _results(journey: QuickstartRun) -> list[str]:
    """Some lines: what was made, how good it is, and where it lies."""
    steps, size = journey.last_step, journey.parameters / 1e6
    seconds = human_seconds(sum(stage.seconds for stage in journey.stages))
    lines = [t(f"Done in {seconds}: a model of {size:.2f} M parameters, trained for {steps:,} steps.")]
    lines += [t(line) for line in outlook(journey)]
    held_out = journey.evaluation["held_out"]
    if journey.own_data:
        lines += [t(line) for line in verdicts(held_out, journey.is_falling)]
    else:
        bits = _by_channel(held_out, "bits_per_byte")
        gzip = _by_channel(held_out, "gzip_bits_per_byte")
        lines.append(t(f"Held-out text, bits per byte (lower is better): {bits}. gzip -9 needs {gzip}."))
    if journey.before is not None:
        before, after = journey.before["accuracy"], journey.evaluation["probes"]["accuracy"]
        lines.append(
            t(
                f"Facts asked in a phrasing it never saw for that fact: {after:.1%} right; in a stranger's words: "
                f"{new_wording_accuracy(journey.evaluation):.1%}; before training {before:.1%}."
            )
        )
    if journey.chat:
        answered, refused = (by_language(journey.chat["sft"], kind) for kind in ("fact", "outside"))
        lines.append(t(f"In a chat: facts answered {answered}; questions about other things refused {refused}."))
    if journey.samples:
        prompt, text = _shown_sample(journey)
        lines.append(f"{t('Sample:')} {_one_line(prompt + text)}")
    root, run = journey.workspace.root.absolute(), journey.workspace.run(journey.config.train.name)
    places = ("corpus/report.html", str(run.relative_to(journey.workspace.root) / "curves.png"), "hf")
    lines.append(t(f"In {root}: {SUMMARY_NAME} (all tables), {places[0]}, {places[1]}, {places[2]} (the model)."))
    return lines


def new_wording_accuracy(evaluation: Mapping[str, Any]) -> float:
    """The share of right answers to facts that are asked in words which the text uses for none of them."""
    asked = [result["correct"] for result in evaluation["probe_results"] if result["probe"]["new_wording"]]
    return sum(asked) / max(1, len(asked))


def _shown_sample(journey: QuickstartRun) -> tuple[str, str]:
    """Prompt and continuation of the first sample, in the person's language where there is one."""
    own = [sample for sample in journey.samples if sample[0] == language()]
    _, prompt, text = (own or journey.samples)[0]
    return prompt, text


def _by_channel(held_out: Mapping[str, Mapping[str, float]], key: str) -> str:
    return ", ".join(f"{channel} {values.get(key, math.nan):.2f}" for channel, values in held_out.items())


def _one_line(text: str) -> str:
    return terminal_safe(" ".join(text.split()))


def outlook(journey: QuickstartRun) -> list[str]:
    """What the held-out loss over the steps says: which checkpoint is the best, and what would help."""
    losses, best, last = dict(journey.curve), journey.best_step, journey.last_step
    if best in losses and best < last:
        return [
            f"The best checkpoint is that of step {best:,}: its held-out loss is {losses[best]:.3f}, at the end it was "
            f"{journey.curve[-1][1]:.3f}. What follows is of that checkpoint. More steps would only memorise the text; "
            f"more text would help."
        ]
    if not journey.own_data or len(losses) < 2:
        return []
    before, (_, now) = journey.curve[-2], journey.curve[-1]
    if journey.is_falling:
        return [
            f"The held-out loss still fell at the end, from {before[1]:.3f} at step {before[0]:,} to {now:.3f}: more "
            f"time would help (--minutes)."
        ]
    return [f"The held-out loss no longer falls ({now:.3f}): more text would help, more steps hardly."]


def verdicts(held_out: Mapping[str, Mapping[str, float]], is_falling: bool) -> list[str]:
    """What the bits per byte of your own text mean: the model beside gzip, on text that neither has seen."""
    if not held_out:
        return [
            "No text was held out (a channel needs 20 documents for that), so the model cannot be judged on text that "
            "it has not seen."
        ]
    lines = ["Bits per byte of held-out text; lower is better, and 8 is plain text:"]
    for channel, values in held_out.items():
        ours, theirs = values["bits_per_byte"], values.get("gzip_bits_per_byte")
        if theirs is None:  # a report from before gzip stood in it
            lines.append(f"  {channel}: {ours:.2f}.")
        elif ours < theirs:
            less = 1 - ours / theirs
            lines.append(
                f"  {channel}: {ours:.2f}, {less:.0%} less than gzip -9 ({theirs:.2f}). It learned from your text."
            )
        elif is_falling:
            lines.append(f"  {channel}: {ours:.2f}, more than gzip -9 ({theirs:.2f}). It needs more time (--minutes).")
        else:
            lines.append(f"  {channel}: {ours:.2f}, more than gzip -9 ({theirs:.2f}). It needs more text.")
    return lines


def next_commands(journey: QuickstartRun) -> list[str]:
    """Commands that work when they are pasted into a fresh shell, in any folder."""
    name, work = journey.config.train.name, journey.workspace.root.absolute()
    z2a, in_work = z2a_command(), f"--work {shlex.quote(str(work))}"
    prompt = shlex.quote(_one_line(_shown_sample(journey)[0]) if journey.samples else "Hello")
    step = f" --step {journey.best_step}" if journey.best_step < journey.last_step else ""
    chat = [f"{z2a} chat {shlex.quote(journey.chat_name)} {in_work}"] if journey.chat else []
    commands = [
        *chat,
        f"{z2a} generate {shlex.quote(name)} {in_work}{step} --prompt {prompt} --temperature 0.7",
        f"{z2a} board {shlex.quote(str(work))}",
    ]
    if journey.is_falling:
        config = shlex.quote(str(work / "runs" / name / "config.yaml"))
        longer = f"--train.name longer --train.steps {2 * journey.last_step}"
        commands.append(f"{z2a} train {config} {in_work} {longer}")
    return commands


def z2a_command() -> str:
    """How z2a is called from a fresh shell: by name where the PATH has this one, else by its path."""
    own = Path(sys.executable).with_name("z2a")
    found = shutil.which("z2a")
    activated = [os.environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if name in os.environ]
    is_for_all = not any(own.is_relative_to(folder) for folder in activated)
    if found and is_for_all and own.exists() and own.samefile(found):
        return "z2a"
    return shlex.quote(str(own)) if own.exists() else f"{shlex.quote(sys.executable)} -m zero2all"


# ---- summary.md -------------------------------------------------------------------------------------------------


def _markdown(journey: QuickstartRun) -> str:
    parts = [f"# {t('Quickstart')}", _stage_table(journey)]
    parts += [t(f"Cleaning: {line}") for line in journey.losses]
    if journey.evaluation["held_out"]:
        parts += [f"## {t('Held-out text')}", _channel_table(journey)]
        parts += map(t, (journey.evaluation.get("held_out_in_words", ""), *outlook(journey)))
        parts.append(
            t(
                "Bits per byte say how well the model predicts text that it has not read: how many bits it would need "
                "to store a byte of it. 8 is plain text; gzip finds repetitions only; the lower, the better. Only "
                "figures for the same text can be compared."
            )
        )
    if journey.before is not None:
        note = t(
            "Each fact is asked in two phrasings that the text never uses for it; right means that the model writes "
            "the whole answer. A new wording is a phrasing that the text never uses for any fact, written by somebody "
            "who did not know the text."
        )
        parts += [f"## {t('Probes')}", note, _probe_table(journey)]
        shown_probes = (f"- P({of} | {on}) = {old:.4f} → {new:.4f}" for on, of, old, new in journey.shown_probes)
        parts.append("\n".join(shown_probes))
    if journey.chat:
        note = t(
            "Asked one by one, as `z2a chat` asks: each fact and sum in a wording that no conversation has for it, and "
            "questions about things outside its world, which are to be refused. All answers are in eval/ of the run."
        )
        parts += [f"## {t('Chat')}", note, _chat_table(journey)]
    parts.append(f"## {t('Samples')}")
    for channel, prompt, text in journey.samples:
        shown = terminal_safe(prompt + text, keep=TEXT_MARKS).rstrip()
        parts.append(f"{channel}, `{_one_line(prompt)}`:\n\n```\n{shown}\n```")
    parts += [f"## {t('Next')}", "```\n" + "\n".join(next_commands(journey)) + "\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also aligned as text; the first row is the heading."""
    widths = [max(columns(row[column]) for row in rows) for column in range(len(rows[0]))]
    heading, *lines = [" | ".join(map(padded, row, widths)) for row in rows]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (heading, rule, *lines))


def _stage_table(journey: QuickstartRun) -> str:
    rows = [[t("stage"), t("time"), t("result")]]
    rows += [[t(stage.name), human_seconds(stage.seconds), t(stage.in_words())] for stage in journey.stages]
    rows.append([t("all"), human_seconds(sum(stage.seconds for stage in journey.stages)), str(journey.workspace.root)])
    return _table(rows)


def _channel_table(journey: QuickstartRun) -> str:
    """The held-out loss per channel, and of all tokens."""
    rows = [[t("channel"), t("loss (nats/token)"), t("bits per byte"), "gzip -9", t("tokens"), t("bytes")]]
    held_out = journey.evaluation["held_out"]
    for channel, values in [*held_out.items(), (f"**{t('all')}**", all_rows(held_out))]:
        gzip = f"{values['gzip_bits_per_byte']:.3f}" if "gzip_bits_per_byte" in values else ""
        bits, counts = f"{values['bits_per_byte']:.3f}", [f"{values[name]:,.0f}" for name in ("tokens", "bytes")]
        rows.append([channel, f"{values['loss']:.3f}", bits, gzip, *counts])
    return _table(rows)


def _probe_table(journey: QuickstartRun) -> str:
    """Accuracy of whole answers and P(answer), before and after training."""
    assert journey.before is not None, "the caller checks"
    rows = [["", t("probes"), t("right, before → after"), t("P(answer), before → after")]]
    before, after = journey.before, journey.evaluation["probes"]
    for channel, values in after["channels"].items():
        rows.append([f"**{channel}**", *_probe_cells(before["channels"][channel], values)])
        for group, means in values["groups"].items():
            rows.append([t(group), *_probe_cells(before["channels"][channel]["groups"][group], means)])
    rows.append([f"**{t('all facts')}**", *_probe_cells(before, after)])
    return _table(rows)


def _chat_table(journey: QuickstartRun) -> str:
    """Base model, chat model and what came after: what they complete, answer, refuse, and what was forgotten."""
    heads = ("facts in completion", "facts in chat", "sums in chat", "refused", "bits per byte")
    rows = [["", *map(t, heads)]]
    held_out = {"base": journey.evaluation["held_out"], **journey.chat_held_out}
    completed = {"base": journey.evaluation["probes"]["accuracy"], **journey.chat_probes}
    for name, scores in journey.chat.items():
        shares = [by_language(scores, kind) for kind in ("fact", "sum", "outside")]
        rows.append([name, f"{completed[name]:.1%}", *shares, _by_channel(held_out[name], "bits_per_byte")])
    return _table(rows)


def _probe_cells(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        str(after["probes"]),
        f"{before['accuracy']:.1%} → {after['accuracy']:.1%}",
        f"{before['probability']:.4f} → {after['probability']:.4f}",
    ]


# ---- report.html -----------------------------------------------------------------------------------------------


def write_report(run: QuickstartRun, speedrun: Speedrun) -> None:
    """Write the page of a speedrun: what was expected and what came out; it needs nothing else."""
    stages = [(t(stage.name), f"{human_seconds(stage.seconds)}, {t(stage.in_words())}") for stage in run.stages]
    scores = [
        (channel, f"{values['bits_per_byte']:.4f}" + (f" (gzip -9 {gzip:.4f})" if gzip else ""))
        for channel, values in run.evaluation["held_out"].items()
        for gzip in [values.get("gzip_bits_per_byte")]
    ]
    samples = [f"<pre>{escape(terminal_safe(prompt + text))}</pre>" for _, prompt, text in run.samples]
    body = [
        f"<h1>{escape(t('Speedrun'))}</h1>",
        _html_table(t("what it took"), figures(run, speedrun)),
        _html_table(t("bits per byte of held-out text"), scores),
        _html_table(t("stages"), stages),
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


def _html_table(title: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<h2>{escape(title)}</h2><table>{cells}</table>" if rows else ""
