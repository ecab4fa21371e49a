"""The rows of the ablation table: what each changes in a config. No torch here.

`all-fused` is the config unchanged: with `ops: auto` the best of everything. It is also the anchor, measured again in
every sitting, because a GPU is not equally fast on two days. The others change one thing in it, or build up from
`naive`, where every operator is its formula in plain torch.

The rows of the group `tensor` are the code of a tensor rank (`zero2all.parallel.tensor`) in one process that has
everything. All sizes, and so FLOPs and MFU, are those of the anchor, and the loss must be the same: whatever they take
longer is what the cut path costs before anything is sent over a link. (The sizes of one rank of 2 or 4 would say how
the kernels like smaller matrices, but their tokens/s and MFU could not stand beside those of the other rows.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zero2all.common.errors import UsageError
from zero2all.common.schema import nearest_hint
from zero2all.config import RunConfig

NAIVE = {
    "attention": "math",
    "rope": "eager",
    "rms_norm": "eager",
    "swiglu": "eager",
    "linear": "plain",
    "embedding": "torch",
    "linear_cross_entropy": "off",
    "cross_entropy": "eager",
    "optimizer": "eager",
    "compile": "none",
}
"""Every operator by its formula in plain torch."""

ANCHOR = "all-fused"

TensorPath = Literal["none", "loss", "whole"]
"""What is computed as a tensor rank computes it: nothing; the loss alone, with an exchange that changes nothing; or
attention, feed-forward, embedding and loss, with the real collectives in a group of one process."""


@dataclass(frozen=True)
class Variant:
    """One row."""

    name: str
    title: str  # as shown in tables; {odd} is replaced by the size of the odd vocabulary
    group: str  # its group in the picture
    ops: Mapping[str, str] = field(default_factory=dict)  # fields of `ops` that differ from the config's
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of `model` that differ
    train: Mapping[str, Any] = field(default_factory=dict)  # fields of `train` that differ
    optim: Mapping[str, Any] = field(default_factory=dict)  # fields of `optim` that differ
    cuda_graph: bool = True  # whether passes may be captured as a CUDA graph (train.cuda_graph)
    odd_vocabulary: bool = False  # one id more than the padded size of the vocabulary, so that it is odd
    unpadded: bool = False  # the head has exactly as many rows as there are ids
    tensor_path: TensorPath = "none"

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is used, which makes the first step long."""
        return self.ops.get("compile", "none") != "none"


KERNELS = {"rope": "triton", "rms_norm": "triton", "swiglu": "triton", "linear": "fp32_wgrad", "embedding": "triton"}
"""For the rows in which compilation would choose otherwise."""
OWN_KERNELS = {"attention": "sdpa_cudnn", "rope": "triton", "swiglu": "triton", "linear_cross_entropy": "triton"}
"""What `auto` takes where nothing is installed but torch and Triton."""

WITHOUT_CROSS_ENTROPY = {"linear_cross_entropy": "off", "cross_entropy": "eager"}
FLASH = {"attention": "sdpa_flash"}
FLASH_CE_ADAMW = {**FLASH, "linear_cross_entropy": "auto", "cross_entropy": "auto", "optimizer": "auto"}


def _compiled(name: str, title: str, ops: Mapping[str, str]) -> Variant:
    """A row with the whole trunk compiled, as in the third table of `seed_table`."""
    return Variant(name, title, "compile", {**ops, "compile": "trunk"})


