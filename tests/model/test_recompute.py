"""Recomputation changes what is kept for the backward pass, and no bit of the loss or of a gradient."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy

from tests.ops.agreement import assert_close, assert_same_bits
from zero2all.estimate.flops import recomputed_flops_per_token
from zero2all.model.config import ModelConfig
from zero2all.model.recompute import KINDS, RecomputedBlock, _policy, apply_recompute
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.gradient_sink import GradientSink, sink_of
from zero2all.ops.linear import feed_forward
from zero2all.ops.registry import Ops, resolve
from zero2all.parallel.parameter_table import init_weights

VOCAB_SIZE, ROWS, LENGTH = 97, 2, 12
SIZES = {"hidden_size": 32, "intermediate_size": 48, "layers": 3, "heads": 4, "kv_heads": 2, "max_seq_len": 16}
SMALL = ModelConfig(VOCAB_SIZE, **SIZES)
DROPOUT = {"residual_dropout": 0.2, "attention_dropout": 0.3, "embedding_dropout": 0.1}
kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])


def build(kind: str, config: ModelConfig = SMALL, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Z2all:
    model = Z2all(config, ops or resolve(OpsConfig(), "cpu"))
    init_weights(model, 1)
    model = model.to(dtype).train()
    apply_recompute(model, kind, every_n=2)
    return model


def batch(seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def document_ids() -> Tensor:
    return torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 4 + [2] * 7])


def loss_and_gradients(model: Z2all, documents: Tensor | None = None) -> list[Tensor]:
    """Of two micro-batches, summed; the same dropout for every model that is asked."""
    torch.manual_seed(3)
    losses = []
    for rows in (batch(0), batch(1)):
        total, each = model.loss(rows[:, :-1], rows[:, 1:], document_ids=documents)
        total.backward()
        losses += [total.detach(), each]
    gradients = [gradient_of(parameter) for parameter in model.parameters()]
    return [*losses, *(gradient.clone() for gradient in gradients if gradient is not None), torch.rand(1)]


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Where a kernel or autograd left it."""
    sink = sink_of(parameter)
    return parameter.grad if sink is None or parameter.grad is not None else sink.buffer


@functools.cache
def exact_results(kind: str, attention: str, with_dropout: bool, with_documents: bool) -> list[Tensor]:
    config = dataclasses.replace(SMALL, **DROPOUT) if with_dropout else SMALL
    dtype, documents = (torch.float32, document_ids()) if with_documents else (torch.float64, None)
    return loss_and_gradients(build(kind, config, resolve(OpsConfig(attention=attention), "cpu"), dtype), documents)


@kinds
@pytest.mark.parametrize("with_documents", [False, True], ids=["float64", "float32, documents apart"])
@pytest.mark.parametrize(("attention", "with_dropout"), [("sdpa", True), ("math", True), ("sdpa", False)])
def test_loss_gradients_and_random_state_keep_their_bits(kind, with_documents, with_dropout, attention):
    setting = (attention, with_dropout, with_documents)
    assert_same_bits(exact_results(kind, *setting), exact_results("none", *setting))


@kinds
def test_biases_tied_tables_and_a_wide_residual_under_autocast(kind):
    config = dataclasses.replace(SMALL, attention_bias="all", mlp_bias=True, tied_embeddings=True, fp32_residual=True)

    def under_autocast(a_kind: str) -> list[Tensor]:
        model = build(a_kind, config)
        with torch.autocast("cpu", torch.bfloat16):
            return loss_and_gradients(model)

    assert_same_bits(under_autocast(kind), under_autocast("none"))


def test_parameters_keep_their_names_and_every_nth_block_is_another_kind_of_block():
    names = [name for name, _ in build("none").named_parameters()]
    for kind, recomputed in (("none", []), ("full", [0, 1, 2]), ("every_n", [0, 2]), ("selective", [0, 1, 2])):
        model = build(kind)
        assert [name for name, _ in model.named_parameters()] == names
        assert [n for n, block in enumerate(model.blocks) if isinstance(block, RecomputedBlock)] == recomputed


@functools.cache
def flops_spent(kind: str, attention: str, dropout: float) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, whose interpreter has to be chosen first

    config = dataclasses.replace(SMALL, attention_dropout=dropout)
    model, rows = build(kind, config, resolve(OpsConfig(attention=attention), "cpu")), batch()
    with FlopCounterMode(display=False) as counter:
        model.loss(rows[:, :-1], rows[:, 1:])[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("attention", "dropout"), [("sdpa", 0.0), ("sdpa", 0.3), ("math", 0.0)])
