"""Decoding on a GPU: one pass as few kernels, recorded as a CUDA graph, which the host starts with one call.

At batch 1 a pass only reads the weights, and it should take no longer than that. So there are five kernels a layer
(`ops.kernels.decode_linear`, `decode_attention`): norm and qkv; positions, cache and attention; out and residual; norm,
gate, up and SwiGLU; down and residual. From FEW_ROWS rows on, matmuls are cuBLAS's, with norm and SwiGLU between them.

The tokens of short prompts are rows of such a pass, too: kernel by kernel the host would take ten times as long to
start them as the GPU to compute them.

A graph has fixed addresses and a fixed number of rows. There is one for each size that `bucket_of` knows, recorded when
it is first needed. Rows beyond those asked for are padding: their table is block 0, which belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.infer.cache import BLOCK, KeyValueBlocks
from zero2all.infer.forward import wide_logits
from zero2all.infer.weights import Int4Weight, Int8Weight, LayerWeights, Weight, Weights, project
from zero2all.ops.implementation import has_triton
from zero2all.ops.precision import widened

if TYPE_CHECKING:
    from zero2all.ops.kernels.decode_attention import AttentionScratch, AttentionTiles
    from zero2all.ops.kernels.decode_greedy import GreedyScratch

    Scratch = tuple[AttentionTiles, AttentionScratch, GreedyScratch]

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rows of the qkv projection) -> (B, Hq D)."""

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FEW_ROWS = 16
"""Up to here our own products of few rows are used for float weights, too."""
MOST_PROMPT_ROWS = BUCKETS[-1]
"""Tokens of prompts that are read in one recorded pass; with more, computing takes longer than starting kernels."""
MOST_COLUMNS = 32768
"""Columns of a matrix: each tile of a row is a part of the code of the kernel for one row of input."""


