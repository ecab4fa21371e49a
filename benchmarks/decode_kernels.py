"""The kernels of decoding alone: which tiles are fastest, and how near to the bandwidth they are.

    python benchmarks/decode_kernels.py                          all, z2all-1b; most of the time is compilation
    python benchmarks/decode_kernels.py --only gate_up,down --inputs 1 --weights bfloat16
    python benchmarks/decode_kernels.py --only attention
    python benchmarks/decode_kernels.py --weights int4 --inputs 1,64 --share 0/8    only compile an eighth of it

Each matrix of a block and the head is multiplied with few rows of input, for several tiles; attention runs over several
batches and lengths, for several splits. A measurement is a CUDA graph of calls, one after the other as in a model, on
copies that together are larger than the cache, so that every call reads memory. What `tiles_for` and `attention_tiles`
choose is marked; where another line is faster, change the table there. Of int4, what is taken is first compared with
float64; beside it stand F.linear in bfloat16 and, from 16 rows on, the product of torch in fp8, on inputs that are fp8.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import BILLION, save_result
from zero2all.common.progress import say, show_log
from zero2all.estimate.floors import linear_shapes
from zero2all.infer.cache import BLOCK
from zero2all.infer.weights import Int4Weight, int4_weight, int8_weight
from zero2all.measure.clock import measured_ceilings, seconds_of
from zero2all.model.config import ModelConfig
from zero2all.ops.kernels.decode_attention import AttentionScratch, AttentionTiles, attention_tiles, decode_attention
from zero2all.ops.kernels.decode_int4 import MOST_FEW, few_rows, many_rows
from zero2all.ops.kernels.decode_linear import Tiles, decode_linear, tiles_for
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import load_measured_config

BEYOND_CACHE = 300 << 20
"""Bytes that the copies of a matrix have together, on a GPU."""
FEWEST_CALLS, MOST_CALLS = 4, 64
AROUND = {"qkv": "norm", "out": "add", "gate_up": "swiglu", "down": "add", "head": "norm"}
"""What stands around the product of each matrix."""
ATTENTION_CASES = ((1, 384), (1, 2048), (8, 384), (64, 384), (64, 2048), (256, 384))
"""Sequences and their length."""


SHARE = [0, 1]
"""Which share of the candidates, of how many, is called once so that it is compiled; 0 of 1: all are measured."""


def seconds_of_call(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Mean seconds of one of the calls."""
    if SHARE[1] > 1:
        calls[0]()
        return 1.0
    if device.type != "cuda":
        return seconds_of(lambda: [call() for call in calls], device, 0.0) / len(calls)
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds_of(graph.replay, device, 0.02) / len(calls)


def linear_candidates(inputs: int, columns: int) -> Iterator[Tiles]:
    """Tiles to try."""
    if inputs == 1:
        for rows, block, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
            # Between 16 and 64 weights for each thread: fewer hide no latency, more do not fit into registers.
            if 16 <= rows * block // (32 * warps) <= 64 and block <= 2 * columns:
                yield Tiles(rows, block, warps)
        return
    for rows, block, stages in itertools.product((16, 32), (128, 256), (3, 5)):
        yield Tiles(rows, block, 4, stages)