@kinds
def test_work_that_is_done_again_is_what_the_formula_says(kind, attention, dropout):
    config = dataclasses.replace(SMALL, attention_dropout=dropout)
    footprints = resolve(OpsConfig(attention=attention), "cpu").footprints
    # Positions that are masked are multiplied all the same here, so the convention with all of them holds.
    expected = recomputed_flops_per_token(config, LENGTH, kind, 2, footprints)["palm"]
    # torch's counter knows neither the CPU's fused attention nor its backward.
    if attention == "sdpa" and not dropout and kind != "selective":
        expected -= 4 * (2 if kind == "every_n" else 3) * config.heads * config.head_size * LENGTH
    spent = flops_spent(kind, attention, dropout) - flops_spent("none", attention, dropout)
    assert spent == expected * ROWS * LENGTH


def test_fused_attention_is_kept_unless_it_draws_random_numbers():
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    for dropout, kept in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
        model = build("none", dataclasses.replace(SMALL, attention_dropout=dropout))
        assert _policy(model)(None, flash) == kept


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@kinds
@pytest.mark.usefixtures("one_process")
def test_it_holds_inside_shards_that_are_gathered_again_for_it(kind):
    config = dataclasses.replace(SMALL, **DROPOUT)

    def sharded(a_kind: str) -> list[Tensor]:
        model = build(a_kind, config)
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        torch.manual_seed(3)
        hidden = model(batch()[:, :-1], document_ids=document_ids())
        hidden.float().square().sum().backward()
        grads = [parameter.grad for name, parameter in model.named_parameters() if name.startswith("blocks")]
        return [hidden.detach(), *(grad.full_tensor() for grad in grads)]

    assert_same_bits(sharded(kind), sharded("none"))


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def kernel_ops() -> Ops:
    """What `auto` takes on a GPU, through Triton's interpreter."""
    pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this test wants Triton's interpreter: TRITON_INTERPRET=1")
    from zero2all.ops.embedding import triton_embedding
    from zero2all.ops.linear import fp32_wgrad_linear
    from zero2all.ops.rms_norm import triton_rms_norm
    from zero2all.ops.rope import triton_rope
    from zero2all.ops.swiglu import triton_swiglu

    plain, linear = resolve(OpsConfig(), "cpu"), fp32_wgrad_linear
    names = {"rope": "triton", "rms_norm": "triton", "swiglu": "triton", "linear": "fp32_wgrad", "embedding": "triton"}
    got = tuple(dataclasses.replace(each, got=names.get(each.operator, each.got)) for each in plain.choices)
    ours = {"rope": triton_rope, "rms_norm": triton_rms_norm, "swiglu": triton_swiglu, "linear": linear}
    whole = feed_forward("triton", triton_swiglu, "fp32_wgrad", linear)
    return dataclasses.replace(plain, **ours, embedding=triton_embedding, feed_forward=whole, choices=got)


@pytest.mark.parametrize(
    ("kind", "bias", "documents", "qk_norm"),
    [("full", "none", document_ids(), False), ("selective", "none", None, False), ("selective", "qkv", None, True)],
)
def test_our_kernels_add_each_gradient_once_and_turn_each_position_once(kind, bias, documents, qk_norm):
    from torch.utils.flop_counter import FlopCounterMode

    config = dataclasses.replace(SMALL, layers=1, attention_bias=bias, residual_dropout=0.2, qk_norm=qk_norm)
    found, spent = {}, {}
    for a_kind in ("plain operators", "none", kind):
        model = build("none", config) if a_kind == "plain operators" else build(a_kind, config, kernel_ops())
        for parameter in model.parameters():
            parameter.gradient_sink = GradientSink(torch.zeros_like(parameter))
        torch.manual_seed(3)
        rows, document_ids = batch()[:1, :5], None if documents is None else documents[1:, :4]
        with FlopCounterMode(display=False) as counter:
            model.loss(rows[:, :-1], rows[:, 1:], document_ids=document_ids)[0].backward()
        spent[a_kind] = counter.get_total_flops()
        found[a_kind] = [gradient_of(parameter) for parameter in model.parameters()]
        assert all(gradient.any() for gradient in found[a_kind])
    assert_same_bits(found[kind], found["none"])
    for ours, plain in zip(found["none"], found["plain operators"], strict=True):
        assert_close(ours, plain, 1e-5)
    again = recomputed_flops_per_token(config, 4, kind, 1, kernel_ops().footprints)["palm"]
    uncounted = 4 * 32 * 4 if kind == "full" else 0  # the CPU's fused attention
    assert spent[kind] - spent["none"] == 4 * (again - uncounted)
