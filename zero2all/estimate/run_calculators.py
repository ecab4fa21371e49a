"""Calculators of a run: the scaling law, time and cost, failures and how often to save.

M is the mean time between failures of the whole fleet, delta what one checkpoint stops the run for, R what a restart
takes, tau the time between checkpoints.
Young 1974: tau = sqrt(2 delta M). Daly 2006: sqrt(2 delta M) (1 + sqrt(delta/2M)/3 + delta/18M) - delta, and M where
delta is 2M or more.
Goodput: tau / (M e^(R/M) (e^((tau+delta)/M) - 1)), about 1 - delta/tau - (tau/2 + R)/M.
"""

import math
from dataclasses import dataclass

from zero2all.common.schema import MISSING, Problem
from zero2all.estimate.model_calculators import (
    HOW,
    ONE_GPU,
    CalculatorAnswer,
    Devices,
    ImpossibleError,
    Term,
    known_peak,
    lacking,
    variants,
)
from zero2all.estimate.parameters import Counted

LLAMA3_FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3 report): 1.97e-5, one per 50,677 GPU-hours."""


def young_interval(save: float, mtbf: float) -> float:
    """Young's time between checkpoints."""
    return math.sqrt(2 * save * mtbf)


def daly_interval(save: float, mtbf: float) -> float:
    """Daly's time between checkpoints."""
    if save >= 2 * mtbf:
        return mtbf
    small = save / (2 * mtbf)
    return young_interval(save, mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Share of the time that the run makes progress which is kept."""
    if (interval + save + restart) / mtbf > 700:  # e^700 is near the largest float
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))


CONVENTIONS = ("6N", "8N", "seed", "palm", "causal")
HOUR = 3600.0


@dataclass(frozen=True)
class ScalingLaw:
    """The loss that parameters N and tokens D give: L = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022). With C = 6 N D
    the best N is G (C/6)^(beta/(alpha+beta)), where G = (alpha A / (beta B))^(1/(alpha+beta))."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """In nats per token, of the paper's text and tokenizer."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def best_parameters(self, flops: float) -> float:
        """That give the least loss for 6 N D FLOPs."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return float(scale * (flops / 6) ** (self.beta / (self.alpha + self.beta)))

    def flops_for(self, parameters: float) -> float:
        """The FLOPs for which so many parameters are best."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return float(6 * (parameters / scale) ** ((self.alpha + self.beta) / self.beta))


LAWS = {
    "refit": ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    "paper": ScalingLaw(1.6934, 406.4, 410.7, 0.3392, 0.2849),
    "paper-rounded": ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28),
}
"""The refit (Besiroglu et al. 2024) is the one to use; the rounded constants of the paper contradict it."""
TOKENS_PER_PARAMETER = 20.0
"""The rule of thumb."""


