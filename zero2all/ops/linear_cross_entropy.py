"""The head and the loss: hidden states, head, targets and token weights -> (a sum to call backward on, the losses).

The sum is that of weights * losses, plus weights * z * logsumexp^2 where z is not 0. The losses (one per token, in
nats, without the z term) are for reports. Rows of the head from `vocab_size` on are padding: they take no part in the
softmax and receive no gradient. A target below 0 is not counted. The two that work in chunks take several targets of a
token, too: targets, weights and losses (..., K), from one softmax; quack leaves these to triton.

off      all logits at once, through the `cross_entropy` operator
chunked  chunk by chunk, with the gradient computed in the forward pass, in plain torch
triton   the same with our cross-entropy kernel, which overwrites the logits with their gradient
quack    the softmax inside QuACK's matmuls: neither logits nor their gradient are written (Hopper)
torch    torch's own linear_cross_entropy (2.13 and newer)

chunked and triton: per chunk, logits by one matmul, loss and gradient in place, then the gradients of hidden states
and head by two more matmuls. That is no more arithmetic than the plain head needs, because the gradient is computed
while the logits are in memory. The price: the weight of each token in the loss must be known in the forward pass.
Only these two work where the rows of the head are cut over processes (`zero2all.ops.cut_vocabulary`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops import trial
from zero2all.ops.cross_entropy import CrossEntropyOp, torch_cross_entropy
from zero2all.ops.footprint import Bytes, Footprint, Head, Moment, Sizes, nothing
from zero2all.ops.gradient_sink import sink_of
from zero2all.ops.implementation import (
    Check,
    Implementation,
    OpContext,
    has_triton,
    needs_quack,
    needs_triton,
    runs_anywhere,
)
from zero2all.ops.precision import for_autocast, widened, without_autocast

CHUNK_BYTES, FEWEST_ROWS, CHUNK_ROWS = 2**30, 8192, 32768
"""Bytes of a chunk's logits, and its least and most rows; at most a quarter of all rows, for small GPUs. Few columns
need more rows to fill a GPU: with 16,384 columns a step of 42.5 M parameters took 1.4 % less time with 32,768 rows than
with 8,192 (H200, 2026-11-18)."""
EPILOGUE_CHUNK_ROWS = 16384
"""For `quack`. On an H200 the head of z2all-1b took 40.5, 39.8, 39.1 and 39.4 ms with 4,096 to 32,768 (2026-11-15)."""

Loss = tuple[Tensor, Tensor]
"""The sum and the losses."""
LinearCrossEntropyOp = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Loss]
"""(hidden, head, targets, weights, vocab_size, z) -> (the sum, the losses)."""
ChunkKernel = Callable[[Tensor, Tensor, Tensor, int, float, bool], "tuple[Tensor, Tensor | None]"]
"""(logits, targets, weights, vocab_size, z, gradient) -> losses and penalties; the gradient overwrites the logits."""


def through_cross_entropy(cross_entropy: CrossEntropyOp) -> LinearCrossEntropyOp:
    """All logits at once, by this `cross_entropy`."""

    def off(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0) -> Loss:
        logits = F.linear(hidden, head[:vocab_size] if len(head) > vocab_size else head).flatten(0, -2)
        wanted = targets.reshape(-1)
        # The operator may overwrite the logits, so nothing may read them after it: logsumexp gets a copy.
        wide = torch.promote_types(logits.dtype, torch.float32)
        penalties = z * logits.to(wide, copy=True).logsumexp(dim=-1).square() if z else None
        losses = cross_entropy(logits, wanted.clamp(min=0)) * (wanted >= 0)
        counted = weights.reshape(-1)
        total = (losses * counted).sum()
        if penalties is not None:
            total = total + (penalties * (wanted >= 0) * counted).sum()
        return total, losses.detach().view(targets.shape)

    return off


class Given(NamedTuple):
    """The inputs: (N, C), (V, C), (N,), (N,); or targets and weights (N, K), and so the losses."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    weights: Tensor
    vocab_size: int
    z: float