VARIANTS = (
    Variant(ANCHOR, "all fused", "whole"),
    Variant("naive", "naive", "whole", NAIVE, cuda_graph=False),
    Variant("without-attention", "without fused attention (math)", "leave one out", {"attention": "math"}),
    Variant("attention-cudnn", "attention: cuDNN's", "leave one out", {"attention": "sdpa_cudnn"}),
    Variant("attention-flash", "attention: sdpa's flash", "leave one out", {"attention": "sdpa_flash"}),
    Variant("without-rope", "without fused rope", "leave one out", {"rope": "eager"}),
    Variant("without-cross-entropy", "without fused cross-entropy", "leave one out", WITHOUT_CROSS_ENTROPY),
    Variant("without-rms-norm", "without fused RMSNorm", "leave one out", {"rms_norm": "eager"}),
    Variant("without-swiglu", "without fused SwiGLU", "leave one out", {"swiglu": "eager"}),
    Variant("without-linear", "without float32 weight gradients", "leave one out", {"linear": "plain"}),
    Variant("without-embedding", "without fused embedding gradient", "leave one out", {"embedding": "torch"}),
    Variant("without-graph", "without CUDA graphs", "leave one out", cuda_graph=False),
    Variant("optimizer-fused", "AdamW: torch's fused", "leave one out", {"optimizer": "fused"}),
    Variant("optimizer-eager", "AdamW: torch's loop", "leave one out", {"optimizer": "eager"}),
    Variant("only-flash", "naive + flash attention", "step by step", {**NAIVE, **FLASH}, cuda_graph=False),
    Variant(
        *("flash-ce-adamw", "naive + flash + cross-entropy + AdamW", "step by step"),
        {**NAIVE, **FLASH_CE_ADAMW},
        cuda_graph=False,
    ),
    Variant("fp8", "all fused, fp8 linears", "other choices", {"linear": "fp8"}),
    Variant("own-kernels", "no FlashAttention 4, no QuACK", "other choices", OWN_KERNELS),
    Variant("lean-norm", "norm that keeps no sum", "other choices", {"rms_norm": "triton_lean"}),
    Variant("fp32-residual", "float32 residual", "other choices", model={"fp32_residual": True}),
    Variant("float32", "float32 throughout", "other choices", train={"precision": "float32"}),
    Variant("recompute-selective", "selective recomputation", "other choices", train={"recompute": "selective"}),
    Variant("recompute-full", "all blocks recomputed", "other choices", train={"recompute": "full"}),
    Variant(
        "recompute-groups",
        "recomputed in groups of 4 blocks",
        "other choices",
        train={"recompute": "groups", "recompute_every": 4},
    ),
    Variant("adamw-8bit", "AdamW, moments in 8 bits", "other choices", optim={"kind": "adamw_8bit"}),
    Variant("adamw-bf16", "AdamW, all in bfloat16", "other choices", optim={"kind": "adamw_bf16"}),
    Variant("muon", "Muon", "other choices", optim={"kind": "muon"}),
    Variant("odd-vocabulary", "vocabulary {odd}, padded", "vocabulary", odd_vocabulary=True),
    Variant(
        "odd-vocabulary-unpadded", "vocabulary {odd}, not padded", "vocabulary", odd_vocabulary=True, unpadded=True
    ),
    Variant("cut-loss", "loss of a cut vocabulary, 1 process", "tensor", tensor_path="loss"),
    # Passes that communicate are neither compiled nor captured: compare it with `without-graph`.
    Variant(
        *("tensor-path", "tensor parallel code, 1 process", "tensor"),
        {"compile": "none"},
        cuda_graph=False,
        tensor_path="whole",
    ),
    Variant("naive-compile-block", "naive + compile (blocks)", "compile", {**NAIVE, "compile": "block"}),
    Variant("naive-compile-trunk", "naive + compile (trunk)", "compile", {**NAIVE, "compile": "trunk"}),
    Variant("fused-compile-block", "all fused + compile (blocks)", "compile", {"compile": "block"}),
    Variant("fused-compile-trunk", "all fused + compile (trunk)", "compile", {"compile": "trunk"}),
    Variant("kernels-compile-block", "our kernels + compile (blocks)", "compile", {**KERNELS, "compile": "block"}),
    # Of the kernels kept under compilation one is left out at a time.
    _compiled("kernels-compile-trunk", "our kernels + compile (trunk)", KERNELS),
    _compiled("compile-without-attention", "compiled, math attention", {**KERNELS, "attention": "math"}),
    _compiled("compile-attention-flash", "compiled, sdpa's flash", {**KERNELS, **FLASH}),
    _compiled("compile-without-rope", "compiled, without fused rope", {**KERNELS, "rope": "eager"}),
    _compiled(
        "compile-without-cross-entropy", "compiled, without fused cross-entropy", {**KERNELS, **WITHOUT_CROSS_ENTROPY}
    ),
    _compiled("compile-without-rms-norm", "compiled, without fused RMSNorm", {**KERNELS, "rms_norm": "eager"}),
    _compiled("compile-without-swiglu", "compiled, without fused SwiGLU", {**KERNELS, "swiglu": "eager"}),
    _compiled("compile-optimizer-eager", "compiled, torch's AdamW loop", {**KERNELS, "optimizer": "eager"}),
    _compiled("compile-only-flash", "naive + flash, compiled", {**NAIVE, **FLASH}),
    _compiled("compile-flash-ce-adamw", "naive + flash + CE + AdamW, compiled", {**NAIVE, **FLASH_CE_ADAMW}),
)
"""In the order they are measured: compiled rows take longest and come last."""

BY_NAME = {variant.name: variant for variant in VARIANTS}


def named_variants(names: list[str] | None) -> list[Variant]:
    """The rows asked for, in the order of the table; None is all of them."""
    for name in names or []:
        if name not in BY_NAME:
            hint = nearest_hint(name, BY_NAME)
            problem = f"There is no row {name}. `z2a perf bench ablate CONFIG --list` lists all rows."
            raise UsageError(f"{problem} {hint}" if hint else problem)
    return [variant for variant in VARIANTS if names is None or variant.name in names]


def odd_vocabulary(config: RunConfig) -> int:
    """The padded size of the vocabulary plus one: 64,320 -> 64,321."""
    return config.model.vocab_rows + 1


def title_of(variant: Variant, config: RunConfig) -> str:
    """The row's title for this config."""
    return variant.title.format(odd=odd_vocabulary(config))


def vary(config: RunConfig, variant: Variant) -> RunConfig:
    """The config of a row. `unpadded` and `tensor_path` are not in it: see `zero2all.measure.step_timer`."""
    model = dict(variant.model)
    if variant.odd_vocabulary:
        model["vocab_size"] = odd_vocabulary(config)
    train = dict(variant.train) if variant.cuda_graph else {**variant.train, "cuda_graph": "off"}
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, **train),
        ops=dataclasses.replace(config.ops, **variant.ops),  # type: ignore[arg-type]
        model=dataclasses.replace(config.model, **model),
        optim=dataclasses.replace(config.optim, **variant.optim),
    )
