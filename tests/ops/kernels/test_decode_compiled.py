"""The kernels of decoding, of rotary positions and of the loss compile for a Hopper GPU. The interpreter takes code
that the compiler does not: variables that change their type in a loop, for example. No GPU is needed, only another
process, without the interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zero2all.ops.kernels import cross_entropy, decode_attention, decode_greedy, decode_linear, rope

FLOATS = {name: "*fp32" for name in ("cos", "sin", "parts", "weights", "scales", "logits", "best")}
WHOLE = {name: "*i32" for name in ("tables", "positions", "arrived", "ids", "tokens")} | {"never": "*i1"}
NUMBERS = {name: "i32" for name in ("table_stride", "limit", "rows", "inputs", "width")}
NUMBERS |= {"scale": "fp32", "eps": "fp32"}

def compile_kernel(kernel, weight="*bf16", kinds={}, word="griddepcontrol.wait", **constants):
    kinds = FLOATS | WHOLE | NUMBERS | {"weight": weight} | kinds
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
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
print("compiled")
"""


def test_kernels_compile(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
