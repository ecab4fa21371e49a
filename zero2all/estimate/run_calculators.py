"""Calculators of a run: batch, communication, bubble, scaling law, time, cost, failures, checkpoints, tokens.

The formulas that more than an answer needs stand above their calculator; those of failures in
`zero2all.estimate.failures`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero2all.common.schema import MISSING, Problem
from zero2all.estimate.answer import Answer, ImpossibleError, Term, said
from zero2all.estimate.failures import (
    any_failure,
    daly_interval,
    fleet_mtbf,
    goodput,
    goodput_approximation,
    young_interval,
)
from zero2all.estimate.gpus import Gpu
from zero2all.estimate.model_calculators import CHECKPOINT_BYTES, HOW, known_peak, lacking, variants
from zero2all.estimate.parameters import Counted

CONVENTIONS = ("6N", "8N", "seed", "palm", "causal")
HOUR = 3600.0
LEAST_GOODPUT = 0.02


def batch(
    gpus: int,
    micro_batch: int,
    seq_len: int | None = None,
    accumulation: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> Answer:
    """Replicas, global batch and tokens of a step."""
    cut = tensor * pipeline * context
    if gpus % cut:
        rule = f"a multiple of tensor x pipeline x context = {tensor} x {pipeline} x {context} = {cut}"
        raise ImpossibleError([Problem("--gpus", gpus, rule)])
    replicas = gpus // cut
    sequences = micro_batch * replicas * accumulation
    terms = [
        Term("data-parallel replicas", replicas, "replicas", "GPUs / (tensor x pipeline x context)"),
        Term("global batch", sequences, "sequences", "micro-batch x replicas x accumulation"),
    ]
    if seq_len:
        terms += [
            Term("tokens per step", sequences * seq_len, "tokens", "global batch x seq_len"),
            Term("tokens per GPU and micro-step", micro_batch * seq_len / cut, "tokens", "a replica's, over its GPUs"),
        ]
    return Answer("Batch", "A micro-batch is what one replica passes at once; a step ends with the optimizer.", terms)


# Volumes are elements that one rank sends, by the textbook; what our own trainer sends is in
# `estimate.communication`. Times: a ring sends 2 (n - 1)/n of an all-reduce and (n - 1)/n of the others over its
# links ("bus bandwidth", as in nccl-tests); a latency per hop. A double tree has fewer hops, and sends all of it twice.

RING_SHARE = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


def ring_factor(kind: str, ranks: int) -> float:
    """What a rank sends of a collective, as a share of the whole tensor."""
    return RING_SHARE[kind] * (ranks - 1) / ranks


def data_volume(parameters: float, ranks: int, zero: int) -> float:
    """Of a step (zero 0, 1), or of each micro-step for what zero 2 and 3 send there."""
    return (3 if zero == 3 else 2) * (ranks - 1) / ranks * parameters


def tensor_volume(tokens: float, hidden: float, ranks: int) -> float:
    """Of a layer, forward and backward: four all-reduces, or four all-gathers and four reduce-scatters."""
    return 8 * tokens * hidden * (ranks - 1) / ranks


def ring_attention_volume(tokens: float, kv_size: float, ranks: int) -> float:
    """Of a layer forward; twice as much backward; `tokens` of the whole group."""
    return 2 * tokens * kv_size * (ranks - 1) / ranks


def expert_volume(tokens: float, hidden: float, experts_per_token: float, ranks: int) -> float:
    """Of a layer forward, there and back; as much backward; `tokens` of the rank."""
    return 2 * tokens * experts_per_token * hidden * (ranks - 1) / ranks


def bus_seconds(kind: str, size: float, ranks: int, bus_bytes: float) -> float:
    """From a measured bus bandwidth."""
    return size * ring_factor(kind, ranks) / bus_bytes


def ring_seconds(kind: str, size: float, ranks: int, link_bytes: float, latency: float = 0.0) -> float:
    """In a ring, with a latency for each of its hops."""
    return RING_SHARE[kind] * (ranks - 1) * latency + bus_seconds(kind, size, ranks, link_bytes)


def tree_seconds(size: float, ranks: int, link_bytes: float, latency: float = 0.0) -> float:
    """All-reduce in a double tree."""
    return 2 * math.log2(ranks) * latency + 2 * size / link_bytes


def least_tokens_for_zero3(flops: float, link_bytes: float) -> float:
    """Tokens per GPU and micro-step above which computing takes longer than gathering (JAX scaling book): C/W."""
    return flops / link_bytes


def comm(
    model: Counted,
    gpus: int,
    zero: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    replicas: int = 1,
    micro_tokens: int | None = None,
    micro_steps: int = 1,
    experts_per_token: int | None = None,
    value_bytes: float = 2,
    link_gbs: float | None = None,
    latency_us: float = 0.0,
    gpu: Gpu | None = None,
) -> Answer:
    """What one rank sends in a step, by axis, and how long it takes over its link."""
    problems = []
    whole = pipeline * replicas * max(tensor * context, expert)
    if gpus % whole:
        rule = f"a multiple of pipeline x replicas x the larger of tensor x context and expert = {whole}"
        problems.append(Problem("--gpus", gpus, rule))
    inner = max(tensor, pipeline, context, expert) > 1
    if inner and (micro_tokens is None or model.hidden_size is None or model.layers is None):
        rule = "the tokens of a micro-batch; with --params also --layers and --hidden-size"
        problems.append(Problem("--micro-tokens", micro_tokens or MISSING, rule))
    if context > 1 and model.kv_size is None:
        problems.append(Problem("--context", context, "a model whose kv heads are known, not only --params"))
    chosen = experts_per_token or model.experts_per_token
    if expert > 1 and chosen is None:
        problems.append(Problem("--expert", expert, "a mixture of experts, or --experts-per-token"))
    if problems:
        raise ImpossibleError(problems)
    experts = model.parts.get("experts", 0) if expert > 1 else 0
    held = (model.total - experts) / (tensor * pipeline)
    shards = gpus // (tensor * pipeline * replicas)
    name = f"data (zero {zero})"
    volumes = {name: _data_volume(held, shards, replicas, zero, micro_steps)}
    if experts:
        ranks = gpus // (pipeline * replicas * expert)
        volumes[name] += _data_volume(experts / (pipeline * expert), ranks, replicas, zero, micro_steps)
    if inner and micro_tokens and model.hidden_size and model.layers:
        layers, hidden, steps = model.layers / pipeline, model.hidden_size, micro_steps
        mixed = (model.expert_layers or model.layers) / pipeline
        own, kv_size = micro_tokens / context, model.kv_size or 0
        volumes |= {
            "tensor": steps * layers * tensor_volume(own, hidden, tensor),
            "pipeline": steps * 2.0 * own * hidden / tensor if pipeline > 1 else 0.0,
            "context (ring)": 3 * steps * layers * ring_attention_volume(micro_tokens, kv_size, context),
            "expert": steps * mixed * 2 * expert_volume(own / tensor, hidden, chosen or 0, expert),
        }
    how = {
        f"data (zero {zero})": "zero 0-2: 2 (n-1)/n P, zero 3: 3; each micro-step zero 2 reduces, zero 3 does all",
        "tensor": "layers x 8 tokens h (t-1)/t: forward and backward",
        "pipeline": "tokens h / t to the next stage, and as much back",
        "context (ring)": "layers x 6 tokens h_kv (c-1)/c: forward once, backward twice",
        "expert": "layers with experts x 4 tokens k h (e-1)/e: there and back, forward and backward",
    }
    rate = link_gbs * 1e9 if link_gbs else gpu.link if gpu else None
    terms = []
    for name, elements in volumes.items():
        if elements:
            terms.append(Term(name, elements * value_bytes, "bytes", how[name]))
            if rate:
                terms.append(Term(f"time of {name}", elements * value_bytes / rate, "s", f"at {rate / 1e9:g} GB/s"))
    total = sum(volumes.values()) * value_bytes
    terms.append(Term("all", total, "bytes", "the sum"))
    if rate:
        size = held * value_bytes
        ranks = max(2, shards * replicas)
        how_long = f"of the gradients: 2 (n-1) latency + 2 (n-1)/n bytes / rate, {ranks} ranks"
        if experts:
            how_long = f"the same, of the gradients without those of experts, {ranks} ranks"
        bounds = "one after the other; a step takes at least the longer of this and computing, at most both"
        terms.append(Term("time of all", total / rate, "s", bounds))
        ring = ring_seconds("all-reduce", size, ranks, rate, latency_us * 1e-6)
        terms.append(Term("one all-reduce, ring", ring, "s", how_long))
        tree = tree_seconds(size, ranks, rate, latency_us * 1e-6)
        terms.append(Term("one all-reduce, double tree", tree, "s", "2 log2(n) latency + 2 bytes / rate"))
        if gpu:
            least = least_tokens_for_zero3(gpu.peak_flops, rate)
            terms.append(Term("least tokens for zero 3", least, "tokens", "per GPU and micro-step, peak / rate"))
    convention = (
        f"Bytes that one rank sends in a step of {micro_steps} micro-steps, {value_bytes:g} per element. It receives "
        "as many. By the textbook; `z2a perf predict` counts what our trainer sends."
    )
    notes = []
    if experts:
        notes.append(
            f"Experts are cut over the {expert} expert ranks, not over tensor ranks; their gradients are summed over "
            f"the {gpus // (pipeline * replicas * expert)} ranks with the same experts."
        )
    return Answer(f"Communication of {model.name} on {gpus} GPUs", convention, terms, notes)


def _data_volume(held: float, shards: int, replicas: int, zero: int, micro_steps: int) -> float:
    """Of a step. Zero 2 reduces in every micro-step and gathers once; zero 3 does all of it in every one."""
    once = data_volume(held, shards, zero)
    if zero == 2:
        once = once / 2 * (micro_steps + 1)
    elif zero == 3:
        once *= micro_steps
    between = 2 * (replicas - 1) / replicas * held / (shards if zero else 1)
    return once + between


@dataclass(frozen=True)
class Bubble:
    """Of one schedule."""

    idle: float  # time
    ideal: float  # time of m micro-batches without a bubble
    in_flight: float  # micro-batches whose activations the fullest stage keeps

    @property
    def over_ideal(self) -> float:
        """Overhead beside the ideal time."""
        return self.idle / self.ideal

    @property
    def of_total(self) -> float:
        """Share of the whole step."""
        return self.idle / (self.idle + self.ideal)


def bubbles(
    p: int, m: int, v: int = 1, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
) -> dict[str, Bubble]:
    """Idle time at the start and the end of every step, of p stages, m micro-batches, v blocks per stage. In the times
    of one micro-batch in a stage, forward F, input gradient B, weight gradient W: 1F1B and GPipe (p-1)(F+B+W),
    interleaved 1/v of it; zero bubble (Qi et al. 2023) H1 (p-1)(F+B-W), H2 (p-1)(F+B-2W), V about 0; DualPipe
    (DeepSeek-V3) (p/2-1)(FB+Bfull-3W), where FB is a forward and a backward pass that overlap, F+B+W at most.

    Every schedule; `interleaved` only for v > 1, DualPipe only for an even p; zb-h2, zb-v and DualPipe only for
    enough micro-batches."""
    F, B, W = forward, input_gradient, weight_gradient
    ideal = m * (F + B + W)
    found = {
        "gpipe": Bubble((p - 1) * (F + B + W), ideal, m),
        "1f1b": Bubble((p - 1) * (F + B + W), ideal, min(p, m)),
        "zb-h1": Bubble(max(0.0, (p - 1) * (F + B - W)), ideal, min(p, m)),
    }
    if m >= 2 * p - 1:  # with fewer, a stage has nothing to do while it waits for its first gradient
        found["zb-h2"] = Bubble(max(0.0, (p - 1) * (F + B - 2 * W)), ideal, 2 * p - 1)
        found["zb-v"] = Bubble(0.0, ideal, p)
    if v > 1:
        found["interleaved"] = Bubble((p - 1) * (F + B + W) / v, ideal, min(p * (1 + (p - 1) / (p * v)), m))
    if p % 2 == 0 and m >= 2 * p:
        found["dualpipe"] = Bubble(max(0.0, (p / 2 - 1) * ((F + B + W) + (B + W) - 3 * W)), ideal, min(p + 1, m))
    return found


def bubble(
    pipeline: int,
    micro_batches: int,
    virtual: int = 1,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Answer:
    """Idle share of a pipeline under every schedule."""
    problems = []
    if micro_batches < pipeline:
        rule = f"at least the number of stages ({pipeline}), or stages have nothing to do"
        problems.append(Problem("--micro-batches", micro_batches, rule))
    if virtual > 1 and micro_batches % pipeline:
        rule = f"a multiple of the stages ({pipeline}), for interleaved stages"
        problems.append(Problem("--micro-batches", micro_batches, rule))
    if problems:
        raise ImpossibleError(problems)
    terms = []
    for name, each in bubbles(pipeline, micro_batches, virtual, forward, input_gradient, weight_gradient).items():
        how = f"{each.idle:g} idle beside {each.ideal:g} of work"
        terms += [
            Term(f"{name}, over ideal", each.over_ideal, "share", how),
            Term(f"{name}, of the step", each.of_total, "share", "r / (1 + r)"),
            Term(f"{name}, in flight", each.in_flight, "micro-batches", "activations of the fullest stage"),
        ]
    convention = (
        f"Times of one micro-batch in a stage: forward {forward:g}, input gradient {input_gradient:g}, weight gradient "
        f"{weight_gradient:g}. Overhead over the ideal time is not the share of the step."
    )
    return Answer(f"Bubble of {pipeline} stages, {micro_batches} micro-batches", convention, terms)


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
) -> Answer:
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
    return Answer("Chinchilla", convention, terms)


def time(
    model: Counted,
    tokens: int | None = None,
    gpus: int = 1,
    gpu: Gpu | None = None,
    peak_tflops: float | None = None,
    mfu: float | None = None,
    tflops: float | None = None,
    tokens_per_second: float | None = None,
    seq_len: int | None = None,
    convention: str | None = None,
    goodput: float = 1.0,
) -> Answer:
    """How long a run takes."""
    speeds = {"--mfu": mfu, "--tflops": tflops, "--tokens-per-second": tokens_per_second}
    given = [name for name, value in speeds.items() if value is not None]
    tokens, problems = tokens or model.run_tokens, []
    if tokens is None:
        problems.append(Problem("--tokens", MISSING, "the training tokens, unless a config says them"))
    if len(given) != 1:
        rule = f"one of {', '.join(speeds)}: how fast it runs"
        problems.append(Problem("--mfu", ", ".join(given) or MISSING, rule))
    if problems or tokens is None:
        raise ImpossibleError(problems)
    seq_len = seq_len or model.seq_len
    found = variants(model, seq_len) | {"8N": 8.0 * model.active}
    name = convention or ("palm" if "palm" in found else "6N")
    if name not in found:
        raise ImpossibleError(
            [Problem("--convention", name, f"one of {', '.join(found)}", " ".join(lacking(model, seq_len)))]
        )
    how = HOW.get(name, "8 x active parameters: full recomputation counted as hardware FLOPs (Narayanan eq. 4)")
    work = found[name] * tokens
    if tokens_per_second is not None:
        seconds, speed = tokens / tokens_per_second, "tokens / tokens per second"
    else:
        peak = known_peak(gpu, peak_tflops) if mfu is not None or gpu or peak_tflops else None
        if tflops is not None and peak is not None and tflops * 1e12 > peak:
            raise ImpossibleError([Problem("--tflops", tflops, f"at most the peak of a GPU, {peak / 1e12:g}")])
        rate = tflops * 1e12 if tflops is not None else (mfu or 0) * (peak or 0)
        seconds, speed = work / (gpus * rate), f"FLOPs / ({gpus} x {rate / 1e12:.4g} TFLOP/s)"
    terms = [
        Term("tokens", tokens, "tokens"),
        Term("FLOPs per token", found[name], "FLOP/token", f"{name}: {how}"),
        Term("FLOPs", work, "FLOP", "FLOPs per token x tokens"),
        Term("productive time", seconds, "s", speed),
        Term("time", seconds / goodput, "s", f"productive time / goodput {goodput:g}"),
        Term("GPU-hours", gpus * seconds / goodput / HOUR, "GPU-hours", "GPUs x time"),
        Term("tokens per second", tokens / seconds, "tokens/s", "all GPUs together, while it runs"),
    ]
    if gpu is not None and gpu.watts:
        energy = gpus * seconds / goodput * gpu.watts / 3.6e6
        terms.append(
            Term("energy of the GPUs", energy, "kWh", f"at most: {gpu.watts:g} W each, without hosts and cooling")
        )
    return Answer(
        f"Time of {model.name}, {tokens:,} tokens on {gpus} GPUs",
        f"Convention `{name}`. --mfu and --tflops mean model FLOPs in that convention, per GPU.",
        terms,
        lacking(model, seq_len),
    )


def cost(
    model: Counted, price: float, tokens: int | None = None, gpus: int = 1, goodput: float = 1.0, **speed: object
) -> Answer:
    """What a run costs."""
    found = time(model, tokens, gpus, goodput=goodput, **speed)  # type: ignore[arg-type]
    money = found["GPU-hours"] * price
    terms = [
        *found.terms,
        Term("cost", money, "USD", f"GPU-hours x {price:g} per hour"),
        Term("cost of a billion tokens", 1e9 * money / found["tokens"], "USD", "cost / tokens"),
    ]
    total = int(found["tokens"])
    return Answer(f"Cost of {model.name}, {total:,} tokens on {gpus} GPUs", found.convention, terms, found.notes)


def failure(
    gpus: int,
    probability: float | None = None,
    interval: float | None = None,
    failures: float | None = None,
    period: float | None = None,
) -> Answer:
    """How likely a failure is, and how far apart failures are."""
    if probability is None and (failures is None or period is None):
        rule = "the share of GPUs that fail in --interval; or --failures seen in --period on --gpus"
        raise ImpossibleError([Problem("--probability", MISSING, rule)])
    if probability is None and failures is not None and period is not None:
        mtbf = period / failures
        probability = (interval or HOUR) / (mtbf * gpus)
        if probability > 1 and interval is not None:
            rule = f"shorter than {said(mtbf * gpus, 's')}, in which every GPU fails once"
            raise ImpossibleError([Problem("--interval", said(interval, "s"), rule)])
        if probability > 1:
            rule = f"longer than {said(failures * HOUR / gpus, 's')}, or every GPU fails more than once an hour"
            hint = f"A time without a unit is in seconds: {period:g} days are {period:g}d."
            raise ImpossibleError([Problem("--period", said(period, "s"), rule, hint)])
    interval = HOUR if interval is None else interval
    chance = probability or 0.0
    mtbf, in_a_day = fleet_mtbf(interval, chance, gpus), any_failure(any_failure(chance, 86400 / interval), gpus)
    terms = [
        Term("p", chance, "share", f"of one GPU to fail in {interval:g} s"),
        Term("any failure in the interval", any_failure(chance, gpus), "share", "1 - (1 - p)^n"),
        Term("any failure in 24 h", in_a_day, "share", "1 - (1 - p)^(n x 24 h)"),
        Term("mean time between failures", mtbf, "s", "interval / (n p), of all GPUs"),
        Term("GPU-hours per failure", mtbf * gpus / HOUR, "GPU-hours", "MTBF x n"),
    ]
    return Answer(f"Failures of {gpus} GPUs", "Failures are independent, and any one stops the run.", terms)


def checkpoint(
    mtbf: float,
    save: float | None = None,
    restart: float = 600.0,
    every: float | None = None,
    model: Counted | None = None,
    write_gbs: float | None = None,
) -> Answer:
    """How often to save, and the goodput."""
    terms = []
    if model is not None:
        size = CHECKPOINT_BYTES * model.total if model.checkpoint_bytes is None else model.checkpoint_bytes
        how = f"{size / model.total:.4g} P: masters and the state of {model.optimizer}"
        terms.append(Term("checkpoint", size, "bytes", how))
        if save is None and write_gbs:
            save = size / (write_gbs * 1e9)
    if save is None:
        rule = "how long a save stops the run; or a model and --write-gbs"
        raise ImpossibleError([Problem("--save", MISSING, rule)])
    best = daly_interval(save, mtbf)
    terms += [
        Term("save", save, "s", "delta: how long one stops the run"),
        Term("Young", young_interval(save, mtbf), "s", "sqrt(2 delta M)"),
        Term("Daly", best, "s", "sqrt(2 delta M) (1 + sqrt(delta/2M)/3 + delta/18M) - delta"),
    ]
    notes = []
    for name, interval in (("Daly", best), ("--every", every)):
        if interval:
            kept = goodput(interval, save, restart, mtbf)
            rough = goodput_approximation(interval, save, restart, mtbf)
            terms.append(Term(f"goodput at {name}", kept, "share", "tau / (M e^(R/M) (e^((tau+delta)/M) - 1))"))
            if rough > 0:  # else saves and restarts are not short beside M
                terms.append(Term(f"goodput at {name}, about", rough, "share", "1 - delta/tau - (tau/2 + R)/M"))
            terms.append(Term(f"time saving at {name}", save / (interval + save), "share", "delta / (tau + delta)"))
            if kept < LEAST_GOODPUT:
                notes.append(
                    f"The run makes no progress at {name}: a failure comes every {mtbf:g} s, a save takes {save:g} s, "
                    f"a restart {restart:g} s. Save and restart faster, or use fewer GPUs."
                )
    convention = (
        f"M {mtbf:g} s between failures of the whole run, restart R {restart:g} s; a failure loses what was not saved."
    )
    return Answer("Checkpoints", convention, terms, notes)


def tokens(
    rows: float, mean_length: float, tokens_per_character: float, epochs: float = 1.0, params: int | None = None
) -> Answer:
    """Tokens of a text before it is tokenised."""
    found = epochs * rows * mean_length * tokens_per_character
    terms = [
        Term("characters", rows * mean_length, "characters", "rows x mean length"),
        Term("tokens of one epoch", found / epochs, "tokens", "characters x tokens per character"),
        Term("tokens", found, "tokens", f"x {epochs:g} epochs"),
        Term("parameters at 20 tokens each", found / epochs / TOKENS_PER_PARAMETER, "parameters", "one epoch / 20"),
    ]
    if params:
        terms.append(Term("tokens per parameter", found / params, "tokens", "all epochs"))
    convention = "English: about 0.25 tokens a character, Chinese about 0.6; measure yours with `z2a tokenizer eval`."
    return Answer("Tokens of a text", convention, terms)