def measure_linear(
    name: str, shape: tuple[int, int], inputs: int, kind: str, copy_rate: float, device: torch.device
) -> list[dict[str, Any]]:
    """All tiles of one matrix, the fastest first."""
    rows, columns = shape
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    size = rows * columns * (1 if kind == "int8" else dtype.itemsize)
    count = min(MOST_CALLS, max(FEWEST_CALLS, BEYOND_CACHE // size)) if device.type == "cuda" else 1
    weights = [_matrix(torch.randn(rows, columns, device=device).to(dtype), kind) for _ in range(count)]
    x = torch.randn(inputs, columns, device=device).to(dtype)
    gain = torch.ones(columns, dtype=dtype, device=device) if AROUND[name] in ("norm", "swiglu") else None
    swiglu, add = AROUND[name] == "swiglu", AROUND[name] == "add"
    y = torch.zeros(inputs, rows // 2 if swiglu else rows, dtype=dtype, device=device)
    taken = tiles_for(inputs, rows, columns, weights[0][0].itemsize, x.itemsize)
    found = []

    def call(weight: tuple[Tensor, Tensor | None], tiles: Tiles) -> Callable[[], object]:
        return lambda: decode_linear(x, *weight, y, gain, 1e-5, swiglu, add, tiles)

    def note(tiles: dict[str, Any], is_taken: bool, seconds: float) -> None:
        share = size / seconds / copy_rate
        found.append({"tiles": tiles, "taken": is_taken, "microseconds": 1e6 * seconds, "bandwidth": share})

    for tiles in itertools.islice(
        dict.fromkeys((taken, *linear_candidates(inputs, columns))), SHARE[0], None, SHARE[1]
    ):
        try:
            note(vars(tiles), tiles == taken, seconds_of_call([call(weight, tiles) for weight in weights], device))
        except Exception as error:  # too much shared memory, for example
            say(f"{name} {tiles}: {type(error).__name__}")
    if kind != "int8":  # the matmul alone, without what stands around it
        alone: list[Callable[[], object]] = [functools.partial(F.linear, x, weight) for weight, _ in weights]
        note({"torch": "F.linear alone"}, False, seconds_of_call(alone, device))
    return sorted(found, key=lambda line: line["microseconds"])


def _matrix(weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    if kind != "int8":
        return weight, None
    stored = int8_weight(weight)
    return stored.values, stored.scales


def int4_candidates(inputs: int) -> Iterator[dict[str, int]]:
    """Details of a launch to try; the first: what is taken."""
    yield {}
    if inputs > MOST_FEW:
        for splits, stages in itertools.product((1, 2, 4), (3, 4)):
            yield {"splits": splits, "stages": stages}
        yield from ({"splits": 2, "at_once": 128}, {"splits": 8, "stages": 3})
        return
    for blocks, step, warps in ((2, 8, 4), (2, 16, 8), (2, 8, 8), (2, 4, 4), (4, 4, 4), (4, 16, 8), (4, 8, 8)):
        yield {"blocks": blocks, "step": step, "warps": warps}


def measure_int4(
    name: str, shape: tuple[int, int], inputs: int, kind: str, copy_rate: float, device: torch.device
) -> list[dict[str, Any]]:
    """As `measure_linear`, of weights in 4 bits."""
    del kind
    rows, columns = shape
    first = int4_weight(torch.randn(rows, columns, device=device) / columns**0.5)
    assert isinstance(first, Int4Weight), "the kernels for 4 bits need a GPU"
    count = 1 if SHARE[1] > 1 else min(MOST_CALLS, max(FEWEST_CALLS, BEYOND_CACHE // first.nbytes))
    copies = [(first.values.clone(), first.scales.clone()) for _ in range(count)]
    x = torch.randn(inputs, columns, device=device).bfloat16()
    is_few, around = inputs <= MOST_FEW, AROUND[name] if inputs <= MOST_FEW else ""
    details = {"norm": {"norm": True}, "swiglu": {"norm": True, "swiglu": True}, "add": {"add": True}}.get(around, {})
    y = torch.zeros(inputs, rows // 2 if around == "swiglu" else rows, dtype=torch.bfloat16, device=device)
    product: Any = few_rows if is_few else many_rows
    wanted = x.double() @ first.widened(torch.float64).T
    if details.get("norm"):
        wanted = wanted / x.double().square().mean(dim=1, keepdim=True).sqrt()
    if around == "swiglu":
        wanted = F.silu(wanted[:, 0::2]) * wanted[:, 1::2]
    found = []

    def note(tiles: dict[str, Any], calls: list[Callable[[], object]], size: int = first.nbytes) -> None:
        seconds = seconds_of_call(calls, device)
        share = size / seconds / copy_rate
        line = {"tiles": tiles, "taken": not tiles, "microseconds": 1e6 * seconds, "bandwidth": share}
        found.append({**line, "gb_per_second": size / seconds / 1e9})

    for tiles in itertools.islice(int4_candidates(inputs), SHARE[0], None, SHARE[1]):
        try:
            product(x, *copies[0], y.zero_(), **details, **tiles)
            error = float((y.double() - wanted).norm() / wanted.norm())
            note(tiles, [functools.partial(product, x, *each, y, **details, **tiles) for each in copies])
            found[-1]["error"] = error
        except Exception as error:  # too much shared memory, for example
            say(f"{name} {tiles}: {type(error).__name__} {str(error)[:200]}")
    if SHARE[1] > 1:
        return []
    plain = [torch.randn(rows, columns, device=device).bfloat16() for _ in range(max(FEWEST_CALLS, count // 4))]
    note({"torch": "bfloat16"}, [functools.partial(F.linear, x, each) for each in plain], 2 * rows * columns)
    if inputs >= 16 and torch.cuda.get_device_capability(device) >= (8, 9):
        low, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
        eighths = [each.to(torch.float8_e4m3fn).T for each in plain]
        scaled = functools.partial(torch._scaled_mm, low, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        note({"torch": "fp8"}, [functools.partial(scaled, each) for each in eighths], rows * columns)
    return sorted(found, key=lambda line: line["microseconds"])


def attention_candidates(taken: AttentionTiles) -> Iterator[AttentionTiles]:
    """Tiles to try."""
    yield taken
    for splits, tokens in itertools.product((1, 4, 8, 16, 32), (32, 64)):
        for least in (tokens,) if splits == 1 else (tokens, 128, 512):
            yield AttentionTiles(splits, least, tokens)


def measure_attention(
    config: ModelConfig, batch: int, length: int, copy_rate: float, device: torch.device
) -> list[dict[str, Any]]:
    """All tiles of one case, the fastest first."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_size
    blocks = -(-length // BLOCK)
    size = 2 * batch * length * kv_heads * width * dtype.itemsize
    layers = min(MOST_CALLS, max(FEWEST_CALLS, BEYOND_CACHE // size)) if device.type == "cuda" else 1
    shape = (layers, 1 + batch * blocks, BLOCK, kv_heads, width)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    tables = 1 + torch.randperm(batch * blocks, device=device, dtype=torch.int32).view(batch, blocks)
    positions = torch.full((batch,), length - 1, dtype=torch.int32, device=device)
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * width, device=device).to(dtype)
    cos = sin = torch.randn(max(length, config.max_seq_len), width // 2, device=device)
    out = torch.empty(batch, heads * width, dtype=dtype, device=device)
    taken = attention_tiles(batch, kv_heads, width, len(cos), device)
    found = []

    def call(layer: int, tiles: AttentionTiles, scratch: AttentionScratch) -> Callable[[], object]:
        cache = keys[layer], values[layer]
        return lambda: decode_attention(qkv, cos, sin, *cache, tables, positions, out, scratch, tiles)

    for tiles in dict.fromkeys(attention_candidates(taken)):
        scratch = AttentionScratch(batch, heads, kv_heads, width, tiles.splits, device)
        seconds = seconds_of_call([call(layer, tiles, scratch) for layer in range(layers)], device)
        share = size / seconds / copy_rate
        found.append({"tiles": vars(tiles), "taken": tiles == taken, "microseconds": 1e6 * seconds, "bandwidth": share})
    return sorted(found, key=lambda line: line["microseconds"])


def show(title: str, lines: list[dict[str, Any]]) -> None:
    """The three fastest, and what is taken today."""
    for place, line in enumerate(lines):
        if place < 3 or line["taken"] or "torch" in line["tiles"]:
            sizes = ", ".join(f"{name} {size}" for name, size in line["tiles"].items())
            sizes += f"; error {line['error']:.1e}" if "error" in line else ""
            mark = "  <- taken" if line["taken"] else ""
            say(f"{title:36}{line['microseconds']:9.2f} us {line['bandwidth']:6.1%}  {sizes}{mark}")


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=BILLION)
    parser.add_argument("--only", help=f"some of {','.join((*AROUND, 'attention'))}")
    parser.add_argument("--inputs", default="1,16", help="rows of input of the products; 64: is cuBLAS faster?")
    parser.add_argument("--weights", default="bfloat16,int8")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--share", help="i/n: only compile, the i-th of n shares of the cases")
    given, overrides = parser.parse_known_args()
    config = load_measured_config(given.config, overrides)[0].model
    device = pick_device("auto")
    if given.share:
        SHARE[:] = map(int, given.share.split("/"))
    copy_rate = 1.0 if given.share else measured_ceilings(device, torch.bfloat16).copy_bytes_per_second
    say(f"copy {copy_rate / 1e9:,.0f} GB/s, bytes read and written; reading alone may be faster")
    shapes = {**linear_shapes(config), "head": (config.vocab_ids, config.hidden_size)}
    wanted = given.only.split(",") if given.only else [*shapes, "attention"]
    results: dict[str, Any] = {"copy_bytes_per_second": copy_rate}
    for name in wanted:
        cases: dict[str, Callable[[], list[dict[str, Any]]]] = {}
        if name == "attention":
            for batch, length in ATTENTION_CASES:
                title = f"attention, {batch} x {length}"
                cases[title] = functools.partial(measure_attention, config, batch, length, copy_rate, device)
        else:
            for kind, inputs in itertools.product(given.weights.split(","), map(int, given.inputs.split(","))):
                title = f"{name}, {kind}, {inputs} rows"
                of_kind = measure_int4 if kind == "int4" else measure_linear
                cases[title] = functools.partial(of_kind, name, shapes[name], inputs, kind, copy_rate, device)
        for title, measure in cases.items():
            results[title] = measure()
            show(title, results[title])
            if not given.no_save and not given.share:
                save_result("decode_kernels", results)


if __name__ == "__main__":
    show_log()
    main()
