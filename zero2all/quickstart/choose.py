"""What a text and a time buy: vocabulary, size of the model, tokens, batch and rate, and the loss to expect.

    loss     c (E + A / N^alpha + B / D'^beta)     the law of our own ladder of runs; c from a pilot on this text
    seconds  steps (host + tokens x each + FLOPs / speed)  of steps, measured on this machine

Every shape (`experiments.shapes`) gets the tokens that the time allows it, at most REPEATS times the text, of which
repetitions count less (`experiments.law.worth`); the one with the least loss is taken. Batch and rate follow those of
the preset: B ~ D^0.571 (`config.rules`), rate ~ sqrt(B) D^(-1/3). docs/speedrun.md explains each choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from zero2all.config import RunConfig
from zero2all.config.rules import BATCH_POWER, REFERENCE_BATCH, REFERENCE_TOKENS, SHORT_RUN_POWER
from zero2all.estimate.flops import flops_per_token
from zero2all.estimate.run_calculators import ScalingLaw
from zero2all.experiments.law import worth
from zero2all.experiments.shapes import FIELDS, shapes, with_width
from zero2all.model.config import ModelConfig, parameter_counts

LAWS = {
    "cpu": ScalingLaw(1.9886, 244.14, 117.5, 0.467, 0.3322),
    "cuda": ScalingLaw(1.2187, 2156.5, 1152.4, 0.55157, 0.42992),
}
"""By device: fitted to the runs in benchmarks/results/laws.json, with the preset of that device."""
PRESETS = {"cpu": "quickstart", "cuda": "z2all-100m"}
REPEATS = ((30_000, 10.0), (120_000, 8.0), (400_000, 6.0), (math.inf, 4.0))
"""(below so many tokens, how often a text is read at most): beyond that the model learns it by heart. On an H200, 59 M
tokens read 6 times gave 45 M parameters a held-out loss of 1.66; 2.7 times, 56 M parameters 1.62."""
FILL = 1.25
"""So many times more often it is read where the time would not be used otherwise; nothing is expected of it."""
MOST_PER_TOKEN = 4.0
"""Parameters in products for each token of the text, at most, for the same reason."""
LEAST_STEPS = 20
SEQ_LEN = {"cpu": 128, "cuda": 1024}
MICRO_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Tokens of a pass, at most."""
IDS_PER_ROOT = 3.0
"""Token ids for each root of a parameter in products: 3,072 at 1 M, 32,768 at 115 M, as the presets have."""
BYTES_PER_TOKEN_ID = 25
SMALLEST_VOCABULARY, VOCABULARY_MULTIPLE = 320, 64
TOKENS_PER_PARAMETER = 10.0


@dataclass(frozen=True)
class Speed:
    """How fast this machine trains: seconds of a step and of a token beside products, and FLOP/s of these. A GPU waits
    for the host at each step; a CPU spends the rest of its time on each token."""

    host: float
    each: float
    flops: float

    def seconds(self, model: ModelConfig, tokens: int, seq_len: int) -> float:
        """Of a step."""
        return self.host + tokens * (self.each + flops_per_token(model, seq_len)["causal"] / self.flops)

    def in_words(self) -> str:
        """For a person."""
        speed = self.flops / 1e9
        if self.host:
            return f"{speed:,.0f} GFLOP/s in matrix products; each step takes {self.host * 1e3:.1f} ms more"
        return f"{speed:,.0f} GFLOP/s in matrix products; each token takes {self.each * 1e6:.0f} µs more"

    def scaled(self, factor: float) -> Speed:
        """A machine that takes so many times as long."""
        return Speed(self.host * factor, self.each * factor, self.flops / factor)


@dataclass(frozen=True)
class Choice:
    """A model and its training."""

    model: ModelConfig
    tokens_per_step: int
    steps: int
    loss: float
    """By the law."""
    seconds: float

    @property
    def tokens(self) -> int:
        """Of the run."""
        return self.steps * self.tokens_per_step

    @property
    def size(self) -> int:
        """Parameters in products."""
        return parameter_counts(self.model)["matmul"]


