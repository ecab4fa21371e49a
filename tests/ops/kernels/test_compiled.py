"""Kernels compile for a Hopper GPU: the interpreter, which other tests use, takes code that the compiler does not."""

import os
import subprocess
import sys

COMMON = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
"""

DECODING_ROPE_AND_LOSS = """
from zero2all.ops.kernels import cross_entropy, decode_attention, decode_greedy, decode_linear, rope

FLOATS = {name: "*fp32" for name in ("cos", "sin", "parts", "weights", "scales", "logits", "best")}
WHOLE = {name: "*i32" for name in ("tables", "positions", "arrived", "ids", "tokens")} | {"never": "*i1"}
NUMBERS = {name: "i32" for name in ("table_stride", "limit", "rows", "inputs", "width")}
NUMBERS |= {"scale": "fp32", "eps": "fp32"}

def compile_kernel(kernel, weight="*bf16", kinds={}, word="griddepcontrol.wait", **constants):
    kinds = FLOATS | WHOLE | NUMBERS | {"weight": weight} | kinds
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": 4, "launch_pdl": True})
    assert word in compiled.asm["ptx"]
    return compiled.asm["ptx"]

SHAPE = {"COLUMNS": 96, "NORM": True, "SWIGLU": True, "ADD": False, "OVERLAP": True, "ROWS": 16, "BLOCK": 64}
compile_kernel(decode_linear._one_row, **SHAPE, SCALED=False)
compile_kernel(decode_linear._few_rows, "*i8", **SHAPE, SCALED=True, INPUTS=16)
compile_kernel(
    decode_attention._attend, QUERY_HEADS=6, KEY_HEADS=2, WIDTH=24, PLACES=16, SPLITS=4, LEAST=32, OVERLAP=True,
    NORM=True, GROUP=16, TOKENS=32, BLOCK=32,
)
compile_kernel(decode_greedy._greedy, PARTS=4, OVERLAP=True, BLOCK=1024)
counts = [name for name in rope._gather_turned_back.arg_names if name.split("_")[-1] in ("batch", "head", "time")]
counts += ["length", "period", "row_stride", "out_stride", "query_heads", "shared_heads", "turned_heads", "half"]
ROPE = dict.fromkeys(counts, "i32") | {"query_parts": "*fp32", "key_parts": "*fp32"}
for norm in (False, True):
    for kernel, rows in ((rope._turn_in_place, {"HEADS": 64}), (rope._gather_turned_back, {"ROWS": 16})):
        compile_kernel(kernel, kinds=ROPE, word="st.global", NORM=norm, HALF=64, **rows)
LOSS = {"targets": "*i64", "weights": "*fp32", "losses": "*fp32", "penalties": "*fp32", "z": "fp32"}
LOSS |= {"row_stride": "i32", "vocab_size": "i32", "columns_in_all": "i32"}
for whole in (True, False):
    ptx = compile_kernel(
        cross_entropy._losses_and_gradient, kinds=LOSS, word="bar.sync",
        HAS_Z=True, GRADIENT=True, WHOLE=whole, BLOCK=512,
    )
    # Beside the row: target, its logit and its weight; loss, penalty and the target's gradient.
    reads, writes = ptx.count("ld.global") - 3, ptx.count("st.global") - 3
    assert reads == writes * (1 if whole else 2), "a row in registers is read once"
    assert ptx.count("ex2.approx") <= (1 if whole else 2) * writes + 2, "and each exponential is computed once"
"""

ONE_COMPILATION_OF_MUON_FOR_ALL_SHAPES = """
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from zero2all.ops.kernels.muon import BLOCK, TILE, _momentum, _step

backend = CUDABackend(TARGET)

def of_one_kind(kernel, constants, *calls):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    found = [bind(*call, **constants)[1] for call in calls]
    assert all(one == found[0] for one in found), found
    return found[0]

def compiled(kernel, found):
    kinds = dict(zip(kernel.arg_names, found, strict=True))
    values = {name: how for name, (kind, how) in kinds.items() if kind == "constexpr"}
    aligned = {(place,): backend.parse_attr(how) for place, (kind, how) in enumerate(kinds.values())
               if kind != "constexpr" and how}
    source = ASTSource(kernel, {name: kind for name, (kind, _) in kinds.items()}, values, aligned)
    return triton.compile(source, target=TARGET, options={"num_warps": 4}).asm["ptx"]

low, wide, flag = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), torch.zeros((), dtype=torch.bool)
numbers, constants = (0.9, 0.1, 1e-15, 3.0), {"NESTEROV": True, "BLOCK": BLOCK}
shapes = [(2048, 1, 5632), (5632, 1, 2048), (1408, 2, 512), (1, 1, 64), (15, 3, 16)]
for tensors in [(wide, wide, low, wide[1], flag), (low, wide, wide, None, None), (low, None, low, None, flag)]:
    found = of_one_kind(_momentum, constants, *((*tensors, *shape, *numbers) for shape in shapes))
    ptx = compiled(_momentum, found)
    assert "ld.global.v4" in ptx and ("st.global.v4" in ptx or "st.global.v2" in ptx), ptx
    odd = ((rows, turns, columns + 5) for rows, turns, columns in shapes)
    of_one_kind(_momentum, constants, *((*tensors, *shape, *numbers) for shape in odd))

constants = {"CAUTIOUS": True, "TILE": TILE}
tall, short = [(2048, 2, 512), (80, 1, 64), (64, 1, 64)], [(512, 2, 2048), (15, 3, 32), (1, 1, 64)]
for factors, skip, by_row, by_column, shapes in [
    (wide, flag, True, False, tall), (wide, flag, True, True, tall), (None, None, False, False, short)
]:
    strides = lambda r, c: (1, r) if by_column else (c, 1)
    calls = ((wide, low, factors, skip, r, t, c, r * c, *strides(r, c), 0.1, 0.1) for r, t, c in shapes)
    ptx = compiled(_step, of_one_kind(_step, {**constants, "BY_ROW": by_row}, *calls))
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, ptx
"""

SYMMETRIC_PRODUCT = """
from zero2all.ops.kernels.symmetric import DEPTH, STAGES, TILE, WARPS, _times_transposed as kernel

for adds in (False, True):
    constants = {"ADDS": adds, "TILE": TILE, "DEPTH": DEPTH, "stride_column": 1}
    kinds = {name: "*bf16" for name in ("x", "added", "result")}
    kinds |= {name: "fp32" for name in ("factor", "added_factor", "diagonal")}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if name not in constants and kinds.get(name, "i32") != "fp32"}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=TARGET,
        options={"num_warps": WARPS, "num_stages": STAGES},
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 113 * 1024, "two programs share a processor"
"""

SCRIPT = COMMON + DECODING_ROPE_AND_LOSS + ONE_COMPILATION_OF_MUON_FOR_ALL_SHAPES + SYMMETRIC_PRODUCT


def test_kernels_compile_for_a_hopper_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
