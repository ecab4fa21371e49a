"""How an implementation is chosen, and what is said about it."""

import dataclasses
import importlib
import importlib.util
import re
import typing
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from zero2all.common.errors import UsageError
from zero2all.ops import flash_packages, implementation, linear_cross_entropy, swiglu
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import MAX_ROW, Implementation, OpContext
from zero2all.ops.registry import OPERATORS, OUTSIDE_COMPILATION, Choice, _choose, resolve

CPU, CUDA = OpContext("cpu"), OpContext("cuda", dtype=torch.bfloat16)
PLAIN = Implementation("plain", lambda: "plain")
FAST = Implementation(
    "fast", lambda: "fast", check=lambda where: None if where.device == "cuda" else f"no kernel for {where.device}"
)
OPAQUE = Implementation("opaque", lambda: "opaque", compile_safe=False)
EVERY = [(operator, one) for operator, implementations in OPERATORS.items() for one in implementations]
every_implementation = pytest.mark.parametrize(
    ("operator", "implementation"), EVERY, ids=[f"{operator}={one.name}" for operator, one in EVERY]
)


OPTIONAL_PACKAGES = ("triton", "quack", "flash_attn_interface", "flash_attn", "flash_attn.cute")


def pretend_packages(monkeypatch, there: tuple[str, ...]) -> None:
    """Probes find these optional packages and no other ones, whatever is installed."""
    real = importlib.util.find_spec

    def find_spec(name, package=None):
        if name not in OPTIONAL_PACKAGES:
            return real(name, package)
        return ModuleSpec(name, None) if name in there else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a GPU and all packages, as far as checks look."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(flash_packages, "problem_in_trial", lambda *_: None)
    monkeypatch.setattr(swiglu, "problem_in_trial", lambda *_: None)
    monkeypatch.setattr(linear_cross_entropy, "problem_in_trial", lambda *_: None)
    monkeypatch.setattr(implementation, "compiler_problem", lambda: None)
    pretend_packages(monkeypatch, there=OPTIONAL_PACKAGES)


@pytest.fixture
def kernels():
    """Our kernels, imported before a test bends the import machinery."""
    pytest.importorskip("triton")
    return importlib.import_module("zero2all.ops.kernels.linear")


def check(operator: str, name: str, context: OpContext) -> str | None:
    (found,) = [one for one in OPERATORS[operator] if one.name == name]
    return found.check(context)


# ---- what there is -------------------------------------------------------------------------------------------------


def test_config_offers_exactly_the_implementations_there_are():
    hints = typing.get_type_hints(OpsConfig)
    for operator, implementations in OPERATORS.items():
        offered = set(typing.get_args(hints[operator]))
        assert offered == {"auto", *(implementation.name for implementation in implementations)}
    assert {field.name for field in dataclasses.fields(OpsConfig)} == {*OPERATORS, "compile", "strict"}
    assert {getattr(OpsConfig(), operator) for operator in OPERATORS} == {"auto"}
    assert (OpsConfig().compile, OpsConfig().strict) == ("none", True)


def test_the_guide_lists_them_in_the_order_in_which_auto_tries_them():
    guide = (Path(__file__).parents[2] / "docs" / "model.md").read_text().partition("## Operators")[2]
    for operator, implementations in OPERATORS.items():
        (line,) = [line for line in guide.splitlines() if line.startswith(f"| `{operator}` |")]
        assert re.findall(r"`(\w+)`", line.split("|")[2]) == [one.name for one in implementations]


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_check_says_in_words_what_keeps_it_from_the_cpu(operator, implementation, dtype):
    for others in ({}, {"documents": True}, {"z_loss": True}, {"dropout": True}, {"head_size": 33}, {"compiled": True}):
        problem = implementation.check(OpContext("cpu", dtype=dtype, **others))
        assert problem is None or (len(problem.split()) > 3 and not problem.endswith("."))


def test_every_operator_has_a_reference_that_runs_anywhere():
    odd = OpContext("cpu", torch.float64, hidden_size=MAX_ROW + 1, head_size=7, documents=True, z_loss=True)
    for operator, implementations in OPERATORS.items():
        for context in (odd, dataclasses.replace(odd, device="cuda")):
            assert any(one.check(context) is None for one in implementations), operator


# ---- what is taken -------------------------------------------------------------------------------------------------


def test_auto_takes_the_first_of_each_operator_that_runs_on_the_cpu():
    ops = resolve(OpsConfig(), "cpu")
    assert [choice.operator for choice in ops.choices] == list(OPERATORS)
    for choice in ops.choices:
        first = next(one for one in OPERATORS[choice.operator] if one.check(CPU) is None)
        assert choice == Choice(choice.operator, "auto", first.name, "the first that runs on cpu")
        assert getattr(ops, choice.operator) is first.function


