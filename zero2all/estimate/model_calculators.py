"""Calculators of a model: its parameters, FLOPs, utilisation, states, generating; one matmul against the roofline.

Each returns a `CalculatorAnswer`: every number with its unit, the formula that makes it, and the convention.
`zero2all.cli.perf_calculators` reads the arguments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.schema import MISSING, Problem
from zero2all.estimate.floors import decoding_bytes, least_seconds, matmul_bytes, matmul_flops, tiling
from zero2all.estimate.flops import CONVENTIONS, conventions, flops_by_group
from zero2all.estimate.gpus import GPUS, Gpu
from zero2all.estimate.parameters import Counted
from zero2all.model.config import ModelConfig

PREFIXED = {"FLOP", "FLOP/s", "FLOP/token", "MAC/token"}
"""Units that take a decimal prefix: 51.5 GFLOP."""
DURATIONS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Term:
    """One number. JSON has it in its base unit: bytes, seconds, FLOP, a share of 1."""

    name: str
    value: float
    unit: str
    formula: str = ""


@dataclass(frozen=True)
class CalculatorAnswer:
    """What a calculator found."""

    title: str
    convention: str
    terms: Sequence[Term]
    notes: Sequence[str] = ()

    def __getitem__(self, name: str) -> float:
        """The value of a term."""
        return next(term.value for term in self.terms if term.name == name)

    def as_json(self) -> dict[str, Any]:
        """One form for all calculators."""
        terms = {term.name: {"value": term.value, "unit": term.unit, "formula": term.formula} for term in self.terms}
        return {"title": self.title, "convention": self.convention, "terms": terms, "notes": list(self.notes)}

    def rows(self) -> list[list[str]]:
        """A table with its heading."""
        said_terms = ([t(term.name), said(term.value, term.unit), t(term.formula)] for term in self.terms)
        return [["what", "value", "how"], *said_terms]


class ImpossibleError(UsageError):
    """Input with one or more problems, each with the rule it breaks."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__(f"Nothing was computed; problems: {len(problems)}.\n" + lines)


def said(value: float, unit: str) -> str:
    """A number as a person reads it: 31.41 GB = 29.25 GiB, 33.8 d, 45.7 %, 6,738,415,616 parameters."""
    if not math.isfinite(value):
        return t("never") if unit == "s" else str(value)
    if unit == "share":
        return f"{100 * value:.4g} %"
    if unit == "bytes":
        return f"{_prefixed(value, 'B', 1000)} = {_prefixed(value, 'B', 1024)}" if value >= 1000 else f"{value:g} B"
    if unit == "s":
        size, name = next((pair for pair in DURATIONS if value >= pair[0]), DURATIONS[-1])
        return f"{value / size:.4g} {name}"
    if unit == "bytes/s":
        return _prefixed(value, "B/s", 1000)
    if unit in PREFIXED:
        return _prefixed(value, unit, 1000)
    if unit == "USD":
        return f"{value:,.2f} USD"
    number = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1e4 else f"{value:,.4g}"
    large = f" ({value / 1e9:.4g} B)" if unit in ("parameters", "tokens") and value >= 1e9 else ""
    return f"{number} {t(unit)}{large}".rstrip()


def _prefixed(value: float, unit: str, base: int) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z", "Y") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0 if abs(value) < 1 else min(int(math.log(abs(value), base) + 1e-9), len(prefixes) - 1)
    return f"{value / base**power:,.4g} {prefixes[power]}{unit}"


