"""What a GPU kernel or a CPU operator does in a training step, by its name.

A profiler gives names; an anatomy of a step needs groups. The rules below are tried from top to bottom, the first that
matches wins, so a narrow rule stands above a wide one: `cutlass::device_kernel<flash::…>` is attention, although
cutlass is otherwise a sign of a matrix product. What no rule knows is element-wise: on a GPU that is what torch, and
torch.compile, make of everything else.
"""

import re
from dataclasses import dataclass
from functools import cache

GEMM, ATTENTION, ELEMENTWISE, LOSS = "GEMM", "attention", "element-wise", "loss"
OPTIMIZER, COMMUNICATION, COPIES = "optimizer", "communication", "memory copies"
GROUPS = (GEMM, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, COMMUNICATION, COPIES)


@dataclass(frozen=True)
class Kernel:
    """What a kernel is for."""

    group: str
    operator: str | None = None
    """Its name in `zero2all.estimate.floors.operator_work`, where the kernel is one of that operator's."""
    is_backward: bool | None = None


OUR_KERNELS = {
    "_forward": Kernel(ELEMENTWISE, "rms_norm", False),
    "_backward": Kernel(ELEMENTWISE, "rms_norm", True),
    "_turn_in_place": Kernel(ELEMENTWISE, "rope", False),
    "_gather_turned_back": Kernel(ELEMENTWISE, "rope", True),
    "_swiglu_forward": Kernel(ELEMENTWISE, "swiglu", False),
    "_swiglu_backward": Kernel(ELEMENTWISE, "swiglu", True),
    "_sum_within_pieces": Kernel(ELEMENTWISE, "embedding", True),
    "_losses_and_gradient": Kernel(LOSS, "cross_entropy"),
    "_update": Kernel(OPTIMIZER, "optimizer", False),
    "_times_transposed": Kernel(OPTIMIZER),
    **dict.fromkeys(("_sum_parts", "_add_over_borders", "_gated_forward", "_gated_backward"), Kernel(ELEMENTWISE)),
    **dict.fromkeys(("_sum_rows", "_scaled", "_add_scaled", "_largest", "_quantise", "_greedy"), Kernel(ELEMENTWISE)),
    **dict.fromkeys(("_row_sums", "_slopes", "_last_columns", "_close_rows", "_scales"), Kernel(LOSS)),
    "_sum_of_squares": Kernel(OPTIMIZER),  # the norm of the gradient
    **dict.fromkeys(("_attend", "_write"), Kernel(ATTENTION)),  # `_write`: keys and values into the cache of decoding
    **dict.fromkeys(("_one_row", "_few_rows", "_many_rows"), Kernel(GEMM)),
}
"""The Triton kernels of `zero2all.ops.kernels`, by the name of their function."""

KERNEL_RULES: tuple[tuple[str, Kernel], ...] = (
    (r"^mem(cpy|set)|memcpy(32|128)?_post", Kernel(COPIES)),
    (r"nccl|nvshmem|multimem_|symm_mem|one_shot_all_reduce|two_shot_all_reduce", Kernel(COMMUNICATION)),
    # cuDNN, FlashAttention 2 to 4, torch's memory-efficient attention, FlexAttention. What runs around the backward
    # pass (dot products of output and gradient, conversions) has no floor of its own.
    (r"flash_?(attn)?\w*_bwd\w*(pre|post)process|compute_dot_do_o|bwd_dot_do_o|convert_d[qkv]", Kernel(ATTENTION)),
    (
        r"flash\w*bprop|sdpa\w*bprop|flash_bwd|flashattn\w*bwd|fmha\w*(bwd|b_|backward)",
        Kernel(ATTENTION, "attention", True),
    ),
    (r"flashattentionbackward|flash_attention_backward|flex_attention_backward", Kernel(ATTENTION, "attention", True)),
    (
        r"flash\w*fprop|sdpa\w*fprop|flash_fwd|flashattn\w*fwd|fmha\w*(fwd|f_|forward)",
        Kernel(ATTENTION, "attention", False),
    ),
    (r"flashattentionforward|flash_attention|flex_attention", Kernel(ATTENTION, "attention", False)),
    (r"flash|fmha|sdpa|attention|cudnn::fusion", Kernel(ATTENTION)),
    (r"softmax|nll_loss|nllloss|cross_?entropy|logsumexp|_cce_", Kernel(LOSS)),
    (r"adam|lion|multi_tensor_apply|lpnorm|optimizer", Kernel(OPTIMIZER)),
    # nvjet, xmma and "s16816gemm": cuBLAS. "Gemm" in a cutlass or QuACK name. split-K: the end of a cuBLAS product.
    (r"nvjet|xmma|gemm|gemv|grouped_mm|scaled_mm|splitk|cublas|triton_tem_\w*mm|implicit_convolve", Kernel(GEMM)),
    (r"cutlass", Kernel(GEMM)),
)
"""Pattern in the lower-case name of a kernel -> what it is for."""

OPERATOR_RULES: tuple[tuple[str, str], ...] = (
    (r"^(c10d|gloo|nccl|_c10d_functional)\b", COMMUNICATION),
    (r"scaled_dot_product|flash_attention|efficient_attention|flex_attention", ATTENTION),
    (r"softmax|nll_loss|cross_entropy|logsumexp", LOSS),
    (r"fused_adam|_foreach_|fused_sgd", OPTIMIZER),
    (r"^(aten::|mkldnn::)?_?(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|einsum|mv|addmv|dot)_?$", GEMM),
    (r"grouped_mm|scaled_mm|mkldnn_linear|linear_pointwise", GEMM),
    (r"^aten::(copy_|_to_copy|clone|contiguous|zero_|fill_|cat|stack)$|^mem(cpy|set)", COPIES),
)
"""The same for the operators of a CPU trace (`aten::mm`)."""


@cache
def kernel_of(name: str) -> Kernel:
    """What the GPU kernel of this name is for."""
    if name in OUR_KERNELS:
        return OUR_KERNELS[name]
    lower = name.lower()
    return next((kernel for rule, kernel in KERNEL_RULES if re.search(rule, lower)), Kernel(ELEMENTWISE))


@cache
def operator_group(name: str) -> str:
    """The group of a CPU operator, one of GROUPS."""
    return next((group for rule, group in OPERATOR_RULES if re.search(rule, name.lower())), ELEMENTWISE)