@every_implementation
def test_named_implementation_is_taken_or_refused_with_the_reason_of_its_check(operator, implementation):
    config, problem = OpsConfig(**{operator: implementation.name}), implementation.check(CPU)
    if problem is not None:
        with pytest.raises(UsageError) as refusal:
            resolve(config, "cpu")
        assert f"ops.{operator} {implementation.name} cannot run on this machine: {problem}. " in str(refusal.value)
        assert "ops.strict" in str(refusal.value)
        return
    ops = resolve(config, "cpu")
    (choice,) = [choice for choice in ops.choices if choice.operator == operator]
    assert choice == Choice(operator, implementation.name, implementation.name, "as asked")
    assert callable(getattr(ops, operator))


def test_fallback_records_what_was_asked_what_was_taken_and_why():
    taken, choice = _choose("twist", "fast", (FAST, PLAIN), CPU, strict=False)
    assert taken is PLAIN
    assert (choice.asked, choice.got) == ("fast", "plain")
    assert choice.reason == "fast cannot run here (no kernel for cpu)"


def test_operator_that_nothing_can_compute_is_an_error():
    with pytest.raises(UsageError, match="No implementation of twist runs on cpu"):
        _choose("twist", "auto", (FAST,), CPU, strict=False)


def test_loss_goes_through_the_cross_entropy_chosen_where_the_fused_head_is_off():
    ops = resolve(OpsConfig(linear_cross_entropy="off", cross_entropy="eager"), "cpu")
    hidden, head = torch.randn(3, 4), torch.randn(5, 4)
    targets = torch.tensor([0, 4, 2])
    _, losses = ops.linear_cross_entropy(hidden, head, targets, torch.ones(3), 5, 0.0)
    assert torch.equal(losses, ops.cross_entropy(hidden @ head.t(), targets))


# ---- what is said --------------------------------------------------------------------------------------------------


def test_notes_name_compilation_and_each_choice_that_is_not_what_was_asked():
    config = OpsConfig(attention="math", swiglu="triton", compile="block", strict=False)
    first, *others = resolve(config, "cpu").notes()
    assert first.endswith(", compile=block")
    assert "attention=math" in first
    (line,) = others
    assert line.startswith("ops: swiglu: torch instead of triton: triton cannot run here (it needs a CUDA device)")


# ---- compilation ---------------------------------------------------------------------------------------------------


def test_auto_under_compilation_takes_what_the_compiler_can_look_into():
    assert _choose("twist", "auto", (OPAQUE, PLAIN), CPU, True, inside_compilation=True)[0] is PLAIN
    assert _choose("twist", "auto", (OPAQUE, PLAIN), CPU, True)[0] is OPAQUE
    # Where there is no other, an opaque one is better than none.
    assert _choose("twist", "auto", (OPAQUE,), CPU, True, inside_compilation=True)[0] is OPAQUE


def test_compiled_model_on_a_gpu_leaves_its_inner_operators_to_the_compiler(hopper):
    context = dataclasses.replace(CUDA, compiled=True)
    taken = {choice.operator: choice.got for choice in resolve(OpsConfig(compile="block"), context).choices}
    for operator in set(OPERATORS) - set(OUTSIDE_COMPILATION):
        (implementation,) = [one for one in OPERATORS[operator] if one.name == taken[operator]]
        assert implementation.compile_safe
    assert [taken[operator] for operator in OUTSIDE_COMPILATION] == ["quack", "triton", "triton"]


def is_hidden_from_the_compiler(function) -> bool:
    return bool(getattr(function, "_torchdynamo_disable", False))


def test_opaque_implementation_that_was_named_is_kept_out_of_the_graph(kernels, hopper):
    names = {"swiglu": "triton", "linear": "fp32_wgrad", "rope": "triton", "rms_norm": "triton", "embedding": "triton"}
    config = OpsConfig(**names, compile="block")
    inside = resolve(config, dataclasses.replace(CUDA, compiled=True))
    outside = resolve(dataclasses.replace(config, compile="none"), CUDA)
    for name in (*names, "feed_forward"):
        assert is_hidden_from_the_compiler(getattr(inside, name)), name
        assert not is_hidden_from_the_compiler(getattr(outside, name)), name
    assert not is_hidden_from_the_compiler(inside.attention)


# ---- sizes and settings a kernel cannot take, said when the model is built -------------------------------------------


def refusal(context: OpContext, **names: str) -> str:
    with pytest.raises(UsageError) as raised:
        resolve(OpsConfig(**names), context)
    return str(raised.value)