def bucket_of(rows: int) -> int:
    """The number of rows that a pass over `rows` rows has."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // BUCKETS[-1]) * BUCKETS[-1])


def obstacle(weights: Weights) -> str:
    """Why this model cannot be decoded with these kernels here; empty: it can."""
    device = weights.embedding.device
    if device.type != "cuda":
        return "the decoding kernels need a CUDA device"
    if not has_triton():
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no tensor cores for bfloat16"
    return unsupported(weights)


def unsupported(weights: Weights) -> str:
    """What the kernels do not compute of this model; empty: nothing."""
    config = weights.config
    if config.moe.experts:
        return "the model has experts"
    if config.attention_bias != "none" or config.mlp_bias:
        return "its projections have biases"
    if weights.embedding.dtype not in (torch.bfloat16, torch.float32):
        return f"its weights are {str(weights.embedding.dtype).removeprefix('torch.')}, not bfloat16 or float32"
    if weights.embedding.dtype != torch.bfloat16 and isinstance(weights.layers[0].qkv, Int4Weight):
        return "its matrices are in 4 bits, for which the kernels multiply in bfloat16, and the rest is in float32"
    widest = max(config.hidden_size, config.intermediate_size, config.heads * config.head_size)
    if widest > MOST_COLUMNS:
        return f"its matrices have up to {widest:,} columns; the kernels are for {MOST_COLUMNS:,} at most"
    return ""


@dataclass
class _Bucket:
    """Passes of one size: what they read, and how they are started."""

    rows: int
    tokens: Tensor  # (rows,)
    numbers: Tensor
    """positions and tables, one after the other: both come from the host in one copy."""
    positions: Tensor  # (rows,) int32
    tables: Tensor  # (rows, blocks) int32
    scratch: Scratch
    is_prompt: bool = False
    result: Tensor | None = None
    """Where a pass leaves the logits (rows, V), or for prompts the normalised hidden states (rows, C)."""
    graph: torch.cuda.CUDAGraph | None = None


class CudaDecoder:
    """The decoding passes of one model and its cache, for sequences of up to `max_len` tokens. `never` are ids that
    `greedy` never takes."""

    def __init__(
        self, weights: Weights, blocks: KeyValueBlocks, max_len: int, never: Tensor | None = None, records: bool = True
    ) -> None:
        from zero2all.ops.kernels import decode_attention, decode_greedy, decode_int4, decode_linear

        self._attention, self._greedy, self._linear = decode_attention, decode_greedy, decode_linear
        self._int4 = decode_int4
        self.weights, self.blocks = weights, blocks
        self._device, self._dtype = weights.embedding.device, weights.embedding.dtype
        self._width = -(-max_len // BLOCK)
        self._cos, self._sin = (table[:max_len].float().contiguous() for table in (weights.cos, weights.sin))
        self._never = torch.zeros(weights.config.vocab_ids, dtype=torch.bool, device=self._device)
        if never is not None:
            self._never[never.to(self._device)] = True
        self._buckets: dict[tuple[int, bool], _Bucket] = {}
        self._records = records  # without: every pass is run kernel by kernel
        self._pool: Any = None  # memory that all graphs share: no two run at once
        self.problem = ""
        """Why passes are no longer recorded; empty while they are."""

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """As `Forward.decode`; what it returns is overwritten by the next pass."""
        _, logits = self._run(tokens, positions, tables)
        return logits[: len(tokens)]

    @torch.inference_mode()
    def greedy(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """The likeliest next tokens (B,), on the device: they can be given to the next call before the host has read
        them. Overwritten by the next pass."""
        bucket, logits = self._run(tokens, positions, tables)
        self._greedy.decode_greedy(logits, self._never, bucket.tokens, bucket.scratch[2])
        return bucket.tokens[: len(tokens)]

    @torch.inference_mode()
    def read(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Tokens of prompts (N,), each with its position and the blocks of its sequence -> normalised hidden states
        (N, C), overwritten by the next pass. What stands before them in their sequence is in the cache or among
        them."""
        _, hidden = self._run(tokens, positions, tables, is_prompt=True)
        return hidden[: len(tokens)]

    def _run(
        self, tokens: Tensor, positions: Tensor, tables: Tensor, is_prompt: bool = False
    ) -> tuple[_Bucket, Tensor]:
        rows = bucket_of(len(tokens))
        bucket = self._buckets.get((rows, is_prompt)) or self._new_bucket(rows, is_prompt)
        self._fill(bucket, tokens, positions, tables)
        if bucket.graph is None or bucket.result is None:
            return bucket, self._compute(bucket)
        bucket.graph.replay()
        return bucket, bucket.result

    def _new_bucket(self, rows: int, is_prompt: bool) -> _Bucket:
        tokens = torch.zeros(rows, dtype=torch.long, device=self._device)
        numbers = torch.zeros(rows * (1 + self._width), dtype=torch.int32, device=self._device)
        tables = numbers[rows:].view(rows, -1)
        bucket = _Bucket(rows, tokens, numbers, numbers[:rows], tables, self._scratch(rows), is_prompt)
        self._buckets[rows, is_prompt] = bucket
        if self._records:
            self._record(bucket)
        return bucket

    def _fill(self, bucket: _Bucket, tokens: Tensor, positions: Tensor, tables: Tensor) -> None:
        """Put the sequences into the first rows; the others become padding."""
        count, blocks = tables.shape
        if tokens.data_ptr() != bucket.tokens.data_ptr():
            bucket.tokens[:count].copy_(tokens, non_blocking=True)
        on_host = positions.device.type == "cpu" and self._device.type == "cuda"
        numbers = torch.zeros(bucket.numbers.shape, dtype=torch.int32, pin_memory=True) if on_host else bucket.numbers
        if not on_host:
            numbers.zero_()
        numbers[:count] = positions
        numbers[bucket.rows :].view(bucket.rows, -1)[:count, :blocks] = tables
        if on_host:
            bucket.numbers.copy_(numbers, non_blocking=True)

    def _record(self, bucket: _Bucket) -> None:
        self._compute(bucket)  # compiles and loads the kernels; all rows are padding
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                bucket.result = self._compute(bucket)
        except RuntimeError as error:  # the kernels just ran, so passes go on without graphs
            self._records, self.problem = False, f"a CUDA graph could not be recorded: {error}"
            return
        bucket.graph, self._pool = graph, graph.pool()

    def _scratch(self, rows: int) -> Scratch:
        config = self.weights.config
        tiles = self._attention.attention_tiles(rows, config.kv_heads, config.head_size, len(self._cos), self._device)
        attention = self._attention.AttentionScratch(
            rows, config.heads, config.kv_heads, config.head_size, tiles.splits, self._device
        )
        return tiles, attention, self._greedy.GreedyScratch(rows, self._device)

    # The pass --------------------------------------------------------------------------------------------------------

    def _compute(self, bucket: _Bucket) -> Tensor:
        x = F.embedding(bucket.tokens, self.weights.embedding)
        if self.weights.config.fp32_residual:
            x = widened(x)
        attend = partial(self._attend, bucket)
        if bucket.is_prompt:
            return self._hidden(x, attend)
        if bucket.rows <= FEW_ROWS:
            return self._with_few_rows(x, attend)
        return self._logits(self._hidden(x, attend))

    def _with_few_rows(self, x: Tensor, attend: Attend) -> Tensor:
        """x (B, C), the embedded tokens, which becomes the residual -> logits."""
        eps = self.weights.config.rms_norm_eps
        for number, layer in enumerate(self.weights.layers):
            gate_up, down = _feed_forward(layer)
            qkv = self._product(x, layer.qkv, gain=layer.attention_norm, eps=eps)
            self._product(attend(number, qkv), layer.out, y=x, add=True)
            inner = self._product(x, gate_up, gain=layer.feed_forward_norm, eps=eps, swiglu=True)
            self._product(inner, down, y=x, add=True)
        logits = torch.empty(len(x), len(self.weights.head), dtype=torch.float32, device=x.device)
        return self._product(x, self.weights.head, y=logits, gain=self.weights.norm, eps=eps)

    def _hidden(self, x: Tensor, attend: Attend) -> Tensor:
        """x (B, C), the embedded tokens -> normalised hidden states; with the matmuls of cuBLAS."""
        ops, eps = self.weights.ops, self.weights.config.rms_norm_eps
        branch: Tensor | None = None
        for number, layer in enumerate(self.weights.layers):
            gate_up, down = _feed_forward(layer)
            normed, x = ops.rms_norm(x, branch, layer.attention_norm, eps)
            branch = self._matmul(attend(number, self._matmul(normed, layer.qkv)), layer.out)
            normed, x = ops.rms_norm(x, branch, layer.feed_forward_norm, eps)
            branch = self._matmul(ops.swiglu(self._matmul(normed, gate_up)), down)
        normed, _ = ops.rms_norm(x, branch, self.weights.norm, eps)
        return normed

    def _logits(self, normed: Tensor) -> Tensor:
        head = self.weights.head
        return wide_logits(normed, head) if isinstance(head, Tensor) else self._matmul(normed, head).float()

    def _attend(self, bucket: _Bucket, layer: int, qkv: Tensor) -> Tensor:
        config = self.weights.config
        mixed = qkv.new_empty(bucket.rows, config.heads * config.head_size)
        keys, values = self.blocks.keys[layer], self.blocks.values[layer]
        tiles, parts, _ = bucket.scratch
        self._attention.decode_attention(
            qkv, self._cos, self._sin, keys, values, bucket.tables, bucket.positions, mixed, parts, tiles,
            writes_first=bucket.is_prompt, norm=self.weights.layers[layer].qk_norm,
        )  # fmt: skip
        return mixed

    def _matmul(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product(x, weight) if isinstance(weight, Int8Weight) else project(x, weight, None)

    def _product(
        self, x: Tensor, weight: Weight, y: Tensor | None = None, swiglu: bool = False, **details: Any
    ) -> Tensor:
        """See `decode_linear`; without `y`, in memory of its own."""
        if y is None:
            y = torch.empty(len(x), len(weight) // (2 if swiglu else 1), dtype=self._dtype, device=x.device)
        if isinstance(weight, Int4Weight):  # the gain of the norm is in the matrix
            has_norm = details.pop("gain", None) is not None
            self._int4.few_rows(x, weight.values, weight.scales, y, has_norm, swiglu=swiglu, **details)
            return y
        matrix, scales = (weight.values, weight.scales) if isinstance(weight, Int8Weight) else (weight, None)
        assert isinstance(matrix, Tensor), "a weight is a tensor, or in 8 or 4 bits as a GPU reads them"
        self._linear.decode_linear(x, matrix, scales, y, swiglu=swiglu, **details)
        return y


def _feed_forward(layer: LayerWeights) -> tuple[Weight, Weight]:
    assert layer.gate_up_pairs is not None
    assert layer.down is not None
    return layer.gate_up_pairs, layer.down
