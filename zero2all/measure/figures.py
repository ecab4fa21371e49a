"""What a calibration measures: named figures, each a call on inputs of one size.

The names and what they mean to `zero2all.estimate`:

    matmul/KIND/DTYPE/IMPLEMENTATION/MxNxK
                              one product with an (M, N) result and the inner dimension K, as the trainer calls it: of a
                              linear layer with R rows and C columns on N tokens, forward is (N, R, C), dgrad (N, C, R)
                              and wgrad (R, C, N). wgrad adds to the float32 buffer of the gradients. float8 includes
                              what measures and rounds its inputs. DTYPE `grouped`: the products of all experts in one
                              call; M are the rows of all experts, or, of wgrad, (experts x rows, columns, rows of each)
    attention/IMPLEMENTATION/…   causal attention: forward and backward
    operator/NAME/IMPLEMENTATION/…
                              seconds against the bytes that `zero2all.estimate.floors` says it moves. Of operators that
                              contain products (swiglu: the whole feed-forward, linear_cross_entropy: head and loss with
                              their backward pass, moe: a block of experts), what they take beyond their products:
                              against the bytes of swiglu, of the logits, and of the rows sent to experts
    operator/adamw, grad_norm, zero: the update (28 bytes a parameter), the norm and the clearing of gradients (4 bytes)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.config import RunConfig
from zero2all.estimate.floors import Work, linear_shapes, operator_work, optimizer_work
from zero2all.estimate.machine import Kind
from zero2all.measure.clock import Stopwatch, Timed
from zero2all.measure.operators import Case, Function, forward_and_both, gather_into_main, make_case, random_flat
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.model.moe import MixtureOfExperts
from zero2all.ops.optimizer import AdamWConstants
from zero2all.ops.registry import Ops
from zero2all.predict.batch import BatchShape
from zero2all.train.state import DTYPES

Measure = Callable[[Stopwatch], dict[str, Any]]
Call = Callable[[], Any]
KINDS: tuple[Kind, ...] = ("forward", "dgrad", "wgrad")
MOST_PARAMETERS = {"cuda": 1 << 29, "cpu": 1 << 24}  # of the update: enough to be limited by bandwidth alone
GRID_TOKENS, GRID_WIDTHS = (2048, 8192, 32768), (768, 2048, 4096, 8192, 16384)
CPU_GRID_TOKENS, CPU_GRID_WIDTHS = (256, 1024), (192, 768, 2048)
ATTENTION_GRID = tuple(
    (tokens, length, heads, heads // 4, size)  # one ratio: FlashAttention 4 compiles a kernel for each
    for tokens, length in ((8192, 1024), (16384, 2048), (16384, 4096), (32768, 8192), (65536, 2048))
    for heads, size in ((16, 64), (32, 64), (16, 128), (32, 128))
)


@dataclass(frozen=True)
class FigureToMeasure:
    """One thing to measure; a figure that exists under this name is not measured again."""

    name: str
    measure: Measure


@dataclass(frozen=True)
class Setting:
    """What the figures of a config depend on."""

    config: RunConfig
    ops: Ops
    batch: BatchShape
    device: torch.device

    @property
    def model(self) -> ModelConfig:
        """The shape of the model."""
        return self.config.model

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return DTYPES[self.config.train.precision]

    @property
    def tokens(self) -> int:
        """Of one pass."""
        return self.batch.samples * self.batch.seq_len

    @property
    def product_dtype(self) -> str:
        """Of the products of linear layers, as profiles name it."""
        return "float8" if self.ops.taken["linear"] == "fp8" else _name(self.dtype)


def settled(figure: Mapping[str, Any]) -> float:
    """The seconds of a product at the settled clock; BadInputError: it could not be measured."""
    if "failed" in figure:
        raise BadInputError("a product that it contains could not be measured")
    return float(figure["seconds"] * figure.get("clock", 1.0))


# ---- products --------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A product of a linear layer: (m, k) times (k, n)."""

    kind: Kind
    m: int
    n: int
    k: int


def product_figure(shape: Product, dtype: str, linear: str, device: torch.device, experts: int = 1) -> FigureToMeasure:
    """One product by the linear layer of this name."""
    make: Callable[[], Call]
    if dtype == "grouped":
        make = partial(grouped_product, *shape, experts, device)
    elif dtype == "float8":
        make = partial(float8_product, *shape, device)
    else:
        make = partial(product, shape, DTYPES[dtype], linear, device)
    return FigureToMeasure(product_name(*shape, dtype, linear), lambda watch: asdict(watch.time(make())))