def vocabulary(text_bytes: float, flops: float) -> int:
    """Token ids for a text and the FLOPs it is trained with: a piece that is seen only a few times teaches nothing, and
    a large head is dear in a small model."""
    size = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    wanted = min(IDS_PER_ROOT * math.sqrt(size), text_bytes / BYTES_PER_TOKEN_ID)
    return max(SMALLEST_VOCABULARY, int(wanted) // VOCABULARY_MULTIPLE * VOCABULARY_MULTIPLE)


def choices(
    config: RunConfig, unique: float, seconds: float, speed: Speed, law: ScalingLaw, given: Collection[str] = ()
) -> list[Choice]:
    """What each shape can reach in so many seconds on a text of `unique` tokens, the best first."""
    found, most = list[Choice](), most_epochs(unique) * unique
    is_given = any(f"model.{name}" in given for name in ("hidden_size", "layers", "heads", "intermediate_size"))
    for model in [config.model] if is_given else shapes(config.model):
        size = parameter_counts(model)["matmul"]
        if found and size > MOST_PER_TOKEN * unique:
            break
        tokens = unique
        for _ in range(4):  # the batch follows from the tokens, and these from the time of a step
            batch = batch_for(config, tokens, given)
            step = speed.seconds(model, batch, config.data.seq_len)
            tokens = min(seconds / step * batch, FILL * most)
        steps = config.train.steps if "train.steps" in given else int(tokens / batch)
        if steps >= min(LEAST_STEPS, config.train.steps):
            loss = law.loss(size, float(worth(min(steps * batch, most), unique)))
            found.append(Choice(model, batch, steps, loss, steps * step))
    return sorted(found, key=lambda each: each.loss)


def most_epochs(unique: float) -> float:
    """How often a text of so many tokens is read at most."""
    return next(epochs for below, epochs in REPEATS if unique < below)


def batch_for(config: RunConfig, tokens: float, given: Collection[str]) -> int:
    """Tokens of a step: by the rule, or those of a preset with its own batch scaled alike; 2, 3, 4, 6, 8, 12 … rows."""
    own = config.train.tokens_per_step
    if "train.tokens_per_step" in given:
        return own
    batch, at = (REFERENCE_BATCH, REFERENCE_TOKENS) if config.train.tokens else (own, config.train.steps * own)
    rows = max(2.0, batch * (tokens / at) ** BATCH_POWER / config.data.seq_len)
    unit = 2 ** (int(math.log2(rows)) - 1)
    return round(rows / unit) * unit * config.data.seq_len


def settings_of(config: RunConfig, choice: Choice, device: str) -> dict[str, Any]:
    """The fields of a choice. Rates are left to the rules where the preset leaves them."""
    every, seq_len = -(-choice.steps // 5), config.data.seq_len
    rows, most = choice.tokens_per_step // seq_len, max(1, MICRO_TOKENS[device] // seq_len)
    model = {f"model.{name}": getattr(choice.model, name) for name in (*FIELDS, "head_dim")}
    values: dict[str, Any] = {
        **model,
        "train.tokens": None,
        "train.tokens_per_step": choice.tokens_per_step,
        "train.steps": choice.steps,
        "train.micro_batch_samples": max(each for each in range(1, most + 1) if rows % each == 0),
        # Every state that is validated is kept, so that the best of them is there at the end.
        **dict.fromkeys(("validation.every_steps", "checkpoint.every_steps", "checkpoint.keep_every_steps"), every),
    }
    if config.train.tokens is None:  # a preset with rates of its own
        own = config.train.steps * config.train.tokens_per_step
        rate = config.optim.lr_max * math.sqrt(choice.tokens_per_step / config.train.tokens_per_step)
        values |= {
            "optim.lr_max": float(f"{rate * (own / choice.tokens) ** SHORT_RUN_POWER:.4g}"),
            "schedule.kind": "wsd",
            "schedule.decay_share": 0.65,
            "schedule.decay_shape": "linear",
            "schedule.warmup_steps": min(20, -(-choice.steps // 10)),
        }
    return values


def measured_speed(config: RunConfig, device: str, most_seconds: float) -> Speed:
    """The speed of this machine, from some real steps of two shapes, of at least three each; `most_seconds`: after so
    long no further one of a shape begins."""
    rows = max(4, MICRO_TOKENS[device] // config.data.seq_len)
    tokens, points = rows * config.data.seq_len, []
    batch = dataclasses.replace(config.train, tokens_per_step=tokens, micro_batch_samples=rows)
    for width in (64, 256) if device == "cpu" else (256, 768):
        model = with_width(config.model, width)
        seconds = measured_step(dataclasses.replace(config, model=model, train=batch), most_seconds)
        points.append((tokens * flops_per_token(model, config.data.seq_len)["causal"], seconds))
    (small, fast), (large, slow) = points
    flops = (large - small) / max(slow - fast, 0.1 * slow)  # noise can hide the difference
    beside = max(0.0, fast - small / flops)
    return Speed(0.0, beside / tokens, flops) if device == "cpu" else Speed(beside, 0.0, flops)


def measured_step(config: RunConfig, most_seconds: float) -> float:
    """Seconds of a real step, from three or more."""
    from zero2all.measure.short_run import measure_steps
    from zero2all.predict.batch import BatchShape

    rows, at_once = config.train.tokens_per_step // config.data.seq_len, config.train.micro_batch_samples
    assert isinstance(at_once, int), "the number is chosen"
    batch = BatchShape(at_once, config.data.seq_len, rows // at_once)
    return float(measure_steps(config, batch, 0.5, warm_up_seconds=0.2, most_seconds=most_seconds)["step_seconds"])
