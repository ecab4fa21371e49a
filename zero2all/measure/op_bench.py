"""Each operator and implementation alone: time, share of the floor, error against float64.

An operator that fails is one row with the reason. Backward is the time of forward and backward less that of forward
alone, because some implementations overwrite their inputs, so a backward cannot be repeated.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.common.schema import nearest_hint
from zero2all.config import RunConfig
from zero2all.estimate.floors import Work, linear_shapes, operator_work, optimizer_work
from zero2all.estimate.run.batch import own_batch
from zero2all.measure.step_timer import device_name, wait_for
from zero2all.measure.variants import NAIVE
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_tables
from zero2all.ops import linear_cross_entropy
from zero2all.ops.config import OpsConfig
from zero2all.ops.gradient_sink import GradientSink, take_from_autograd
from zero2all.ops.implementation import Implementation, OpContext
from zero2all.ops.optimizer import AdamW, Flat, eager_adamw
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.ops.split_master import join, split
from zero2all.parallel.device import pick_device
from zero2all.train.build import op_context
from zero2all.train.state import DTYPES

EXACT_ROWS = {"cuda": 512, "cpu": 64}  # tokens of the comparison with float64: few, so that it fits in memory
CPU_TOKENS, CPU_PARAMETERS = 256, 2_000_000  # default sizes where a full micro-batch would take minutes
EXACT_PARAMETERS = 65_536
LEAST_SECONDS = 0.2
LEAST_CALLS = 3


@dataclass(frozen=True)
class Ceilings:
    """Measured upper limits of this device."""

    copy_bytes_per_second: float  # read and written, by a plain copy of one large tensor
    matmul_flops_per_second: float  # of a large square matmul, in a short burst


@dataclass(frozen=True)
class BenchRow:
    """One implementation of one operator."""

    operator: str
    implementation: str
    taken_by_auto: bool
    problem: str | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    rate: float | None = None  # bytes or FLOPs of the floor per second, forward and backward together
    is_matmul: bool = False
    floor_ms: float | None = None
    floor_percent: float | None = None  # floor / time: 100 is the best there can be
    error: float | None = None  # largest relative error (L2) of an output or gradient against float64


@dataclass(frozen=True)
class Bench:
    """All rows, and the limits they are compared with."""

    device: str
    dtype: str
    samples: int
    seq_len: int
    ceilings: Ceilings
    rows: list[BenchRow]


def operator_names(config: RunConfig) -> list[str]:
    """What can be measured; each linear layer of a block is one entry."""
    names: list[str] = []
    for operator in OPERATORS:
        names += [f"linear/{part}" for part in linear_shapes(config.model)] if operator == "linear" else [operator]
    return names


def bench_operators(
    config: RunConfig, tokens: int | None, only: str | None, least_seconds: float, each: Callable[[Bench], None]
) -> Bench:
    """Measure; `each` gets the results so far after every operator."""
    device, dtype = pick_device(config.parallel.device), DTYPES[config.train.precision]
    names = operator_names(config)
    wanted = [name for name in names if only is None or only in (name, name.partition("/")[0])]
    if not wanted:
        hint = nearest_hint(only or "", names)
        problem = f"There is no operator {only}. The operators are: {', '.join(names)}."
        raise UsageError(f"{problem} {hint}" if hint else problem)
    samples, seq_len = batch_of(config, tokens, device)
    say(f"ops bench: {device_name(device)}: measuring copy and matmul rates first")
    ceilings = measured_ceilings(device, dtype, least_seconds)
    bench = Bench(device_name(device), str(dtype).removeprefix("torch."), samples, seq_len, ceilings, [])
    automatic = resolve(type(config.ops)(), context_here(config)).taken
    for name in wanted:
        operator = name.partition("/")[0]
        say(f"ops bench: {name}")
        for implementation in OPERATORS[operator]:
            taken = automatic[operator] == implementation.name
            bench.rows.append(_row(name, implementation, taken, config, bench, least_seconds))
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        each(bench)
    return bench


def batch_of(config: RunConfig, tokens: int | None, device: torch.device) -> tuple[int, int]:
    """Samples and their length: the config's micro-batch, or what makes about `tokens`."""
    seq_len = config.data.seq_len
    if tokens is None:
        tokens = own_batch(config).samples * seq_len
        tokens = tokens if device.type == "cuda" else min(tokens, CPU_TOKENS)
    return max(1, tokens // seq_len), min(seq_len, tokens)


def _row(
    name: str, implementation: Implementation, taken: bool, config: RunConfig, bench: Bench, least_seconds: float
) -> BenchRow:
    where, device, dtype = context_here(config), pick_device(config.parallel.device), DTYPES[config.train.precision]
    if (problem := implementation.probe(where)) is not None:
        return BenchRow(name, implementation.name, taken, problem)
    try:
        torch.manual_seed(0)
        if name == "optimizer":
            work, forward, backward, error = _optimizer(implementation, config, device, dtype, least_seconds)
        else:
            function = _function(name, implementation, where)
            work = operator_work(config.model, bench.samples * bench.seq_len, bench.seq_len, dtype.itemsize)[name]
            case = make_case(name, config.model, bench.samples, bench.seq_len, device)
            forward, backward = _times(function, case, device, dtype, least_seconds)
            del case
            error = _error(name, function, config, bench.seq_len, device, dtype)
    except Exception as failure:
        first = str(failure).splitlines()[0] if str(failure) else ""
        return BenchRow(name, implementation.name, taken, f"{type(failure).__name__}: {first}"[:200])
    ceiling = bench.ceilings.matmul_flops_per_second if work.is_matmul else bench.ceilings.copy_bytes_per_second
    floor = work.total / ceiling
    return BenchRow(
        operator=name,
        implementation=implementation.name,
        taken_by_auto=taken,
        forward_ms=1e3 * forward,
        backward_ms=1e3 * backward,
        rate=work.total / (forward + backward),
        is_matmul=work.is_matmul,
        floor_ms=1e3 * floor,
        floor_percent=100 * floor / (forward + backward),
        error=error,
    )


def _function(name: str, implementation: Implementation, where: OpContext) -> Function:
    """The implementation as the model calls it."""
    if name == "linear_cross_entropy" and implementation.name == "off":
        return linear_cross_entropy.through_cross_entropy(resolve(OpsConfig(), where).cross_entropy)
    return implementation.function


def _times(
    function: Function, case: Case, device: torch.device, dtype: torch.dtype, least_seconds: float
) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    forward, both = forward_and_both(function, case, dtype)
    alone = seconds_of(forward, device, least_seconds)
    together = seconds_of(both, device, least_seconds)
    return alone, max(together - alone, 0.0)


def forward_and_both(
    function: Function, case: Case, dtype: torch.dtype
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What runs the forward pass of a case, and what runs forward and backward; the case gives its inputs away."""
    inputs = [value.to(dtype).requires_grad_() for value in case.inputs]
    case.inputs.clear()
    gathers = case.gathers_into_main and dtype != torch.float32
    if gathers:
        gather_into_main(inputs[-1])
    outputs = case.call(function, inputs)
    directions = [torch.randn_like(output) for output in outputs]
    del outputs

    def forward() -> tuple[Tensor, ...]:
        return case.call(function, inputs)

    def both() -> None:
        if not gathers:
            # Not into `.grad`: torch would copy a gradient that two inputs share, which no model does.
            torch.autograd.grad(forward(), inputs, directions)
            return
        torch.autograd.backward(forward(), directions)
        for value in inputs:
            value.grad = None

    return forward, both


def gather_into_main(weight: Tensor) -> None:
    """As `zero2all.train.weights` does: gradients are summed in float32, by the operator or after it."""
    weight.gradient_sink = GradientSink(torch.zeros(weight.shape, device=weight.device))  # type: ignore[attr-defined]
    take_from_autograd(weight)


def _error(
    name: str, function: Function, config: RunConfig, seq_len: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Largest relative error of outputs and gradients on a few tokens."""
    operator = name.partition("/")[0]
    exact = {one.name: one.function for one in OPERATORS[operator]}[NAIVE[operator]]
    if operator == "linear_cross_entropy":
        from zero2all.ops.cross_entropy import eager_cross_entropy

        exact = linear_cross_entropy.through_cross_entropy(eager_cross_entropy)
    case = make_case(name, config.model, 1, min(seq_len, EXACT_ROWS[device.type]), device)
    rounded = [value.to(dtype) for value in case.inputs]  # both sides start from the same values
    found = list(_outputs_and_gradients(function, case, rounded))
    wanted = list(_outputs_and_gradients(exact, case, [value.double() for value in rounded]))
    return max(_relative(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def _outputs_and_gradients(function: Function, case: Case, given: list[Tensor]) -> Iterator[Tensor]:
    leaves = [value.clone().requires_grad_() for value in given]
    outputs = case.call(function, [leaf.clone() for leaf in leaves])  # an implementation may overwrite its inputs
    yield from (output.detach() for output in outputs)
    generator = torch.Generator(given[0].device).manual_seed(7)
    total = torch.zeros((), dtype=torch.float64, device=given[0].device)
    for output in outputs:
        direction = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        total = total + (output * direction).sum(dtype=torch.float64)
    yield from torch.autograd.grad(total, leaves)


def _relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))


# ---- time on the device ---------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], Any], device: torch.device, least_seconds: float = LEAST_SECONDS) -> float:
    """Mean seconds of a call, over as many as fill `least_seconds`, after a warm-up."""
    for _ in range(2):
        call()
    once = _timed(call, 1, device)
    return _timed(call, max(LEAST_CALLS, int(least_seconds / max(once, 1e-7))), device)


def _timed(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    wait_for(device)
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        wait_for(device)
        return begin.elapsed_time(end) / 1e3 / calls
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def measured_ceilings(device: torch.device, dtype: torch.dtype, least_seconds: float = LEAST_SECONDS) -> Ceilings:
    """Measure both."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**23, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, least_seconds)
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    matmul = seconds_of(lambda: a @ b, device, least_seconds)
    return Ceilings(2 * source.nbytes / copy, 2 * side**3 / matmul)


# ---- the optimizer, which has no backward ----------------------------------------------------------------------------


def _optimizer(
    implementation: Implementation, config: RunConfig, device: torch.device, dtype: torch.dtype, least_seconds: float
) -> tuple[Work, float, float, float]:
    """Work, seconds of forward and of backward (0), error of the change of the weights."""
    from zero2all.model.config import parameter_counts

    whole = parameter_counts(config.model)["total"]
    parameters = whole if device.type == "cuda" else min(whole, CPU_PARAMETERS)
    constants = AdamW(config.optim.beta1, config.optim.beta2, config.optim.eps)
    split_masters = implementation.footprint.splits_masters and dtype == torch.bfloat16
    group = random_flat(parameters, config, device, torch.float32, dtype, split_masters)
    function, updates = implementation.function, torch.ones((), device=device)
    scale, skip = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
    seconds = seconds_of(lambda: function([group], updates, scale, skip, constants), device, least_seconds)
    error = _optimizer_error(function, config, device, dtype, split_masters)
    return optimizer_work(parameters), seconds, 0.0, error


def _optimizer_error(
    function: Function, config: RunConfig, device: torch.device, dtype: torch.dtype, split_masters: bool
) -> float:
    constants = AdamW(config.optim.beta1, config.optim.beta2, config.optim.eps)
    changes = []
    for update, wide, narrow in ((function, torch.float32, dtype), (eager_adamw, torch.float64, torch.float64)):
        group = random_flat(EXACT_PARAMETERS, config, device, wide, narrow, split_masters and update is function)
        before = _masters_of(group).clone()
        group.lr = 1.0  # so that the change is not lost in the rounding of the weight
        updates, scale = torch.full((), 3.0, device=device), torch.full((), 0.5, dtype=wide, device=device)
        update([group], updates, scale, torch.zeros((), dtype=torch.bool, device=device), constants)
        changes.append(_masters_of(group) - before)
    return _relative(*changes)


def _masters_of(group: Flat) -> Tensor:
    return join(group.weights, group.masters) if group.masters.dtype == torch.int16 else group.masters


def random_flat(
    parameters: int,
    config: RunConfig,
    device: torch.device,
    wide: torch.dtype,
    narrow: torch.dtype,
    split_masters: bool = False,
) -> Flat:
    """Parameters, gradients and moments of random values, as the optimizer takes them."""
    torch.manual_seed(0)
    masters, gradients, firsts, seconds = (torch.randn(parameters, device=device).to(wide) for _ in range(4))
    seconds = seconds.abs_()
    weights = masters if narrow == wide else masters.to(narrow)
    if split_masters:
        weights, masters = split(masters)
    matrix = config.model.hidden_size * config.model.intermediate_size
    starts = range(0, parameters, matrix)
    return Flat(
        weights=weights,
        masters=masters,
        gradients=gradients,
        firsts=firsts,
        seconds=seconds,
        slices=tuple(slice(start, min(start + matrix, parameters)) for start in starts),
        weight_decay=config.optim.weight_decay,
    )


# ---- the table -------------------------------------------------------------------------------------------------------


def bench_cells(bench: Bench) -> list[list[str]]:
    """Heading and rows."""
    rows = []
    before = ""
    for row in bench.rows:
        shown = row.operator if row.operator != before else ""
        before = row.operator
        name = f"{row.implementation}{' (auto)' if row.taken_by_auto else ''}"
        if row.problem is not None:
            rows.append([shown, name, "", "", "", "", "", t(row.problem)])
            continue
        assert row.rate is not None
        rate = f"{row.rate / 1e12:.3g} TFLOPS" if row.is_matmul else f"{row.rate / 1e9:.4g} GB/s"
        figures = [f"{row.forward_ms:.3f}", f"{row.backward_ms:.3f}", rate, f"{row.floor_percent:.1f}"]
        rows.append([shown, name, *figures, f"{row.error:.1e}", ""])
    heading = ["operator", "implementation", "forward ms", "backward ms", "rate", "% of floor", "error", "problem"]
    return [heading, *rows]


# ---- every implementation, and whether it runs here ------------------------------------------------------------------


def context_here(config: RunConfig | None) -> OpContext:
    """The context of a config; without one, that of this machine's device in its usual dtype."""
    if config is not None:
        return op_context(config, pick_device(config.parallel.device).type, DTYPES[config.train.precision])
    device = pick_device("auto").type
    return OpContext(device, torch.bfloat16 if device == "cuda" else torch.float32)


def listed_operators(config: RunConfig | None) -> list[dict[str, Any]]:
    """One entry per implementation: operator, name, why it cannot run (None: it can), flags, and who takes it."""
    where = context_here(config)
    asked = OpsConfig() if config is None else config.ops
    automatic = resolve(OpsConfig(), where).taken
    chosen = resolve(dataclasses.replace(asked, strict=False), where).taken
    return [
        {
            "operator": operator,
            "implementation": implementation.name,
            "why_not": implementation.probe(where),
            "compile_safe": implementation.compile_safe,
            "deterministic": implementation.deterministic,
            "taken_by_auto": automatic[operator] == implementation.name,
            "asked_by_config": getattr(asked, operator) == implementation.name,
            "taken": chosen[operator] == implementation.name,
        }
        for operator, implementations in OPERATORS.items()
        for implementation in implementations
    ]


def describe(where: OpContext) -> str:
    """The context in one line."""
    device = torch.cuda.get_device_name() if where.device == "cuda" else "cpu"
    dtype = str(where.dtype).removeprefix("torch.")
    return f"{device}, {dtype}, inside torch.compile" if where.compiled else f"{device}, {dtype}"


def list_cells(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Heading and rows of the table."""
    rows = []
    before = ""
    for entry in entries:
        shown = entry["operator"] if entry["operator"] != before else ""
        taken = "auto" if entry["taken_by_auto"] else "config" if entry["taken"] else ""
        here = t("runs") if entry["why_not"] is None else t(f"no: {entry['why_not']}")
        flags = (t("yes") if entry[flag] else t("no") for flag in ("compile_safe", "deterministic"))
        rows.append([shown, entry["implementation"], taken, here, *flags])
        before = entry["operator"]
    return [["operator", "implementation", "chosen by", "here", "compile-safe", "deterministic"], *rows]


Function = Callable[..., Any]


# ---- how each operator is called; legend as in `estimate.floors` ------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operator on inputs of one size."""

    inputs: list[Tensor]  # Tensors with gradients
    call: Callable[[Function, list[Tensor]], tuple[Tensor, ...]]  # (implementation, inputs) -> outputs
    gathers_into_main: bool = False  # the last input is a weight whose gradient is summed in float32


def make_case(name: str, config: ModelConfig, B: int, T: int, device: torch.device) -> Case:  # noqa: N803
    """The case of an operator (`linear/…` names a matrix) on B samples of T tokens, in float32."""
    C, D, Hq, Hk = config.hidden_size, config.head_size, config.heads, config.kv_heads
    operator, _, part = name.partition("/")

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device) * std

    def targets() -> Tensor:
        return torch.randint(0, config.vocab_ids, (B * T,), device=device)

    match operator:
        case "rms_norm":
            inputs = [normal(B, T, C), normal(B, T, C), 1.0 + normal(C, std=0.1)]
            return Case(inputs, lambda function, given: tuple(function(*given, config.rms_norm_eps)))
        case "rope":
            cos, sin = rope_tables(config, T, device)

            def rope(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
                wide = torch.promote_types(given[0].dtype, torch.float32)
                return tuple(function(given[0], cos.to(wide), sin.to(wide), Hq, Hk))

            return Case([normal(B, T, Hq + 2 * Hk, D)], rope)
        case "swiglu":
            return Case([normal(B, T, 2 * config.intermediate_size)], lambda function, given: (function(*given),))
        case "attention":

            def attention(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
                # (B, H, T, D) views of (B, T, H, D), the layout of the projection
                return (function(*(each.transpose(1, 2) for each in given), 0.0, None),)

            return Case([normal(B, T, heads, D) for heads in (Hq, Hk, Hk)], attention)
        case "linear":
            rows, columns = linear_shapes(config)[part]
            inputs = [normal(B, T, columns), normal(rows, columns, std=config.matrix_std)]
            return Case(inputs, lambda function, given: (function(given[0], given[1], None),), gathers_into_main=True)
        case "embedding":
            # Zipf-distributed, as `zero2all.estimate.floors.distinct_ids` assumes: in text, a few ids are much of it.
            ids = ((config.vocab_ids + 1.0) ** torch.rand((B, T), dtype=torch.float64, device=device)).long() - 1
            tokens = ids.clamp(max=config.vocab_ids - 1)
            inputs = [normal(config.vocab_rows, C, std=config.matrix_std)]
            return Case(inputs, lambda function, given: (function(tokens, given[0]),), gathers_into_main=True)
        case "cross_entropy":
            wanted = targets()
            return Case([normal(B * T, config.vocab_rows)], lambda function, given: (function(given[0], wanted),))
        case "linear_cross_entropy":
            wanted, shares = targets(), torch.full((B * T,), 1.0 / (B * T), device=device)

            def loss(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
                wide = torch.promote_types(given[0].dtype, torch.float32)
                return (function(*given, wanted, shares.to(wide), config.vocab_ids, 0.0)[0],)

            inputs = [normal(B * T, C), normal(config.vocab_rows, C, std=config.matrix_std)]
            return Case(inputs, loss, gathers_into_main=True)
    raise ValueError(f"there is no case for the operator {name!r}")
