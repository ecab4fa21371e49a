"""`z2a speedrun`: your own text and a time -> the best model that time can buy here, judged and exported on time.

    spent on the text   corpus, tokenizer and packed data: as long as they take
    PILOT_SHARE of the rest   the chosen model on a few tokens: its pace, and its loss beside the law's
    reserve             to judge, write samples and export
    all that is left    the run; its decay ends on time (`Deadline`)

What was chosen is kept in `speedrun.json`, so that an interrupted speedrun continues with it. Waiting for an answer
and the time between two starts are not counted.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, require_free_space, write_json
from zero2all.common.language import translate as t
from zero2all.common.progress import human_count, human_seconds
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, load_config
from zero2all.experiments.law import Point, scaled_to
from zero2all.experiments.shapes import FIELDS
from zero2all.model.config import parameter_counts
from zero2all.packed.mixture import TrainingData
from zero2all.packed.shard_format import open_split, packed_sources
from zero2all.quickstart.choose import (
    FILL,
    LAWS,
    SEQ_LEN,
    Choice,
    Speed,
    batch_for,
    choices,
    measured_speed,
    measured_step,
    most_epochs,
    settings_of,
    vocabulary,
)
from zero2all.train.anneal import request_anneal
from zero2all.train.run import train
from zero2all.train.run_data import open_run_data

PLAN_NAME, REPORT_NAME = "speedrun.json", "report.html"
PILOT_SHARE, CHAT_SHARE = 0.06, 0.1
MACHINE_SHARE = 0.02
"""Of the time, after which no further step of a shape is measured: a busy machine takes long for each."""
RESERVE = {"cpu": (11.0, 0.02), "cuda": (14.0, 0.01)}
"""Seconds, and a share of the time, that judging and exporting take."""
BYTES_PER_PARAMETER = 60
"""On the disk: the checkpoints that are kept, of weights and two moments, and the export."""
LEAST_SECONDS, LEAST_PILOT = 20, 20
SMALLEST_ROW = 32
OTHERS_BYTES = 2 << 30
LOOKS = (0.35, 0.55, 0.75, 0.9)
"""The first is where the decay of a run begins."""
TOLERANCE = 0.005


@dataclass(frozen=True)
class Budget:
    """The time of a speedrun, and what it costs."""

    seconds: float
    price_per_hour: float | None = None
    confirm: Callable[[], bool] = lambda: True
    """Asks a person whether to go on with the plan that was shown."""
    began: float | None = None
    """When the command began, by time.time(); None: not known, so that the time counts from the first stage."""

    def money(self, seconds: float) -> str:
        """What so much time costs, in words; empty without a price."""
        price = self.price_per_hour
        return "" if price is None else f", cost {seconds / 3600 * price:,.2f} at {price:g} an hour"


@dataclass
class Speedrun:
    """What is decided for one workspace."""

    workspace: Workspace
    budget: Budget
    source: str
    """The preset, or the config file."""
    overrides: Sequence[str]
    device: str
    chats: Sequence[Path] = ()
    """Files of conversations."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was chosen so far, by field."""

    def __post_init__(self) -> None:
        path = self.workspace.root / PLAN_NAME
        self.kept: dict[str, Any] = read_json(path) if path.is_file() else {}
        if "run" not in self.kept and self.kept.get("seconds") != self.budget.seconds:
            # Nothing is decided for another time yet; only the speed is the same.
            speed = {"speed": self.kept["speed"]} if "speed" in self.kept else {}
            self.kept = {"seconds": self.budget.seconds, **speed}
        if self.kept["seconds"] != self.budget.seconds:
            raise UsageError(
                f"{self.workspace.root} has a speedrun of {human_seconds(self.kept['seconds'])}. Give the same time to "
                f"continue it, --fresh to start over, or another --work."
            )
        if self.device == "cuda" and "speed" not in self.kept:
            refuse_busy_card()
        # The mixture and frames of the preset speak of the small world.
        length = min(SEQ_LEN[self.device], self.load({}).model.max_seq_len)
        self.values = {"data.seq_len": length, "data.mixture": None, "data.question_frames": None}

    @property
    def given(self) -> set[str]:
        """The fields that the command line sets: these are left alone."""
        return {word.removeprefix("--").partition("=")[0] for word in self.overrides if word.startswith("--")}

    def load(self, values: Mapping[str, Any]) -> RunConfig:
        """The config with these values."""
        words = [f"--{name}={json.dumps(value)}" for name, value in values.items() if name not in self.given]
        return load_config(self.source, [*self.overrides, *words])

    @property
    def config(self) -> RunConfig:
        """With what was chosen so far."""
        return self.load(self.values)

    def run_config(self, choice: Choice, more: Mapping[str, Any] | None = None) -> RunConfig:
        """The config of a run."""
        return self.load({**self.values, **settings_of(self.config, choice, self.device), **(more or {})})

    def keep(self, **values: Any) -> None:
        """Note what was decided."""
        self.kept |= values
        write_json(self.workspace.root / PLAN_NAME, self.kept)

    @property
    def speed(self) -> Speed:
        """Of this machine; measured once."""
        if "speed" not in self.kept:
            sized = self.load({**self.values, "model.vocab_size": 4096})
            self.keep(speed=dataclasses.asdict(measured_speed(sized, self.device, MACHINE_SHARE * self.budget.seconds)))
        return Speed(**self.kept["speed"])

    @property
    def reserve(self) -> float:
        """Seconds after the training. With conversations their training begins anew: it is prepared and loaded as the
        pilot was, with as much again to read them."""
        fixed, share = RESERVE[self.device]
        return fixed + share * self.budget.seconds + 2 * self.kept.get("loading", 0.0) * bool(self.chats)

    def left(self, spent: float) -> float:
        """Seconds for the run, after so many."""
        return (self.budget.seconds - spent - self.reserve) * (1 - CHAT_SHARE * bool(self.chats))

    def chat_seconds(self, spent: float) -> float:
        """Seconds to train on conversations, after so many: all that is left but what it takes to judge and save."""
        return max(0.0, (1 - RESERVE[self.device][1]) * self.budget.seconds - spent)

    def take_packed(self, packed: Path) -> None:
        """Begin with data that was packed before."""
        splits = [open_split(packed, name, "train") for name in packed_sources(packed)]
        tokens = {split.name: split.tokens for split in splits}
        self.values |= {"model.vocab_size": int(splits[0].manifest["vocab_size"]), **self.rows_for(tokens)}

    def rows_for(self, tokens: Mapping[str, int]) -> dict[str, Any]:
        """Rows that a short text has some of, and the sources that have at least one."""
        length: int = self.config.data.seq_len
        values: dict[str, Any] = {}
        while length > SMALLEST_ROW and sum(tokens.values()) < 8 * length:
            length //= 2
        values["data.seq_len"] = length
        if any(count <= length for count in tokens.values()):
            values["data.mixture"] = {name: float(count if count > length else 0) for name, count in tokens.items()}
        return values

    def vocabulary_settings(self, text_bytes: int) -> dict[str, Any]:
        """The tokenizer for a text of this size; kept, since the pilot corrects the speed that it follows from."""
        if "vocab_size" not in self.kept:
            self.keep(vocab_size=vocabulary(text_bytes, self.speed.flops * self.budget.seconds))
        return {"tokenizer.vocab_size": self.kept["vocab_size"]}

    def choose(self, spent: float) -> list[Choice]:
        """The models for the time that is left, best first; `spent`: seconds of the stages so far."""
        left = self.left(spent)
        unique = self.kept["unique_tokens"]
        found = choices(self.config, unique, left, self.speed, LAWS[self.device], self.given) if left > 0 else []
        if not found:
            raise BadInputError(
                f"{human_seconds(self.budget.seconds)} are too little here: {human_seconds(spent)} went into the text, "
                f"{human_seconds(self.reserve)} are needed to judge and export, and what is left does not train even "
                f"the smallest model. Give at least {human_seconds(spent + self.reserve + 3 * LEAST_SECONDS)}."
            )
        return found

    def pilot(self, unique: int, spent: float) -> None:
        """Train the model that seems best for a moment: its pace and its loss beside the law's are kept."""
        if "law" not in self.kept:
            self.keep(unique_tokens=unique)
            first = self.choose(spent)[0]
            require_free_space(
                self.workspace.root, BYTES_PER_PARAMETER * parameter_counts(first.model)["total"], "the model"
            )
            tokens = PILOT_SHARE * first.tokens
            batch = batch_for(self.config, tokens, self.given)  # that of a run so short: with few steps the law is off
            short = dataclasses.replace(first, tokens_per_step=batch, steps=max(LEAST_PILOT, round(tokens / batch)))
            never = {"validation.every_steps": 0, "checkpoint.every_steps": 0, "checkpoint.keep_every_steps": 0}
            trial = self.run_config(short, {**never, "train.name": f"{self.config.train.name}-pilot"})
            called, began = time.monotonic(), list[float]()
            summary = train(
                trial, self.workspace, fresh=True, say=lambda _: None, brief=True,
                watch=lambda _step: began.append(time.monotonic()),
            )  # fmt: skip
            self.keep(loading=began[0] - called)
            if self.device == "cpu":  # there a step costs more than its tokens, so the pilot's, of fewer, says little
                most = MACHINE_SHARE * self.budget.seconds
                pace, batch = measured_step(self.run_config(first), most), first.tokens_per_step
            else:
                pace = median(later - before for before, later in pairwise(began[2:]))  # the first steps compile
            expected = self.speed.seconds(first.model, batch, self.config.data.seq_len)
            self.keep(speed=dataclasses.asdict(self.speed.scaled(pace / expected)))
            loss, bits = summary.held_out.get("eval/valid/loss"), summary.held_out.get("eval/valid/bpb")
            point = Point("pilot", first.size, short.tokens, unique, loss or 1.0)
            law = scaled_to(LAWS[self.device], [point])
            self.keep(pilot={"loss": loss, "steps": short.steps, "tokens": short.tokens, "pace": pace})
            self.keep(law=dataclasses.asdict(law) if loss else None, bits_per_nat=bits / loss if bits and loss else 1.0)

    def decide(self, spent: float) -> RunConfig:
        """The run for the time that is left; shown, and asked for once."""
        if "run" not in self.kept:
            found = self.choose(spent)
            run = self.run_config(found[0])
            factor = 1.0
            if self.kept["law"]:
                factor = self.kept["law"]["E"] / LAWS[self.device].E
            for line in self.plan_lines(found, factor):
                print(f"   {t(line)}", flush=True)
            if not self.budget.confirm():
                raise UsageError("Nothing was trained. Run it again with another --minutes, or with --yes.")
            chosen = {"tokens_per_step": found[0].tokens_per_step, "steps": found[0].steps}
            model = {name: getattr(found[0].model, name) for name in (*FIELDS, "head_dim")}
            self.keep(run={"model": model, **chosen, "predicted_loss": factor * found[0].loss})
            return run
        kept = self.kept["run"]
        model_then = dataclasses.replace(self.config.model, **kept["model"])
        return self.run_config(Choice(model_then, kept["tokens_per_step"], kept["steps"], kept["predicted_loss"], 0.0))

    def plan_lines(self, found: list[Choice], factor: float) -> list[str]:
        """The plan for a person: what was chosen, and what its neighbours would give."""
        best, unique = found[0], self.kept["unique_tokens"]
        bits = self.kept["bits_per_nat"]
        total = parameter_counts(best.model)["total"]
        epochs = best.tokens / max(1, unique)
        lines = [
            f"model of {total / 1e6:.2f} M parameters, {best.model.layers} layers, width {best.model.hidden_size}",
            f"{best.steps:,} steps of {best.tokens_per_step:,} tokens, {human_count(best.tokens)} in all: "
            f"the text {epochs:.1f} times",
            f"expected on held-out text: {factor * best.loss * bits:.3f} bits per byte (loss {factor * best.loss:.3f})",
            f"time {human_seconds(self.budget.seconds)} in all{self.budget.money(self.budget.seconds)}",
        ]
        by_size = sorted(found, key=lambda each: each.size)
        place = by_size.index(best)
        for name, at in (("smaller", place - 1), ("larger", place + 1)):
            if 0 <= at < len(by_size):
                other = by_size[at]
                size = parameter_counts(other.model)["total"] / 1e6
                loss = factor * other.loss
                lines.append(f"one size {name} ({size:.2f} M): {loss * bits:.3f} bits per byte (loss {loss:.3f})")
        if epochs > 0.95 * FILL * most_epochs(unique):
            lines.append("the text is too short for this time: more would only be learned by heart, so it ends early")
        return lines

    def deadline(self, config: RunConfig, spent: float) -> Callable[[int], None]:
        """What ends the run on time; a run whose steps a person has set ends there."""
        if "train.steps" in self.given:
            return lambda _step: None
        longest = int(FILL * most_epochs(self.kept["unique_tokens"]) * self.kept["unique_tokens"])
        run, ends_at = self.workspace.run(config.train.name), time.monotonic() + self.left(spent)
        return Deadline(run, config, ends_at, max(config.train.steps, longest // config.train.tokens_per_step))


def refuse_busy_card() -> None:
    """UsageError where others use the GPU: its speed would be measured wrongly, and change on the way."""
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved()
    if used > OTHERS_BYTES:
        raise UsageError(
            f"Other processes use {used / 2**30:.1f} GiB of this GPU ({total / 2**30:.0f} GiB). End them, or choose "
            f"another GPU with CUDA_VISIBLE_DEVICES."
        )


def unique_tokens(config: RunConfig, workspace: Workspace) -> int:
    """Tokens of the sources that a run reads."""
    data: TrainingData = open_run_data(config, workspace, resumed=False)[0]
    shares = next(iter(data.shares.values()))
    return sum(split.tokens for split, share in zip(data.splits, shares, strict=True) if share)


def chat_files(folder: Path) -> list[Path]:
    """Files of conversations in what a person gave: their first record has a list of messages."""
    files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    found = []
    for path in files:
        if path.suffix.lower() in (".json", ".jsonl") and path.is_file():
            with open(path, "rb") as file:
                beginning = file.read(4096)
            if re.search(rb'"(messages|conversations)"\s*:\s*\[', beginning):
                found.append(path)
    return found


class Deadline:
    """Ends a run on time: its decay is given another end when the machine turns out faster or slower than expected.

    Called after each step of a run that is to end at `ends_at`, by time.monotonic(). At LOOKS of its time or of its
    steps, those that are left are counted anew from the pace since the look before. Where they differ, the run is asked
    to anneal over that many, as `z2a anneal` would: the rate then falls from where it stands, and the record of it is
    in the run's folder and in its checkpoints, so that a run that was killed goes on the same way.
    """

    def __init__(self, run: Path, config: RunConfig, ends_at: float, most_steps: int) -> None:
        self.run, self.ends_at, self.end, self.most_steps = run, ends_at, config.train.steps, most_steps
        self.to_share = config.schedule.min_lr_ratio
        self.looks = list(LOOKS)
        self.began: float | None = None
        self.mark = (0, 0.0)
        """The step and time from which the pace is measured."""

    def __call__(self, step: int) -> None:
        """Look, where it is time to."""
        now = time.monotonic()
        if self.began is None:  # without the first step, which compiles
            self.began, self.mark = now, (step, now)
            return
        share = max(step / self.end, (now - self.began) / max(self.ends_at - self.began, 1e-6))
        if not self.looks or share < self.looks[0]:
            return
        self.looks.pop(0)
        pace = (step - self.mark[0]) / max(now - self.mark[1], 1e-6)
        left = max(1, min(round(pace * (self.ends_at - now)), self.most_steps - step))
        self.mark = (step, now)
        if abs(left - (self.end - step)) > TOLERANCE * self.end:
            self.end = step + left
            request_anneal(self.run, left, "linear", self.to_share)
