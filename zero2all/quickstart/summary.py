"""What the quickstart prints at its end: stages, results, samples and what to try next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero2all.common.progress import human_seconds
from zero2all.quickstart.journey import Journey

FEW_EPOCHS = 3
"""Reading the text more often than this helps less than more text."""


def print_summary(journey: Journey) -> None:
    """Print everything to the terminal."""
    console = Console(highlight=False)
    console.print(_stage_table(journey))
    for line in journey.losses:
        console.print(f"  cleaning: {line}", markup=False, soft_wrap=True)
    if journey.evaluation["held_out"]:
        console.print(_channel_table(journey))
    if journey.own_data:
        for line in verdicts(journey.evaluation["held_out"], journey.epochs):
            console.print(f"  {line}")
    if journey.before is not None:
        console.print(_probe_table(journey))
    for prompt, answer, before, after in journey.shown_probes:
        console.print(f"  P({answer} | {prompt}) = {before:.4f} → {after:.4f}")
    console.print("\n[bold]Samples[/bold]  (prompt in colour, the rest is the model's)")
    for channel, prompt, continuation in journey.samples:
        console.print(Text.assemble((f"  {channel + ' ':<5}", "dim"), (prompt, "cyan"), continuation.rstrip()))
    console.print(f"\n[bold]Loss curves[/bold]  {journey.picture}")
    console.print("\n[bold]Next[/bold]")
    for command, why in _next_commands(journey):
        console.print(f"  {command}\n      {why}", style=None, markup=False, soft_wrap=True)


def _stage_table(journey: Journey) -> Table:
    table = Table(title="The journey", title_justify="left")
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("result")
    for stage in journey.stages:
        table.add_row(
            stage.name, human_seconds(stage.seconds), stage.result + (" (done before)" if stage.done_before else "")
        )
    total = human_seconds(sum(stage.seconds for stage in journey.stages))
    table.add_section()
    table.add_row("all", total, f"workspace {journey.workspace.root}")
    return table


def _channel_table(journey: Journey) -> Table:
    """Loss per channel on held-out text."""
    table = Table(title="Held-out text", title_justify="left")
    for name in ("channel", "loss (nats/token)", "bits per byte", "documents", "bytes"):
        table.add_column(name, justify="left" if name == "channel" else "right")
    for channel, values in journey.evaluation["held_out"].items():
        loss = values["bits_per_byte"] * math.log(2) * values["bytes"] / values["tokens"]
        table.add_row(
            channel, f"{loss:.3f}", f"{values['bits_per_byte']:.3f}", f"{values['documents']:,}", f"{values['bytes']:,}"
        )
    return table


def verdicts(held_out: Mapping[str, Mapping[str, float]], epochs: float) -> list[str]:
    """What bits per byte mean, in words: the model beside gzip, on text that neither has seen."""
    advice = "more steps help most (--train.steps)" if epochs < FEW_EPOCHS else "more text helps most"
    if not held_out:
        return [
            "No text was held out (a channel needs 20 documents for that), so nothing says how well the model reads "
            "what it has not seen."
        ]
    lines = ["Bits per byte: what the model needs to write down held-out text; fewer is better, 8 is knowing nothing."]
    for channel, values in held_out.items():
        ours, theirs = values["bits_per_byte"], values.get("gzip_bits_per_byte")
        if theirs is None:  # a report from before gzip stood in it
            continue
        better = 1 - ours / theirs
        verdict = (
            f"{better:.0%} less than gzip -9 ({theirs:.2f}): it has learned from your text"
            if better > 0
            else f"more than gzip -9 ({theirs:.2f}): too little was learned yet; {advice}"
        )
        lines.append(f"{channel}: {ours:.2f}, {verdict}.")
    return lines


def _probe_table(journey: Journey) -> Table:
    """Accuracy of whole answers and P(answer), before and after training."""
    assert journey.before is not None, "the caller checks"
    table = Table(title="Probes: facts asked in wordings they were never seen in", title_justify="left")
    for name in ("", "probes", "right, before → after", "P(answer), before → after"):
        table.add_column(name, justify="right" if name else "left")
    before, after = journey.before, journey.evaluation["probes"]
    for channel, values in after["channels"].items():
        table.add_row(f"[bold]{channel}[/bold]", *_probe_cells(before["channels"][channel], values))
        for group, means in values["groups"].items():
            table.add_row(f"  {group}", *_probe_cells(before["channels"][channel]["groups"][group], means))
        table.add_section()
    table.add_row("[bold]all facts[/bold]", *_probe_cells(before, after))
    table.caption = "facts = capital, day, person; arithmetic and wordings new to the model are shown apart"
    return table


def _probe_cells(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        str(after["probes"]),
        f"{before['accuracy']:.1%} → {after['accuracy']:6.1%}",
        f"{before['probability']:.4f} → {after['probability']:.4f}",
    ]


def _next_commands(journey: Journey) -> list[tuple[str, str]]:
    work, name = journey.workspace.root, journey.config.train.name
    in_work = f"--work {shlex.quote(str(work))}"
    prompt = shlex.quote(journey.samples[0][1] if journey.samples else "Hello")
    talk = (f"z2a generate {name} {in_work} --prompt {prompt} --temperature 0.7", "talk to your model")
    if not journey.own_data:
        return [
            talk,
            ("z2a quickstart --data PATH_OF_YOUR_TEXT", "the same journey with your own text"),
            (f"z2a train {name} {in_work} --train.name longer --train.steps 2000", "train longer on the same data"),
        ]
    config = shlex.quote(str(journey.workspace.run(name) / "config.yaml"))
    longer = f"--train.name longer --train.steps {2 * journey.config.train.steps}"
    look = [(f"z2a corpus show --dropped {in_work}", "what cleaning dropped, with samples")] if journey.dropped else []
    return [
        talk,
        *look,
        (f"z2a board {shlex.quote(str(work))}", "the curves as a page"),
        (f"z2a train {config} {in_work} {longer}", "train longer on the same data"),
    ]