class LossResults(NamedTuple):
    """The results: (N,), (N,), (N, C), and (V, C) in float32."""

    losses: Tensor
    penalties: Tensor | None
    dhidden: Tensor | None
    dhead: Tensor | None

    @staticmethod
    def empty(given: Given, needed: bool, head_rows: int | None = None) -> LossResults:
        """Memory for them; `needed`: for gradients too, of the head unless it is frozen. dhead is zero, or has
        `head_rows` uninitialised rows."""
        hidden, head = given.hidden, given.head
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(given.targets.shape, dtype=wide, device=hidden.device)
        penalties = torch.zeros_like(losses) if given.z else None
        if not needed:
            return LossResults(losses, penalties, None, None)
        if not head.requires_grad:
            return LossResults(losses, penalties, torch.empty_like(hidden), None)
        if head_rows is None:
            dhead = torch.zeros(head.shape, dtype=wide, device=head.device)
        else:
            dhead = torch.empty(head_rows, head.shape[1], dtype=wide, device=head.device)
        return LossResults(losses, penalties, torch.empty_like(hidden), dhead)


Fill = Callable[[Given, bool], LossResults]
"""The bool: whether gradients are needed."""


class LinearCrossEntropy(torch.autograd.Function):
    """(hidden (N, C), head (V, C), targets, weights, vocab_size, z, fill) -> (the sum, the losses (N,))."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float, fill: Fill
    ) -> Loss:
        needed = any(ctx.needs_input_grad[:2])
        given = Given(hidden, head, targets, weights, vocab_size, z)
        losses, penalties, dhidden, dhead = fill(given, needed)
        ctx.save_for_backward(dhidden, dhead if dhead is None else dhead[: head.shape[0]])
        ctx.head = head
        ctx.mark_non_differentiable(losses)
        total = losses if penalties is None else losses + penalties
        return (total * weights).sum(), losses

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dsum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dhead = ctx.saved_tensors
        sink = sink_of(ctx.head)
        if dhead is None:
            return dhidden * dsum, None, None, None, None, None, None
        if sink is not None and dhidden.is_cuda and has_triton():
            from zero2all.ops.kernels.scaled import add_scaled_, scaled

            add_scaled_(sink.buffer, dhead, dsum)
            sink.mark_ready()
            return scaled(dhidden, dsum), None, None, None, None, None, None
        dhidden = dhidden * dsum  # a scalar tensor keeps its digits and leaves the dtype as it is
        if sink is None:
            return dhidden, (dhead * dsum).to(ctx.head.dtype), None, None, None, None, None
        sink.buffer.addcmul_(dhead, dsum.to(sink.buffer.dtype).expand_as(dhead))
        sink.mark_ready()
        return dhidden, None, None, None, None, None, None


def fill_by_chunks(kernel: ChunkKernel) -> Fill:
    """Three matmuls per chunk, with `kernel` after the first."""

    def fill(given: Given, needed: bool) -> LossResults:
        results = LossResults.empty(given, needed)
        _fill_rows(results, kernel, given, 0)
        return results

    return fill


def chunk_rows(rows: int, columns: int, value_bytes: int) -> int:
    """Rows whose logits exist at once: a power of two, so that chunks are multiples of a kernel's tiles."""
    fitting = max(1, min(CHUNK_BYTES // (columns * value_bytes), rows // 4))
    return min(CHUNK_ROWS, max(FEWEST_ROWS, 1 << (fitting.bit_length() - 1)))


def _fill_rows(results: LossResults, kernel: ChunkKernel, given: Given, start: int) -> None:
    """The rows from `start` on; their gradient of the head is added to what is there."""
    hidden, head, targets, weights, vocab_size, z = given
    losses, penalties, dhidden, dhead = results
    count = hidden.shape[0]
    if start == count:
        return
    chunk = chunk_rows(count, head.shape[0], hidden.element_size())
    logits = torch.empty(min(count - start, chunk), head.shape[0], dtype=hidden.dtype, device=hidden.device)
    for first in range(start, count, chunk):
        rows = slice(first, min(first + chunk, count))
        here = logits[: rows.stop - rows.start]
        torch.mm(hidden[rows], head.t(), out=here)
        losses[rows], of_z = kernel(here, targets[rows], weights[rows], vocab_size, z, dhidden is not None)
        if penalties is not None and of_z is not None:
            penalties[rows] = of_z
        if dhidden is not None:
            torch.mm(here, head, out=dhidden[rows])
        if dhead is not None:
            if here.is_cuda and here.dtype != dhead.dtype:
                # The matmul's own epilogue adds, in float32: no chunk's gradient is rounded to bfloat16.
                torch.addmm(dhead, here.t(), hidden[rows], out_dtype=dhead.dtype, out=dhead)
            else:
                dhead.add_(here.t() @ hidden[rows])


def _fill_in_epilogues(given: Given, needed: bool, chunk_rows: int | None = None) -> LossResults:
    """With the softmax inside the matmuls, for whole tiles of rows, where both gradients are needed and the vocabulary
    fills a tile of columns; the remaining rows by our kernel."""
    from zero2all.ops.kernels import softmax_epilogue as epilogue
    from zero2all.ops.kernels.cross_entropy import cross_entropy_in_place

    hidden, head, targets, weights, vocab_size, z = given
    whole = hidden.shape[0] // epilogue.ROWS * epilogue.ROWS if needed and head.requires_grad else 0
    if whole == 0 or vocab_size < epilogue.TILE or targets.dim() > 1:
        return _fill_by_triton(given, needed)
    results = LossResults.empty(given, needed, head_rows=epilogue.gradient_rows(head.shape[0]))
    losses, penalties, dhidden, dhead = results
    assert dhidden is not None
    assert dhead is not None
    chunk = EPILOGUE_CHUNK_ROWS if chunk_rows is None else chunk_rows
    epilogue.losses_and_gradients(
        hidden[:whole], head, targets, weights, vocab_size, z, chunk, losses, penalties, dhidden, dhead
    )
    _fill_rows(results._replace(dhead=dhead[: head.shape[0]]), cross_entropy_in_place, given, whole)
    return results


def loss_by_chunks(
    fill: Fill, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0
) -> Loss:
    """The operator whose chunks `fill` computes."""
    hidden, head = for_autocast(hidden, head)
    if not torch.is_grad_enabled():  # ctx.needs_input_grad of a parameter is True even then
        hidden, head = hidden.detach(), head.detach()
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    flat = (len(rows), *targets.shape[hidden.dim() - 1 :])
    given = (targets.reshape(flat), weights.reshape(flat), vocab_size, z, fill)
    total, losses = LinearCrossEntropy.apply(rows, head, *given)
    return total, losses.view(targets.shape)


def torch_kernel(
    logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss and gradient of one chunk by the formulas; see `zero2all.ops.kernels.cross_entropy` for the same fused."""
    wide = widened(logits[:, :vocab_size])
    logsum = wide.logsumexp(dim=-1)
    counted = targets >= 0
    at_target = targets.clamp(min=0).unsqueeze(1)
    losses = torch.where(counted, logsum - wide.gather(1, at_target).squeeze(1), 0.0)
    penalties = torch.where(counted, z * logsum.square(), 0.0) if z else None
    if gradient:
        here = torch.where(counted, weights, 0.0).to(wide.dtype)
        slopes = (wide - logsum.unsqueeze(1)).exp_().mul_((here * (1.0 + 2.0 * z * logsum)).unsqueeze(1))
        slopes.scatter_add_(1, at_target, -here.unsqueeze(1))
        logits[:, :vocab_size] = slopes
        logits[:, vocab_size:].zero_()
    return losses, penalties


def of_several(kernel: ChunkKernel, first: Callable[[int], int] = lambda _: 0, sum_parts: Any = None) -> ChunkKernel:
    """`kernel`, also for targets and weights (N, K): as if the first had all the weight, and the columns of the targets
    written anew, because in bfloat16 nothing would be left of a sum of weights that nearly cancel out. `first`: the id
    of the first of so many columns; `sum_parts`: over the processes that have other columns."""

    def kernel_of_several(logits: Tensor, targets: Tensor, weights: Tensor, *more: Any) -> tuple[Tensor, Tensor | None]:
        vocab_size, z, gradient = more
        if targets.dim() == 1:
            return kernel(logits, targets, weights, vocab_size, z, gradient)
        assert not z, "of several targets there is no z term"
        column, whole = targets - first(logits.shape[1]), weights.sum(dim=1)
        is_here, column = (column >= 0) & (column < logits.shape[1]), column.clamp(0, logits.shape[1] - 1)
        found = torch.where(is_here, widened(logits.gather(1, column)), 0.0)
        found = found if sum_parts is None else sum_parts(found)
        losses = kernel(logits, targets[:, 0].contiguous(), whole, vocab_size, z, gradient)[0].unsqueeze(1)
        losses = losses + found[:, :1] - found
        if gradient:
            same = targets.unsqueeze(2) == targets.unsqueeze(1)  # where an id stands twice, both get the sum
            slopes = whole.unsqueeze(1) * (-losses).exp() - (same * weights.unsqueeze(1)).sum(dim=2)
            # A target that is not here must not write over one that is: it writes what that one does, or what is there.
            one = is_here.int().argmax(dim=1, keepdim=True)
            column = torch.where(is_here, column, column.gather(1, one))
            slopes = torch.where(is_here, slopes, slopes.gather(1, one)).to(logits.dtype)
            any_here = is_here.any(dim=1, keepdim=True)
            logits.scatter_(1, column, torch.where(any_here, slopes, logits.gather(1, column)))
        return losses, None

    return kernel_of_several


def _fill_by_triton(given: Given, needed: bool) -> LossResults:
    """By chunks, with our kernel."""
    from zero2all.ops.kernels.cross_entropy import cross_entropy_in_place

    return fill_by_chunks(of_several(cross_entropy_in_place))(given, needed)


chunked_linear_cross_entropy = partial(loss_by_chunks, fill_by_chunks(of_several(torch_kernel)))
triton_linear_cross_entropy = partial(loss_by_chunks, _fill_by_triton)
quack_linear_cross_entropy = partial(loss_by_chunks, _fill_in_epilogues)


def torch_linear_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0
) -> Loss:
    """torch's own, which chunks too."""
    assert z == 0.0, "the check refuses a z term"
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    losses = widened(
        F.linear_cross_entropy(rows, head[:vocab_size], wanted.clamp(min=-1), reduction="none", ignore_index=-1)
    )
    return (losses * weights.reshape(-1)).sum(), losses.detach().view(targets.shape)


def _needs_torch_2_13(context: OpContext) -> str | None:
    if not hasattr(F, "linear_cross_entropy"):
        return f"it needs torch 2.13, and this is {torch.__version__}"
    return "it has no z term" if context.z_loss else None


def _needs_quack(context: OpContext) -> str | None:
    problem = needs_quack(context)
    if problem is None and torch.cuda.get_device_capability()[0] != 9:
        problem = "it runs only on GPUs of the Hopper generation"
    if problem is None and context.dtype != torch.bfloat16:
        problem = f"it computes in bfloat16, and the model is {str(context.dtype).removeprefix('torch.')}"
    if problem is None and context.vocab_size % 64:
        problem = f"it needs a head whose rows are multiples of 64, and there are {context.vocab_size}"
    return problem or problem_in_trial()


@cache
def problem_in_trial() -> str | None:
    """What goes wrong when QuACK computes a small loss with z term and padding; None: nothing does."""
    vocab_size, z, rows = 630, 1e-3, 300
    fill = partial(_fill_in_epilogues, chunk_rows=128)  # two chunks: the second adds to the first one's gradient
    generator = torch.Generator(trial.DEVICE).manual_seed(2)
    targets = torch.randint(-1, vocab_size, (rows,), generator=generator, device=trial.DEVICE)
    weights = torch.rand(rows, generator=generator, device=trial.DEVICE)

    def function(hidden: Tensor, head: Tensor) -> Tensor:
        return loss_by_chunks(fill, hidden, head, targets, weights, vocab_size, z)[0]

    def formula(hidden: Tensor, head: Tensor) -> Tensor:
        logits = hidden @ head[:vocab_size].t()
        penalties = z * logits.logsumexp(dim=-1).square() * (targets >= 0)
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)
        return ((losses + penalties) * weights).sum()

    return trial.problem_of(function, formula, [(rows, 256), (640, 256)], torch.bfloat16)


def _with_whole_head(check: Check = runs_anywhere) -> Check:
    """Refuses a head whose rows are cut over processes."""

    def problem(context: OpContext) -> str | None:
        if context.vocabulary_cut:
            return "it needs the whole head, whose rows parallel.tensor cuts"
        return check(context)

    return problem


def _by_chunks(row_bytes: Bytes, second_row_bytes: Bytes = nothing) -> Head:
    """Losses and the gradient of the hidden states (per token), that of the head in float32, and a chunk of logits."""

    def forward(sizes: Sizes) -> tuple[Moment, ...]:
        per_token, head = _gradients(sizes)
        return (Moment(per_token, head, row_bytes(sizes), second_row_bytes(sizes)),)

    return Head(forward, _after_chunks)


def _gradients(sizes: Sizes) -> tuple[float, float]:
    """Per token the gradient of its hidden state and its loss; and the gradient of the head."""
    head = float(sizes.wide_bytes * sizes.vocab_rows * sizes.hidden_size)
    return sizes.value_bytes * sizes.hidden_size + 2.0 * sizes.wide_bytes, head


def _after_chunks(sizes: Sizes) -> tuple[Moment, ...]:
    """Both gradients, and that of the hidden states times that of the loss. Without a sink, as in float32, the same is
    done with the gradient of the head."""
    per_token, head = _gradients(sizes)
    copies = 2 if sizes.value_bytes == sizes.wide_bytes else 1
    return (Moment(per_token + sizes.value_bytes * sizes.hidden_size, copies * head),)


def _logits(sizes: Sizes) -> float:
    return float(sizes.value_bytes * sizes.vocab_rows)


def _logits_in_steps(sizes: Sizes) -> float:
    """The logits, their copy in float32 where they are narrower, and the gradient in float32."""
    copy = sizes.wide_bytes if sizes.value_bytes < sizes.wide_bytes else 0
    return _logits(sizes) + (copy + sizes.wide_bytes) * sizes.vocab_rows


def _exponentials(sizes: Sizes) -> float:
    """Exponentials instead of logits; two numbers per tile of 192 columns, one scale per group of 64; and the hidden
    state times a factor."""
    padded = sizes.vocab_rows + 64.0  # columns are filled up to tiles of 128
    return sizes.value_bytes * (padded * (1 + 1 / 64) + sizes.hidden_size) + 8 * sizes.vocab_rows / 192


def _hidden_again(sizes: Sizes) -> float:
    """The hidden states times a factor of the chunk before are freed only when those of the next are there."""
    return float(sizes.value_bytes * sizes.hidden_size)


def _chunk_rows(sizes: Sizes, tokens: int) -> int:
    return chunk_rows(tokens, max(1, sizes.vocab_rows), sizes.value_bytes)  # a stage may have no head


CHUNKS = Footprint(head=_by_chunks(_logits), chunk_rows=_chunk_rows)
IN_STEPS = Footprint(head=_by_chunks(_logits_in_steps), chunk_rows=_chunk_rows)
EPILOGUES = Footprint(head=_by_chunks(_exponentials, _hidden_again), chunk_rows=lambda *_: EPILOGUE_CHUNK_ROWS)

IMPLEMENTATIONS: tuple[Implementation[LinearCrossEntropyOp], ...] = (
    Implementation(
        "quack", quack_linear_cross_entropy, _with_whole_head(_needs_quack), compile_safe=False, footprint=EPILOGUES
    ),
    Implementation("triton", triton_linear_cross_entropy, needs_triton, compile_safe=False, footprint=CHUNKS),
    Implementation("chunked", chunked_linear_cross_entropy, compile_safe=False, footprint=IN_STEPS),
    # The registry puts the chosen `cross_entropy` in place of torch's, and its footprint here.
    Implementation("off", through_cross_entropy(torch_cross_entropy), _with_whole_head()),
    Implementation("torch", torch_linear_cross_entropy, _with_whole_head(_needs_torch_2_13), footprint=CHUNKS),
)
