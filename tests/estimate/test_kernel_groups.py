"""Names that an H200, an A100 and this CPU printed, and the group of each."""

import ast
from pathlib import Path

from zero2all.estimate.kernel_groups import GROUPS, OPERATOR_RULES, OUR_KERNELS, kernel_of, operator_group

KERNELS = Path(__file__).parents[2] / "zero2all" / "ops" / "kernels"


def launched_kernels() -> set[str]:
    """`_name[grid](…)` in zero2all/ops/kernels, where _name is a function under @triton.jit."""
    jitted, launched = set(), set()
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
                jitted.add(node.name)
            called = getattr(node, "func", None)
            if isinstance(called, ast.Subscript) and isinstance(called.value, ast.Name):
                launched.add(called.value.id)
    return jitted & launched


def test_every_kernel_of_ours_that_is_launched_has_a_group():
    assert launched_kernels() == set(OUR_KERNELS)
    assert len(OUR_KERNELS) > 20


def test_group_of_a_kernel():
    for name, group in (
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("nvjet_sm90_tss_192x192_64x3_1x2_h_badd_coopB_NTN", "GEMM"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape>>", "GEMM"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "GEMM"),
        ("kernel_cutlass_kernel_quackepiloguefrontendGemmMod_dgated_epi_e33f6fcaf9e83884_p_c_sm9_object_at", "GEMM"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "memory copies"),
        ("Memset (Device)", "memory copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "element-wise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "element-wise"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1", "element-wise"),
        ("_losses_and_gradient", "loss"),
        ("_update", "optimizer"),
    ):
        assert kernel_of(name).group == group


def test_kernels_with_a_floor_name_their_operator_and_direction():
    cudnn, cute = "cudnn_generated_fort_native_sdpa_sm90_flash_", "kernel_cutlass_kernel_flash_attncuteflash_"
    for name, is_backward in {
        f"{cudnn}fprop_wgmma_f16_knob_7_64x128x64": False,
        f"{cudnn}bprop_wgmma_f16_knob_31_128x64x64": True,
        f"{cute}fwd_sm90FlashAttentionForwardSm90_object_at__tensor": False,
        f"{cute}bwd_sm90FlashAttentionBackwardSm90_object_at__tensor": True,
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>": True,
        "void cutlass::device_kernel<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90>>": True,
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": True,
        "_backward": True,
        "_turn_in_place": False,
    }.items():
        kernel = kernel_of(name)
        assert kernel.operator is not None
        assert kernel.is_backward is is_backward
    for name in (
        f"{cute}bwd_preprocessFlashAttentionBackwardPreprocess_object_at__",
        f"{cute}bwd_postprocessFlashAttentionBackwardPostprocess_object_at",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>",
    ):  # what runs around attention has no floor
        assert (kernel_of(name).group, kernel_of(name).operator) == ("attention", None)


def test_group_of_an_operator():
    for name, group in {
        "aten::mm": "GEMM",
        "aten::addmm_": "GEMM",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::_log_softmax": "loss",
        "aten::_foreach_mul_": "optimizer",
        "c10d::allreduce_": "communication",
        "gloo:all_reduce": "communication",
        "aten::copy_": "memory copies",
        "aten::embedding": "element-wise",
    }.items():
        assert operator_group(name) == group
    assert {group for _, group in OPERATOR_RULES} <= set(GROUPS)