HOW = {
    "6N": "6 x active parameters, no attention",
    "seed": "6 x active parameters + 12 x attention width x seq_len (all positions)",
    "palm": "6 x matmul parameters + 12 x attention width x seq_len (all positions)",
    "causal": "6 x matmul parameters + 6 x attention width x seq_len (causal half)",
}
CONVENTION = (
    "Training FLOPs of one token, forward and backward; 1 multiply-add (MAC) = 2 FLOPs, backward = 2 x forward. "
    "Recomputation is not counted (MFU); what is counted with it is called hardware (HFU)."
)
INFERENCE_BYTES = {"float32 and bfloat16 copy": 6, "float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}
"""Per parameter."""
USUAL_STEP = 256
"""Sequences of a step, where no config says how many."""
RECOMPUTED = ("none", "selective", "full")
"""What the backward pass computes again: nothing, attention, the blocks."""


@dataclass(frozen=True)
class Devices:
    """The GPUs of a run."""

    gpus: int = 1
    gpu: Gpu | None = None
    peak_tflops: float | None = None
    """Dense peak of one, where it is not a known one."""


ONE_GPU = Devices()


def known_peak(devices: Devices, problems: list[Problem] | None = None) -> float:
    """Dense bfloat16 FLOP/s of one GPU: as given, or from the data sheet. Other `problems` are reported with its
    absence."""
    problems, gpu, peak = [] if problems is None else problems, devices.gpu, devices.peak_tflops
    if peak is None and gpu is None:
        hint = f"Give --peak-tflops, or --gpu with one of: {', '.join(GPUS)}."
        problems.append(Problem("--gpu", MISSING, "an accelerator whose peak is known, or its peak", hint))
    if problems:
        raise ImpossibleError(problems)
    return peak * 1e12 if peak is not None else gpu.peak_flops if gpu else 0.0


def variants(model: Counted, seq_len: float | None) -> dict[str, float]:
    """FLOPs per token under every convention for which enough of the model is known."""
    found = {"6N": 6.0 * model.active}
    width = model.attention_width
    if width is None or seq_len is None:
        return found
    matmul = model.matmul
    ours = conventions(model.active, matmul or 0, width, seq_len)
    return found | (ours if matmul is not None else {"seed": ours["seed"]})


def lacking(model: Counted, seq_len: float | None) -> list[str]:
    """Why conventions are missing."""
    if model.attention_width is None or seq_len is None:
        return ["Without --layers, --hidden-size and --seq-len attention cannot be counted."]
    return [] if model.matmul else ["Without --vocab-size the embedding cannot be told from what multiplies."]


def hardware_flops(model: Counted, found: dict[str, float], recompute: str, name: str = "causal") -> float | None:
    """FLOPs per token with those of a second forward pass, by the convention `name`; None where too little is known. Of
    a model whose attention is not known, 8 N with full recomputation (Narayanan eq. 4)."""
    if name == "6N":
        return 8.0 * model.active if "causal" not in found and recompute == "full" else None
    if "causal" not in found or recompute == "none":
        return found.get(name) if recompute == "none" else None
    attention = (found["palm"] - found["causal"]) / (3 if name == "causal" else 1.5)
    head = model.parts.get("head", model.parts.get("embedding"))
    if recompute == "selective":
        return found[name] + attention
    return None if head is None else found[name] + attention + 2.0 * ((model.matmul or 0) - head)


def params(model: Counted) -> CalculatorAnswer:
    """Parameters by part."""
    terms = [Term(part, count, "parameters") for part, count in model.parts.items()]
    terms += [
        Term("total", model.total, "parameters", " + ".join(model.parts)),
        Term("active", model.active, "parameters", "total - experts that a token does not go to"),
    ]
    if model.matmul is not None:
        terms.append(Term("matmul", model.matmul, "parameters", "active - lookup - norms - biases; the head once"))
    terms += [
        Term("weights in float32", 4 * model.total, "bytes", "4 x total"),
        Term("weights in bfloat16", 2 * model.total, "bytes", "2 x total"),
    ]
    return CalculatorAnswer(
        f"Parameters of {model.name}",
        "B = 10^9 parameters; GB = 10^9 bytes, GiB = 2^30. Tied tables count once.",
        terms,
    )


def flops(
    model: Counted,
    seq_len: int | None = None,
    tokens: int | None = None,
    gpu: Gpu | None = None,
) -> CalculatorAnswer:
    """FLOPs per token under every convention, attention's share, and the work of `tokens` tokens by group."""
    seq_len = seq_len or model.seq_len
    found = variants(model, seq_len)
    terms = [Term(name, value, "FLOP/token", HOW[name]) for name, value in found.items()]
    if "causal" in found:
        attention = found["palm"] - found["causal"]
        forward = found["causal"] / 3
        terms += [
            Term("causal attention", attention, "FLOP/token", "6 x attention width x seq_len; full: twice"),
            Term("share of causal attention", attention / found["causal"], "share", "of `causal`"),
            Term("forward", forward, "FLOP/token", "causal / 3; backward: 2/3"),
            Term("forward in MACs", forward / 2, "MAC/token", "1 MAC = 2 FLOPs"),
        ]
        again = ("causal + attention once more", "causal + the blocks once more, not the head")
        for kind, how in zip(("selective", "full"), again, strict=True):
            if (executed := hardware_flops(model, found, kind)) is not None:
                terms.append(Term(f"hardware, {kind} recompute", executed, "FLOP/token", how))
    notes = lacking(model, seq_len)
    if model.config is not None and seq_len:
        terms += _groups(model.config, tokens or model.step_tokens or USUAL_STEP * seq_len, seq_len, gpu)
        notes.append(
            "torch's FlopCounterMode counts `palm` x tokens with plain operators: every matmul, no norms, the masked "
            "half of attention too. Flash attention's backward executes 5 matmuls beside 2 forward, so kernel "
            "benchmarks count 3.5 x its forward; MFU counts 3 x."
        )
    return CalculatorAnswer(f"FLOPs of {model.name}, seq_len {seq_len or '?'}", CONVENTION, terms, notes)


def _groups(model: ModelConfig, tokens: int, seq_len: int, gpu: Gpu | None) -> list[Term]:
    groups = flops_by_group(model, tokens, seq_len)
    whole = sum(group.flops for group in groups.values())
    terms = [
        Term(f"{name}, {tokens:,} tokens", group.flops, "FLOP", f"{group.flops / whole:.3%} of the FLOPs")
        for name, group in groups.items()
    ]
    if gpu is None:
        return terms
    rate = gpu.matmul_flops or gpu.peak_flops
    seconds = {name: least_seconds(each.flops, each.bytes, rate, gpu.bandwidth) for name, each in groups.items()}
    total = sum(seconds.values())
    terms += [
        Term(f"time of {name}", each, "s", f"{each / total:.1%} of the least time; {_limit(groups[name].bytes, gpu)}")
        for name, each in seconds.items()
    ]
    return [*terms, Term("least time", total, "s", f"matmuls at {rate / 1e12:g} TFLOP/s; one optimizer step")]


def _limit(moved: float, gpu: Gpu) -> str:
    return f"{moved / 1e9:,.4g} GB at {gpu.bandwidth / 1e12:g} TB/s" if moved else "bound by arithmetic"


def mfu(
    model: Counted,
    tokens_per_second: float | None = None,
    devices: Devices = ONE_GPU,
    seq_len: int | None = None,
    recompute: str = "none",
) -> CalculatorAnswer:
    """Utilisation in every convention: tokens/s x FLOPs per token / (GPUs x peak)."""
    problems, gpus, gpu = [], devices.gpus, devices.gpu
    if tokens_per_second is None:
        problems.append(Problem("--tokens-per-second", MISSING, "the speed of all GPUs together"))
    peak = known_peak(devices, problems)
    assert tokens_per_second is not None
    seq_len = seq_len or model.seq_len
    found = variants(model, seq_len)
    terms = [
        Term("speed", tokens_per_second, "tokens/s", "all GPUs together"),
        Term("peak", gpus * peak, "FLOP/s", f"{gpus} x {peak / 1e12:g} TFLOP/s, dense bfloat16"),
    ]
    for name, each in found.items():
        share = tokens_per_second * each / (gpus * peak)
        terms.append(Term(f"MFU {name}", share, "share", f"{each / 1e9:.4g} GFLOP/token: {HOW[name]}"))
    headline = "palm" if "palm" in found else "6N"
    if gpu is not None and gpu.matmul_flops:
        share = tokens_per_second * found[headline] / (gpus * gpu.matmul_flops)
        best = f"{gpu.matmul_flops / 1e12:g} TFLOP/s"
        how = f"of {best}, the best matmul that was published for it"
        if gpu.name in ("h100", "h200"):
            how = f"of {best}, the best matmul that was published: one figure for H100 and H200, whose chip is the same"
        terms.append(Term(f"MAMFU {headline}", share, "share", how))
    executed = {name: hardware_flops(model, found, recompute, name) for name in ("6N", *CONVENTIONS)}
    for name, flops in executed.items() if recompute != "none" else ():
        if flops is not None:
            how = f"{flops / 1e9:.4g} GFLOP/token: {name}, with what is recomputed"
            terms.append(Term(f"HFU {recompute}, {name}", tokens_per_second * flops / (gpus * peak), "share", how))
    notes = [f"Headline: {headline}. Compare only figures of one convention and one peak.", *lacking(model, seq_len)]
    if recompute != "none" and not any(executed.values()):
        notes.append(f"No HFU: what {recompute} recomputation adds depends on the attention, which is not known here.")
    least = min(found.values())
    if tokens_per_second * least > gpus * peak:
        most = f"at most {gpus * peak / least:,.0f} tokens/s: the peak of {gpus} GPUs"
        hint = "Check GPUs, peak, and the unit of the speed."
        raise ImpossibleError([Problem("--tokens-per-second", tokens_per_second, most, hint)])
    over = [term.name for term in terms if term.unit == "share" and term.value > 1]
    if over:
        notes.append(f"Above 100 %, because this convention counts too much: {', '.join(over)}.")
    if "seed" in found:
        notes.append(
            "`seed` is the convention of our result files and of Gstdioh/llm-zero2all, whose tables we compare with."
        )
    return CalculatorAnswer(f"Utilisation of {model.name}", CONVENTION, terms, notes)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter. AdamW in bfloat16: 2 for the weight, 2 for the gradient, 12 for the float32 master and two
    moments."""

    weights: float
    gradients: float
    optimizer: float  # with masters

    @property
    def total(self) -> float:
        """Of all three."""
        return self.weights + self.gradients + self.optimizer


RECIPES = {
    "adamw": StateBytes(2, 2, 12),
    "adamw-fp32-gradients": StateBytes(2, 4, 12),
    "adamw-fp32": StateBytes(4, 4, 8),
    "adamw-bf16": StateBytes(2, 2, 4),
    "adamw-8bit": StateBytes(2, 2, 6),
    "lion": StateBytes(2, 2, 8),
    "sgd-momentum": StateBytes(2, 2, 8),
    "sgd": StateBytes(2, 2, 4),
}
"""With float32 masters (4 in `optimizer`), except for `adamw-fp32`, whose weights are them, and `adamw-bf16`."""


CHECKPOINT_BYTES = RECIPES["adamw"].optimizer
"""Of a parameter in a checkpoint of a run with AdamW: float32 master and two moments. The bfloat16 weights are the
masters rounded, so they are not saved. Of other optimizers: `zero2all.estimate.memory.checkpoint_bytes`."""


def zero_bytes(parameters: float, ranks: int, recipe: StateBytes = RECIPES["adamw"]) -> dict[int, float]:
    """Bytes that each of `ranks` holds, by stage: ZeRO cuts over n ranks, stage 1 the optimizer's, stage 2 also the
    gradients, stage 3 also the weights. What our own trainer holds: `zero2all.estimate.memory`."""
    w, g, o = recipe.weights, recipe.gradients, recipe.optimizer
    per_parameter = (w + g + o, w + g + o / ranks, w + (g + o) / ranks, (w + g + o) / ranks)
    return {stage: parameters * each for stage, each in enumerate(per_parameter)}


def zero(model: Counted, gpus: int, recipe: str = "adamw") -> CalculatorAnswer:
    """What each rank holds of weights, gradients and optimizer states, by ZeRO stage."""
    states = RECIPES[recipe]
    w, g, o = states.weights, states.gradients, states.optimizer
    how = (
        f"({w:g} + {g:g} + {o:g}) P",
        f"({w:g} + {g:g}) P + {o:g} P / n",
        f"{w:g} P + ({g:g} + {o:g}) P / n",
        f"({w:g} + {g:g} + {o:g}) P / n",
    )
    terms = [Term("P", model.total, "parameters"), Term("n", gpus, "GPUs")]
    terms += [
        Term(f"zero {stage}", each, "bytes", how[stage])
        for stage, each in zero_bytes(model.total, gpus, states).items()
    ]
    terms += [
        Term("weights", w * model.total, "bytes", f"{w:g} P, whole"),
        Term("gradients", g * model.total, "bytes", f"{g:g} P, whole"),
        Term("optimizer states", o * model.total, "bytes", f"{o:g} P, whole, with masters"),
    ]
    size = CHECKPOINT_BYTES * model.total if model.checkpoint_bytes is None else model.checkpoint_bytes
    saved = f"{size / model.total:.4g} P: masters and the state of {model.optimizer}"
    terms.append(Term("checkpoint", size, "bytes", saved))
    convention = (
        "Bytes of one rank (Rajbhandari et al. 2020), without activations, gathered weights and buffers. "
        "`z2a perf memory` counts those, and the float32 gradients of our trainer."
    )
    return CalculatorAnswer(f"ZeRO of {model.name}, {recipe}", convention, terms)


def inference(
    model: Counted, seq_len: int | None = None, sequences: int = 1, gpu: Gpu | None = None, cache_value_bytes: float = 2
) -> CalculatorAnswer:
    """Memory and the least time of generating."""
    seq_len = seq_len or model.seq_len or 2048
    terms = [
        Term(f"weights, {name}", each * model.total, "bytes", f"{each:g} bytes x parameters")
        for name, each in INFERENCE_BYTES.items()
    ]
    terms.append(Term("2N", 2.0 * model.active, "FLOP/token", "2 x active parameters, without attention"))
    terms.append(Term("prompts", 2.0 * model.active * seq_len * sequences, "FLOP", "2 N D, D tokens of all prompts"))
    cache = 0.0
    if model.cache_values is not None:
        one = model.cache_values * cache_value_bytes
        cache = one * seq_len * sequences
        how = "layers x 2 x kv_heads x head width x bytes (MLA: kv rank + rope width)"
        terms += [
            Term("KV cache of a token", one, "bytes", how),
            Term("KV cache", cache, "bytes", f"{seq_len:,} tokens x {sequences} sequences"),
        ]
    if gpu is not None:
        read = 2.0 * (model.active if sequences == 1 else model.total) + cache
        if model.config is not None:
            read = decoding_bytes(model.config, sequences, seq_len, 2, cache_value_bytes)
        seconds = least_seconds(2.0 * model.active * sequences, read, gpu.peak_flops, gpu.bandwidth)
        rate = f"{gpu.bandwidth / 1e12:g} TB/s"
        terms += [
            Term("least time of a token", seconds, "s", f"bfloat16 matrices and cache, no embedding table, at {rate}"),
            Term("most tokens per second", sequences / seconds, "tokens/s", "all sequences together"),
            Term("sequences to be compute-bound", gpu.ridge, "sequences", "peak / bandwidth, at 2 bytes a weight"),
        ]
    note = (
        "6 GB per 1 B parameters holds for weights kept in float32 with a bfloat16 copy, without a cache and without "
        "training; bfloat16 alone takes 2 GB, training with AdamW 16 GB."
    )
    convention = "Forward only: 2 FLOPs per active parameter and token. Memory of all GPUs together."
    return CalculatorAnswer(f"Generating with {model.name}", convention, terms, [note])


def roofline(m: int, n: int, k: int, gpu: Gpu, tile: tuple[int, int] = (128, 256)) -> CalculatorAnswer:
    """A matmul (m, k) x (k, n) of 16-bit values: its intensity beside the ridge of a device, least time, tiles and
    waves."""
    peak, bandwidth, rate = gpu.peak_flops, gpu.bandwidth, gpu.matmul_flops or gpu.peak_flops
    work, moved = matmul_flops(m, n, k), matmul_bytes(m, n, k, 2)
    bound = "bound by arithmetic" if work / moved > peak / bandwidth else "bound by memory"
    is_slower = work / rate > moved / bandwidth
    terms = [
        Term("peak", peak, "FLOP/s", "dense bfloat16, data sheet"),
        Term("bandwidth", bandwidth, "bytes/s", "of the memory"),
        Term("ridge", peak / bandwidth, "FLOP/byte", "peak / bandwidth"),
        Term("least tokens", peak / bandwidth, "tokens", "per weight read, to be compute-bound"),
        Term("FLOPs", work, "FLOP", "2 m n k"),
        Term("bytes", moved, "bytes", "2 (m k + k n + m n)"),
        Term("intensity", work / moved, "FLOP/byte", f"FLOPs / bytes: {bound}"),
        Term(
            "least time",
            least_seconds(work, moved, rate, bandwidth),
            "s",
            f"at {rate / 1e12:g} TFLOP/s" if is_slower else f"at {bandwidth / 1e12:g} TB/s",
        ),
    ]
    if gpu.units:
        cut = tiling(m, n, gpu.units, *tile)
        terms += [
            Term("number of tiles", cut.tiles, "tiles", f"of {tile[0]} x {tile[1]}"),
            Term("number of waves", cut.waves, "waves", f"tiles / {gpu.units} SMs, rounded up"),
            Term("wave efficiency", cut.wave_efficiency, "share", "tiles / (waves x SMs)"),
            Term("tile efficiency", cut.tile_efficiency, "share", "m n / (tiles x tile)"),
        ]
    return CalculatorAnswer(
        "Roofline",
        "Each operand read once, the result written once; an operation takes at least the larger of "
        "FLOPs / rate and bytes / bandwidth.",
        terms,
    )