def test_kernels_say_at_once_which_size_they_cannot_take(hopper):
    def cuda(**facts) -> OpContext:
        return dataclasses.replace(CUDA, **facts)

    assert f"model.hidden_size is {MAX_ROW + 1}" in refusal(cuda(hidden_size=MAX_ROW + 1), rms_norm="triton")
    assert "multiples of 8, and this model's are 36" in refusal(cuda(head_size=36), attention="sdpa_flash")
    assert "at most 128, and this model's are 192" in refusal(cuda(head_size=192), attention="sdpa_cudnn")
    assert "power of two, and this model's are 96" in refusal(cuda(head_size=96), attention="flex")
    assert "multiples of 16, and intermediate_size is 200" in refusal(
        cuda(hidden_size=64, intermediate_size=200), linear="fp8"
    )
    assert "the model is float64" in refusal(cuda(dtype=torch.float64), swiglu="triton")
    assert "the model is float32" in refusal(cuda(dtype=torch.float32), attention="sdpa_flash")
    assert "the model is float32" in refusal(cuda(dtype=torch.float32), linear="fp8")
    # The same kernels take what fits.
    fits = cuda(hidden_size=512, intermediate_size=1408, head_size=64, heads=8, kv_heads=4)
    for operator, name in (("rms_norm", "triton"), ("attention", "sdpa_cudnn"), ("linear", "fp8")):
        assert check(operator, name, fits) is None


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_flash", "fa3", "fa4"])
def test_attention_without_a_mask_for_documents_refuses_them(hopper, name):
    assert "it has no mask for documents" in refusal(dataclasses.replace(CUDA, documents=True), attention=name)


@pytest.mark.parametrize("name", ["flex", "varlen", "fa3", "fa4"])
def test_attention_without_dropout_refuses_it(hopper, name):
    assert "it has no dropout" in refusal(dataclasses.replace(CUDA, dropout=True), attention=name)


@pytest.mark.parametrize(("operator", "name"), [("attention", "fa3"), ("attention", "fa4"), ("swiglu", "quack")])
def test_what_torch_cannot_see_is_refused_where_its_results_are_to_be_kept(hopper, operator, name):
    assert "recompute: selective" in refusal(dataclasses.replace(CUDA, keeps_results=True), **{operator: name})


def test_swiglu_in_epilogues_is_taken_only_where_the_matmuls_around_it_are_ours(hopper):
    taken = resolve(OpsConfig(), CUDA).taken
    assert (taken["swiglu"], taken["linear"]) == ("quack", "fp32_wgrad")
    for linear in ("plain", "fp8"):
        assert resolve(OpsConfig(linear=linear), CUDA).taken["swiglu"] == "triton"
        with pytest.raises(UsageError, match=f"linear is {linear}"):
            resolve(OpsConfig(linear=linear, swiglu="quack"), CUDA)


def test_softmax_in_epilogues_says_what_it_wants(hopper, monkeypatch):
    assert check("linear_cross_entropy", "quack", CUDA) is None
    assert "multiples of 64" in refusal(dataclasses.replace(CUDA, vocab_size=1000), linear_cross_entropy="quack")
    assert "the model is float16" in refusal(
        dataclasses.replace(CUDA, dtype=torch.float16), linear_cross_entropy="quack"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "Hopper" in refusal(CUDA, linear_cross_entropy="quack")


def test_without_a_compiler_or_headers_auto_takes_what_needs_none(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    pretend_packages(monkeypatch, there=("triton",))
    try:
        implementation.compiler_problem.cache_clear()
        assert "neither gcc nor clang" in refusal(CUDA, swiglu="triton")
        taken = resolve(OpsConfig(), CUDA).taken
        assert {taken[name] for name in ("rope", "rms_norm", "swiglu", "optimizer")} <= {"eager", "torch", "fused"}
        implementation.compiler_problem.cache_clear()
        compiler = tmp_path / "gcc"
        compiler.write_text("#!/bin/sh\necho 'probe.c:1:10: fatal error: Python.h: No such file' >&2\nexit 1\n")
        compiler.chmod(0o755)
        assert "needs Python's headers" in refusal(CUDA, swiglu="triton")
    finally:
        implementation.compiler_problem.cache_clear()


def test_compilation_on_a_cpu_needs_a_cpp_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "it needs a C++ compiler, and g++ was not found" in implementation.compile_problem("cpu")
    assert implementation.compile_problem("cuda") is None
    (tmp_path / "own-c++").write_text("#!/bin/sh\n")
    (tmp_path / "own-c++").chmod(0o755)
    monkeypatch.setenv("CXX", "own-c++")
    assert implementation.compile_problem("cpu") is None


def test_old_gpu_and_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    pretend_packages(monkeypatch, there=())
    assert "triton is not installed" in refusal(CUDA, swiglu="triton")
    assert "the package flash_attn_interface cannot be imported" in refusal(CUDA, attention="fa3")
    pretend_packages(monkeypatch, there=("triton", "flash_attn", "flash_attn.cute"))
    assert "no float8 tensor cores" in refusal(CUDA, linear="fp8")
    wanted = "it needs compute capability 9.x or 10.x, and this GPU's is 8.0"
    assert wanted in refusal(CUDA, attention="fa4")


def test_float8_refuses_weights_that_are_gathered_for_each_pass(hopper):
    assert "parallel.zero is 3" in refusal(dataclasses.replace(CUDA, sharded=True), linear="fp8")