def product_name(kind: Kind, m: int, n: int, k: int, dtype: str, linear: str) -> str:
    """Only the weight gradient of bfloat16 depends on the implementation: in which dtype it is added up."""
    by = linear if kind == "wgrad" and dtype == "bfloat16" else "-"
    return f"matmul/{kind}/{dtype}/{by}/{m}x{n}x{k}"


def product(shape: Product, dtype: torch.dtype, linear: str, device: torch.device) -> Call:
    """As torch's and our linear layers multiply (`zero2all.ops.linear`)."""
    a, b = operands(*shape, dtype, device)
    if shape.kind != "wgrad":
        return lambda: a @ b
    total = torch.zeros(shape.m, shape.n, device=device)
    if linear == "plain" or dtype == torch.float32:
        return lambda: total.add_(a @ b)
    return lambda: torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def operands(kind: Kind, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random, and laid out as in training: y = x w', dx = dy w, dw = dy' x."""
    if kind == "wgrad":
        return _normal(k, m, dtype, device).t(), _normal(k, n, dtype, device)
    b = _normal(n, k, dtype, device).t() if kind == "forward" else _normal(k, n, dtype, device)
    return _normal(m, k, dtype, device), b


def float8_product(kind: Kind, m: int, n: int, k: int, device: torch.device) -> Call:
    """As `zero2all.ops.kernels.linear` does it: the input of forward and dgrad is measured and rounded too."""
    from zero2all.ops.kernels.linear import _matmul
    from zero2all.ops.kernels.quantise import quantise, scale_of

    e4m3, e5m2, bfloat16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
    kept = e5m2 if kind == "wgrad" else e4m3
    given = _normal(k, m, bfloat16, device) if kind == "wgrad" else _normal(m, k, bfloat16, device)
    other = _normal(k, n, bfloat16, device)
    scale, other_scale = scale_of(given, kept), scale_of(other, e4m3)
    turned, other_turned = (quantise(given, kept, scale)[1], quantise(other, e4m3, other_scale)[1])
    assert turned is not None
    assert other_turned is not None
    if kind == "wgrad":
        total = torch.zeros(m, n, device=device)
        return lambda: total.add_(_matmul(turned, other_turned, scale, other_scale, True, bfloat16))

    def rounded_product() -> Tensor:
        here = e4m3 if kind == "forward" else e5m2
        scale = scale_of(given, here)
        straight, _ = quantise(given, here, scale)
        assert straight is not None
        return _matmul(straight, other_turned, scale, other_scale, True, bfloat16)

    return rounded_product


def grouped_product(kind: Kind, m: int, n: int, k: int, experts: int, device: torch.device) -> Call:
    """The products of all experts with equally many rows each, as `zero2all.ops.experts` makes them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = k * experts if kind == "wgrad" else m
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)
    if kind == "wgrad":
        dy, x = _normal(rows, m // experts, dtype, device), _normal(rows, n, dtype, device)
        total = torch.zeros(experts, m // experts, n, device=device)
        if device.type == "cuda":
            return lambda: total.add_(F.grouped_mm(dy.t(), x, offs=ends))
        return lambda: [
            total[i].add_(a.t() @ b) for i, (a, b) in enumerate(zip(dy.chunk(experts), x.chunk(experts), strict=True))
        ]
    x, weights = _normal(rows, k, dtype, device), _normal(experts * k, n, dtype, device).view(experts, k, n)
    if kind == "forward":
        weights = weights.mT.contiguous().mT
    if device.type == "cuda":
        return lambda: F.grouped_mm(x, weights, offs=ends)
    return lambda: torch.cat([part @ weight for part, weight in zip(x.chunk(experts), weights, strict=True)])


def _name(dtype: torch.dtype) -> str:
    """As profiles name it."""
    return str(dtype).removeprefix("torch.")


def _normal(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def products_of(rows: int, columns: int, tokens: int) -> list[tuple[Kind, int, int, int]]:
    """The three products of a linear layer."""
    return [("forward", tokens, rows, columns), ("dgrad", tokens, columns, rows), ("wgrad", rows, columns, tokens)]


def grouped_products(rows: int, columns: int, pairs: int, experts: int) -> list[tuple[Kind, int, int, int]]:
    """The products of a matrix that every expert has."""
    each = max(1, pairs // experts)
    return [
        ("forward", each * experts, rows, columns),
        ("dgrad", each * experts, columns, rows),
        ("wgrad", rows * experts, columns, each),
    ]


def model_products(setting: Setting, tokens: int) -> Iterator[FigureToMeasure]:
    """Every product of a model on one pass."""
    model, device, moe = setting.model, setting.device, setting.model.moe
    shapes = dict(linear_shapes(model))
    if not model.layers - model.expert_layers:
        del shapes["gate_up"], shapes["down"]
    if model.shared_size:
        shapes |= {"shared_up": (2 * model.shared_size, model.hidden_size)}
        shapes |= {"shared_down": (model.hidden_size, model.shared_size)}
    linear = setting.ops.taken["linear"]
    for rows, columns in shapes.values():
        for shape in products_of(rows, columns, tokens):
            yield product_figure(Product(*shape), setting.product_dtype, linear, device)
    for shape in products_of(model.vocab_rows, model.hidden_size, tokens):
        yield product_figure(Product(*shape), _name(setting.dtype), linear, device)
    if model.expert_layers:
        for shape in products_of(moe.experts, model.hidden_size, tokens):
            yield product_figure(Product(*shape), _name(setting.dtype), linear, device)
        pairs = tokens * moe.experts_per_token
        for rows, columns in ((2 * moe.expert_size, model.hidden_size), (model.hidden_size, moe.expert_size)):
            for shape in grouped_products(rows, columns, pairs, moe.experts):
                yield product_figure(Product(*shape), "grouped", linear, device, moe.experts)


def product_grid(device: torch.device, dtype: str, linear: str) -> Iterator[FigureToMeasure]:
    """Products of many sizes, for models that were not calibrated: a coarse grid in logarithms."""
    on_cuda = device.type == "cuda"
    for tokens in GRID_TOKENS if on_cuda else CPU_GRID_TOKENS:
        for rows in GRID_WIDTHS if on_cuda else CPU_GRID_WIDTHS:
            for columns in GRID_WIDTHS if on_cuda else CPU_GRID_WIDTHS:
                for shape in products_of(rows, columns, tokens):
                    yield product_figure(Product(*shape), dtype, linear, device)


# ---- operators -------------------------------------------------------------------------------------------------------


def operator_figures(setting: Setting, tokens: int, known: dict[str, dict[str, Any]]) -> Iterator[FigureToMeasure]:
    """Every operator of a model on passes of this many tokens; `known` has the products that some contain."""
    taken, linear = setting.ops.taken, setting.ops.taken["linear"]

    def named(operator: str, by: str, measure: Measure) -> FigureToMeasure:
        return FigureToMeasure(f"operator/{operator}/{by}/{tokens}/{_shape(setting.model)}", measure)

    model, length = setting.model, min(tokens, setting.batch.seq_len)
    samples = tokens // length
    work = operator_work(model, samples * length, length, setting.dtype.itemsize)
    for name in ("rms_norm", "rope", "embedding"):
        function = getattr(setting.ops, name)
        case = partial(make_case, name, model, samples, length, setting.device)
        yield named(name, taken[name], partial(_plain, function, case, work[name], setting))
    dense = model.layers - model.expert_layers
    if dense or model.shared_size:
        inner = model.intermediate_size if dense else model.shared_size
        shapes = [(2 * inner, model.hidden_size), (model.hidden_size, inner)]
        size = Work(3.0 * tokens * inner * setting.dtype.itemsize, 5.0 * tokens * inner * setting.dtype.itemsize)
        parts = _products_in(known, shapes, tokens, setting.product_dtype, linear)
        make = partial(_feed_forward, setting, inner, tokens)
        yield named("swiglu", f"{taken['swiglu']}+{linear}", partial(_beyond, make, parts, size))
    logits = Work(float(tokens * model.vocab_rows * setting.dtype.itemsize))
    head = [(model.vocab_rows, model.hidden_size)]
    parts = _products_in(known, head, tokens, _name(setting.dtype), linear)
    make = partial(_head_and_loss, setting, samples, length)
    yield named("linear_cross_entropy", taken["linear_cross_entropy"], partial(_beyond, make, parts, logits))
    if model.expert_layers:
        moe, rows = model.moe, tokens * model.moe.experts_per_token
        shapes = [(2 * moe.expert_size, model.hidden_size), (model.hidden_size, moe.expert_size)]
        size = Work(*2 * [float(rows * model.hidden_size * setting.dtype.itemsize)])
        router = _products_in(known, [(moe.experts, model.hidden_size)], tokens, _name(setting.dtype), linear)
        grouped = _products_in(known, shapes, rows, "grouped", linear, moe.experts)

        def parts() -> tuple[float, float]:
            return router()[0] + grouped()[0], router()[1] + grouped()[1]

        yield named("moe", "-", partial(_beyond, partial(_moe, setting, tokens), parts, size))


def _shape(model: ModelConfig) -> str:
    """The sizes that an operator's time depends on beside its tokens, as part of a name."""
    return f"{model.hidden_size}-{model.intermediate_size}-{model.heads}-{model.kv_heads}-{model.vocab_rows}"


def _plain(
    function: Function, make: Callable[[], Case], work: Work, setting: Setting, watch: Stopwatch
) -> dict[str, Any]:
    """Bytes and seconds, forward and backward, of an operator without products."""
    forward, both = forward_and_both(function, make(), setting.dtype)
    alone, together = watch.time(forward), watch.time(both)
    return _operator(alone, together.seconds - alone.seconds, work)


def _beyond(
    make: Callable[[], tuple[Call, Call]], products: Callable[[], tuple[float, float]], work: Work, watch: Stopwatch
) -> dict[str, Any]:
    """The same for one with products, at the settled clock: its time without theirs. Where all is one figure, `work`
    has no backward."""
    forward, both = make()
    alone, together = watch.time(forward), watch.time(both)
    in_forward, in_backward = products()
    if not work.backward_bytes:
        rest = together.settled_seconds - in_forward - in_backward
        return {"bytes": work.forward_bytes, "forward": max(rest, 1e-7), "spread": together.spread}
    backward = together.settled_seconds - alone.settled_seconds - in_backward
    return _operator(Timed(alone.settled_seconds - in_forward, alone.spread), backward, work)


def _operator(forward: Timed, backward: float, work: Work) -> dict[str, Any]:
    return {
        "bytes": work.forward_bytes,
        "forward": max(forward.seconds, 1e-7),
        "spread": forward.spread,
        "backward_bytes": work.backward_bytes,
        "backward": max(backward, 1e-7),
    }


def _products_in(
    known: dict[str, dict[str, Any]],
    shapes: list[tuple[int, int]],
    tokens: int,
    dtype: str,
    linear: str,
    experts: int = 0,
) -> Callable[[], tuple[float, float]]:
    """Seconds of the products of these matrices, forward and backward, once they are known."""

    def look_up() -> tuple[float, float]:
        found = dict.fromkeys(KINDS, 0.0)
        for rows, columns in shapes:
            sizes = grouped_products(rows, columns, tokens, experts) if experts else products_of(rows, columns, tokens)
            for kind, m, n, k in sizes:
                found[kind] += settled(known[product_name(kind, m, n, k, dtype, linear)])
        return found["forward"], found["dgrad"] + found["wgrad"]

    return look_up


def _feed_forward(setting: Setting, inner: int, tokens: int) -> tuple[Call, Call]:
    hidden, device = setting.model.hidden_size, setting.device
    inputs = [torch.randn(1, tokens, hidden, device=device), 0.02 * torch.randn(2 * inner, hidden, device=device)]
    inputs.append(0.02 * torch.randn(hidden, inner, device=device))

    def call(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
        return (function(given[0], (given[1], None), (given[2], None)),)

    return forward_and_both(setting.ops.feed_forward, Case(inputs, call), setting.dtype, weights=2)


def _head_and_loss(setting: Setting, samples: int, length: int) -> tuple[Call, Call]:
    case = make_case("linear_cross_entropy", setting.model, samples, length, setting.device)
    return forward_and_both(setting.ops.linear_cross_entropy, case, setting.dtype, weights=1)


def _moe(setting: Setting, tokens: int) -> tuple[Call, Call]:
    """A block of experts without its shared ones."""
    model, device = setting.model, setting.device
    block = MixtureOfExperts(model, model.layers - 1, setting.ops, None).to(device, setting.dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.0, model.matrix_std)
        gather_into_main(parameter)
    block.router.clear(device)
    x = torch.randn(1, tokens, model.hidden_size, device=device).to(setting.dtype).requires_grad_()
    direction = torch.randn_like(x)

    def both() -> None:
        block(x).backward(direction)
        x.grad = None

    return lambda: block(x), both


def attention_figure(
    setting: Setting, tokens: int, length: int, heads: int, kv_heads: int, size: int
) -> FigureToMeasure:
    """Causal attention by the chosen implementation."""
    name = f"attention/{setting.ops.taken['attention']}/{tokens}-{length}-{heads}-{kv_heads}-{size}"

    def measure(watch: Stopwatch) -> dict[str, Any]:
        dtype, samples = setting.dtype, max(1, tokens // length)
        shapes = [(samples, length, count, size) for count in (heads, kv_heads, kv_heads)]

        def call(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
            return (function(*(each.transpose(1, 2) for each in given), 0.0, None),)

        case = Case([torch.randn(shape, device=setting.device) for shape in shapes], call)
        forward, both = forward_and_both(setting.ops.attention, case, dtype)
        alone, together = watch.time(forward), watch.time(both)
        sizes = {"tokens": samples * length, "seq_len": length, "heads": heads, "kv_heads": kv_heads, "head_size": size}
        backward = max(together.settled_seconds - alone.settled_seconds, 1e-7)
        return {**sizes, "forward": alone.settled_seconds, "backward": backward}

    return FigureToMeasure(name, measure)


def update_figures(setting: Setting) -> Iterator[FigureToMeasure]:
    """The update, the norm and the clearing of the gradients, at two sizes."""
    device, config = setting.device, setting.config
    whole = min(parameter_counts(setting.model)["total"], MOST_PARAMETERS[device.type])
    for parameters in (max(1 << 20, whole // 16), max(1 << 20, whole)):

        def adamw(watch: Stopwatch, parameters: int = parameters) -> dict[str, Any]:
            splits = setting.ops.footprints["optimizer"].splits_masters and setting.dtype == torch.bfloat16
            group = random_flat(parameters, config, device, torch.float32, setting.dtype, splits)
            updates, scale = (torch.ones((), device=device) for _ in range(2))
            skip = torch.zeros((), dtype=torch.bool, device=device)
            constants = AdamWConstants(config.optim.beta1, config.optim.beta2, config.optim.eps)
            found = watch.time(lambda: setting.ops.optimizer([group], updates, scale, skip, constants))
            return {"bytes": optimizer_work(parameters).forward_bytes, "forward": found.seconds, "spread": found.spread}

        yield FigureToMeasure(f"operator/adamw/{setting.ops.taken['optimizer']}/{parameters}", adamw)
        for name in ("grad_norm", "zero"):
            yield FigureToMeasure(f"operator/{name}/-/{parameters}", partial(_over_gradients, name, parameters, device))


def _over_gradients(name: str, parameters: int, device: torch.device, watch: Stopwatch) -> dict[str, Any]:
    flat = torch.randn(parameters, device=device)
    found = watch.time((lambda: torch.linalg.vector_norm(flat)) if name == "grad_norm" else flat.zero_)
    return {"bytes": 4.0 * parameters, "forward": found.seconds, "spread": found.spread}


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine_figures(device: torch.device, dtype: torch.dtype) -> Iterator[FigureToMeasure]:
    """Bandwidth, the shortest kernel, the host's time for an operator, copies."""
    yield FigureToMeasure("stream", partial(_stream, device))
    yield FigureToMeasure("launch", partial(_launch, device))
    side = 8192 if device.type == "cuda" else 1024
    for name in dict.fromkeys(("float32", _name(dtype))):
        yield FigureToMeasure(f"peak/{name}", partial(_peak, side, DTYPES[name], device))
    if device.type == "cuda":
        for size in (1 << 20, 1 << 24, 1 << 28):
            for direction in ("h2d", "d2h"):
                yield FigureToMeasure(f"copy/{direction}/{size}", partial(_copy, direction, size, device))


def _stream(device: torch.device, watch: Stopwatch) -> dict[str, Any]:
    source = torch.ones(2**30 if device.type == "cuda" else 2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = watch.time(lambda: target.copy_(source))
    return {"bytes_per_second": 2 * source.nbytes / found.seconds, "spread": found.spread}


def _launch(device: torch.device, watch: Stopwatch) -> dict[str, Any]:
    small = torch.ones(64, device=device)
    host = watch.host_seconds(lambda: small.add_(1.0))
    return {"launch_seconds": watch.time(lambda: small.add_(1.0)).seconds, "host_op_seconds": host}


def _peak(side: int, dtype: torch.dtype, device: torch.device, watch: Stopwatch) -> dict[str, Any]:
    found = watch.time(product(Product("forward", side, side, side), dtype, "plain", device))
    return {"flops_per_second": 2.0 * side**3 / found.settled_seconds, "spread": found.spread}


def _copy(direction: str, size: int, device: torch.device, watch: Stopwatch) -> dict[str, Any]:
    host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    other = torch.ones(size, dtype=torch.uint8, device=device)
    source, target = (host, other) if direction == "h2d" else (other, host)
    found = watch.time(lambda: target.copy_(source, non_blocking=True))
    return {"bytes": float(size), "seconds": found.seconds, "spread": found.spread}