def rule_of_thumb(flops: float) -> float:
    """Parameters for D = 20 N."""
    return float((flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5)


def chinchilla(
    flops: float | None = None, params: int | None = None, tokens: int | None = None, law: str = "refit"
) -> CalculatorAnswer:
    """The best parameters and tokens for a number of FLOPs, and the loss the law predicts."""
    chosen, terms = LAWS[law], []
    if flops is None and params is None:
        rule = "FLOPs of the run; or --params, alone or with --tokens"
        raise ImpossibleError([Problem("--flops", MISSING, rule)])
    if flops is None and params is not None:
        flops = 6.0 * params * tokens if tokens else chosen.flops_for(params)
    if params is not None:
        seen = tokens if tokens is not None else (flops or 0) / (6 * params)
        terms += [
            Term("tokens", seen, "tokens", "as given, or FLOPs / (6 N)"),
            Term("tokens per parameter", seen / params, "tokens", "D / N"),
            Term("loss", chosen.loss(params, seen), "nats", "E + A / N^alpha + B / D^beta"),
        ]
    if flops is not None:
        best = chosen.best_parameters(flops)
        terms += [
            Term("FLOPs", flops, "FLOP", "6 N D"),
            Term("best parameters", best, "parameters", "G (C / 6)^(beta / (alpha + beta))"),
            Term("best tokens", flops / (6 * best), "tokens", "C / (6 N)"),
            Term("best loss", chosen.loss(best, flops / (6 * best)), "nats", "E + A / N^alpha + B / D^beta"),
            Term("parameters at 20 tokens each", rule_of_thumb(flops), "parameters", f"D = {TOKENS_PER_PARAMETER:g} N"),
        ]
    convention = (
        f"L = E + A/N^alpha + B/D^beta, C = 6 N D; constants `{law}`: E {chosen.E}, A {chosen.A}, B {chosen.B}, alpha "
        f"{chosen.alpha}, beta {chosen.beta}. Loss of the paper's text and tokenizer, not of yours."
    )
    return CalculatorAnswer("Chinchilla", convention, terms)


@dataclass(frozen=True)
class RunSpeed:
    """How fast a run is, in one of three ways; None: not given."""

    mfu: float | None = None
    tflops: float | None = None
    """Model TFLOP/s of one GPU."""
    tokens_per_second: float | None = None
    """Of all GPUs."""
    convention: str | None = None
    """How FLOPs are counted. None: palm, or 6N where only the parameters are known."""
    goodput: float = 1.0
    """Share of the time that makes progress."""

    @property
    def given(self) -> list[str]:
        """The flags of the ways that were given."""
        return [name for name in SPEED_FLAGS if getattr(self, name.removeprefix("--").replace("-", "_")) is not None]


SPEED_FLAGS = ("--mfu", "--tflops", "--tokens-per-second")


def cost(
    model: Counted,
    speed: RunSpeed,
    devices: Devices = ONE_GPU,
    tokens: int | None = None,
    seq_len: int | None = None,
    price: float | None = None,
) -> CalculatorAnswer:
    """How long a run takes and, with the price of a GPU-hour, what it costs."""
    tokens, seq_len, gpus, problems = tokens or model.run_tokens, seq_len or model.seq_len, devices.gpus, []
    if tokens is None:
        problems.append(Problem("--tokens", MISSING, "the training tokens, unless a config says them"))
    if len(speed.given) != 1:
        rule = f"one of {', '.join(SPEED_FLAGS)}: how fast it runs"
        problems.append(Problem("--mfu", ", ".join(speed.given) or MISSING, rule))
    if problems or tokens is None:
        raise ImpossibleError(problems)
    found = variants(model, seq_len) | {"8N": 8.0 * model.active}
    name = speed.convention or ("palm" if "palm" in found else "6N")
    if name not in found:
        why = " ".join(lacking(model, seq_len))
        raise ImpossibleError([Problem("--convention", name, f"one of {', '.join(found)}", why)])
    how = HOW.get(name, "8 x active parameters: full recomputation counted as hardware FLOPs (Narayanan eq. 4)")
    work = found[name] * tokens
    seconds, said = _productive_seconds(speed, devices, tokens, work)
    hours = gpus * seconds / speed.goodput / HOUR
    terms = [
        Term("tokens", tokens, "tokens"),
        Term("FLOPs per token", found[name], "FLOP/token", f"{name}: {how}"),
        Term("FLOPs", work, "FLOP", "FLOPs per token x tokens"),
        Term("productive time", seconds, "s", said),
        Term("time", seconds / speed.goodput, "s", f"productive time / goodput {speed.goodput:g}"),
        Term("GPU-hours", hours, "GPU-hours", "GPUs x time"),
        Term("tokens per second", tokens / seconds, "tokens/s", "all GPUs together, while it runs"),
    ]
    if devices.gpu is not None and devices.gpu.watts:
        watts = devices.gpu.watts
        about = f"at most: {watts:g} W each, without hosts and cooling"
        terms.append(Term("energy of the GPUs", hours * watts / 1e3, "kWh", about))
    if price is not None:
        terms += [
            Term("cost", hours * price, "USD", f"GPU-hours x {price:g} per hour"),
            Term("cost of a billion tokens", 1e9 * hours * price / tokens, "USD", "cost / tokens"),
        ]
    return CalculatorAnswer(
        f"Time and cost of {model.name}, {tokens:,} tokens on {gpus} GPUs",
        f"Convention `{name}`. --mfu and --tflops mean model FLOPs in that convention, per GPU.",
        terms,
        lacking(model, seq_len),
    )


def _productive_seconds(speed: RunSpeed, devices: Devices, tokens: int, work: float) -> tuple[float, str]:
    """Seconds of a run that nothing disturbs, and how they are computed."""
    if speed.tokens_per_second is not None:
        return tokens / speed.tokens_per_second, "tokens / tokens per second"
    peak = known_peak(devices) if speed.mfu is not None or devices.gpu or devices.peak_tflops else None
    if speed.tflops is not None and peak is not None and speed.tflops * 1e12 > peak:
        raise ImpossibleError([Problem("--tflops", speed.tflops, f"at most the peak of a GPU, {peak / 1e12:g}")])
    rate = speed.tflops * 1e12 if speed.tflops is not None else (speed.mfu or 0) * (peak or 0)
    return work / (devices.gpus * rate), f"FLOPs / ({devices.gpus} x {rate / 1e12:.4g} TFLOP/s)"


DAY = 24 * HOUR


def failures(
    time: float | None = None,
    gpus: int = 1,
    mtbf: float | None = None,
    save: float = 60.0,
    restart: float = 300.0,
    interval: float | None = None,
) -> CalculatorAnswer:
    """How often a long run should save, and how much of its time failures leave; all in seconds. `mtbf` None: the rate
    of Llama 3 on so many GPUs."""
    if time is None:
        raise ImpossibleError([Problem("--time", MISSING, "the training while nothing disturbs, such as 54d")])
    between = mtbf or HOUR / (LLAMA3_FAILURES_PER_GPU_HOUR * gpus)
    daly = daly_interval(save, between)
    used = interval or daly
    kept = goodput(used, save, restart, between)
    how = "as given" if mtbf else f"1 / ({LLAMA3_FAILURES_PER_GPU_HOUR:.3g} a GPU-hour x {gpus} GPUs), as for Llama 3"
    terms = [
        Term("time between failures", between, "s", f"M, of the whole run: {how}"),
        Term("any failure in a day", -math.expm1(-DAY / between), "share", "1 - exp(-day / M)"),
        Term("Young's interval", young_interval(save, between), "s", "sqrt(2 save M)"),
        Term("Daly's interval", daly, "s", "Young's with higher terms, less the save"),
        Term("time between checkpoints", used, "s", "as given" if interval else "Daly's"),
        Term("goodput", kept, "share", "interval / (M e^(restart / M) (e^((interval + save) / M) - 1))"),
        Term("time of the run", time / kept if kept else math.inf, "s", "undisturbed time / goodput"),
    ]
    convention = (
        "Failures come at random; each loses what was computed since the last checkpoint, and a restart. A save stops "
        "training. There are spare nodes, and nothing hangs; `benchmarks/long_run.py` simulates the rest."
    )
    return CalculatorAnswer("Failures of a long run", convention, terms)
