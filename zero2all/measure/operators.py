"""Every implementation of every operator: whether it runs here, and how it is called alone on inputs of one size."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero2all.common.language import translate as t
from zero2all.config import RunConfig
from zero2all.estimate.floors import linear_shapes
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_tables
from zero2all.ops.config import OpsConfig
from zero2all.ops.gradient_sink import GradientSink, take_from_autograd
from zero2all.ops.implementation import OpContext
from zero2all.ops.optimizer import Flat
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.ops.split_master import split
from zero2all.parallel.device import pick_device
from zero2all.train.build import op_context
from zero2all.train.state import DTYPES

Function = Callable[..., Any]


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
            "why_not": implementation.check(where),
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


def forward_and_both(
    function: Function, case: Case, dtype: torch.dtype, weights: int | None = None
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What runs the forward pass of a case, and what runs forward and backward; the case gives its inputs away.
    `weights`: so many of the last inputs gather their gradients in float32; None: as the case says, none in float32."""
    inputs = [value.to(dtype).requires_grad_() for value in case.inputs]
    case.inputs.clear()
    gathers = int(case.gathers_into_main and dtype != torch.float32) if weights is None else weights
    for weight in inputs[len(inputs) - gathers :]:
        gather_into_main(weight)
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
