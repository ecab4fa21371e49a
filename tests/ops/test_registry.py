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
from zero2all.ops import attention, flash_packages, implementation, linear_cross_entropy, swiglu
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import MAX_ROW, Implementation, OpContext
from zero2all.ops.registry import OPERATORS, OUTSIDE_COMPILATION, Choice, _choose, resolve

CPU, CUDA = OpContext("cpu"), OpContext("cuda", dtype=torch.bfloat16)
PLAIN = Implementation("plain", lambda: "plain")
FAST = Implementation("fast", lambda: "fast", check=lambda where: f"no kernel for {where.device}")
OPAQUE = Implementation("opaque", lambda: "opaque", compile_safe=False)
EVERY = {f"{operator}={one.name}": (operator, one) for operator, several in OPERATORS.items() for one in several}
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
    for module in (flash_packages, swiglu, linear_cross_entropy):
        monkeypatch.setattr(module, "problem_in_trial", lambda *_: None)
    monkeypatch.setattr(implementation, "compiler_problem", lambda: None)
    pretend_packages(monkeypatch, there=OPTIONAL_PACKAGES)


@pytest.fixture
def kernels():
    """Our kernels, imported before a test bends the import machinery."""
    pytest.importorskip("triton")
    return importlib.import_module("zero2all.ops.kernels.linear")


def refusal(context: OpContext, **names: str) -> str:
    with pytest.raises(UsageError) as raised:
        resolve(OpsConfig(**names), context)
    return str(raised.value)


def test_config_offers_what_there_is_the_guide_lists_it_in_the_order_of_auto_and_a_reference_runs_anywhere():
    assert {field.name for field in dataclasses.fields(OpsConfig)} == {*OPERATORS, "compile", "strict"}
    guide = (Path(__file__).parents[2] / "docs" / "model.md").read_text().partition("## Operators")[2]
    odd = OpContext("cpu", torch.float64, hidden_size=MAX_ROW + 1, head_size=7, documents=True, z_loss=True)
    for operator, implementations in OPERATORS.items():
        names = [one.name for one in implementations]
        assert set(typing.get_args(typing.get_type_hints(OpsConfig)[operator])) == {"auto", *names}
        (line,) = [line for line in guide.splitlines() if line.startswith(f"| `{operator}` |")]
        assert re.findall(r"`(\w+)`", line.split("|")[2]) == names
        for context in (odd, dataclasses.replace(odd, device="cuda")):
            assert any(one.check(context) is None for one in implementations), operator


def test_auto_takes_the_first_of_each_operator_that_runs_on_the_cpu():
    ops = resolve(OpsConfig(), "cpu")
    assert [choice.operator for choice in ops.choices] == list(OPERATORS)
    for choice in ops.choices:
        first = next(one for one in OPERATORS[choice.operator] if one.check(CPU) is None)
        assert choice == Choice(choice.operator, "auto", first.name, "the first that runs on cpu")
        assert getattr(ops, choice.operator) is first.function


@pytest.mark.parametrize(("operator", "implementation"), EVERY.values(), ids=EVERY)
def test_named_implementation_is_taken_or_refused_with_the_reason_of_its_check(operator, implementation):
    problem = implementation.check(CPU)
    if problem is not None:
        said = refusal(CPU, **{operator: implementation.name})
        assert f"ops.{operator} {implementation.name} cannot run on this machine: {problem}. " in said
        assert "ops.strict" in said
        return
    ops = resolve(OpsConfig(**{operator: implementation.name}), "cpu")
    (choice,) = [choice for choice in ops.choices if choice.operator == operator]
    assert choice == Choice(operator, implementation.name, implementation.name, "as asked")
    assert callable(getattr(ops, operator))


def test_operator_that_nothing_can_compute_is_an_error():
    with pytest.raises(UsageError, match="No implementation of twist runs on cpu"):
        _choose("twist", "auto", (FAST,), CPU, strict=False)


def test_loss_goes_through_the_cross_entropy_chosen_where_the_fused_head_is_off():
    ops = resolve(OpsConfig(linear_cross_entropy="off", cross_entropy="eager"), "cpu")
    hidden, head = torch.randn(3, 4), torch.randn(5, 4)
    targets = torch.tensor([0, 4, 2])
    _, losses = ops.linear_cross_entropy(hidden, head, targets, torch.ones(3), 5, 0.0)
    assert torch.equal(losses, ops.cross_entropy(hidden @ head.t(), targets))


def test_notes_name_compilation_and_each_choice_that_is_not_what_was_asked():
    config = OpsConfig(attention="math", swiglu="triton", compile="block", strict=False)
    first, *others = resolve(config, "cpu").notes()
    assert first.endswith(", compile=block")
    assert "attention=math" in first
    (line,) = others
    assert line.startswith("ops: swiglu: torch instead of triton: triton cannot run here (it needs a CUDA device)")


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


def test_what_a_kernel_cannot_take_is_said_at_once_and_what_fits_is_taken(hopper):
    for operator, name, facts, words in (
        ("rms_norm", "triton", {"hidden_size": MAX_ROW + 1}, f"model.hidden_size is {MAX_ROW + 1}"),
        ("attention", "sdpa_flash", {"head_size": 36}, "multiples of 8, and this model's are 36"),
        ("attention", "sdpa_cudnn", {"head_size": 192}, "at most 128, and this model's are 192"),
        ("attention", "flex", {"head_size": 96}, "power of two, and this model's are 96"),
        ("linear", "fp8", {"intermediate_size": 200}, "multiples of 16, and intermediate_size is 200"),
        ("linear_cross_entropy", "quack", {"vocab_size": 1000}, "multiples of 64"),
        ("linear_cross_entropy", "quack", {"dtype": torch.float16}, "the model is float16"),
        ("swiglu", "triton", {"dtype": torch.float64}, "the model is float64"),
        ("attention", "sdpa_flash", {"dtype": torch.float32}, "the model is float32"),
        ("linear", "fp8", {"dtype": torch.float32}, "the model is float32"),
        ("linear", "fp8", {"sharded": True}, "parallel.zero is 3"),
        ("swiglu", "quack", {"keeps_results": True}, "recompute: selective"),
        *(("attention", name, {"keeps_results": True}, "recompute: selective") for name in ("fa3", "fa4")),
        *(("attention", name, {"documents": True}, "no mask") for name in ("sdpa_cudnn", "sdpa_flash", "fa3", "fa4")),
        *(("attention", name, {"dropout": True}, "it has no dropout") for name in ("flex", "varlen", "fa3", "fa4")),
    ):
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 1024, "head_size": 64, "heads": 8}
        fits = dataclasses.replace(CUDA, **sizes, kv_heads=4)
        assert words in refusal(dataclasses.replace(fits, **facts), **{operator: name})
        assert EVERY[f"{operator}={name}"][1].check(fits) is None


def test_swiglu_in_epilogues_needs_matmuls_of_ours_around_it_and_softmax_a_hopper(hopper, monkeypatch):
    taken = resolve(OpsConfig(), CUDA).taken
    assert (taken["swiglu"], taken["linear"]) == ("quack", "fp32_wgrad")
    for linear in ("plain", "fp8"):
        assert resolve(OpsConfig(linear=linear), CUDA).taken["swiglu"] == "triton"
        assert f"linear is {linear}" in refusal(CUDA, linear=linear, swiglu="quack")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "Hopper" in refusal(CUDA, linear_cross_entropy="quack")


def test_without_a_compiler_or_headers_auto_takes_what_needs_none(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    pretend_packages(monkeypatch, there=("triton",))
    probe = implementation.compiler_problem.__wrapped__  # which keeps nothing
    for module in (attention, implementation):
        monkeypatch.setattr(module, "compiler_problem", probe)
    assert "neither gcc nor clang" in refusal(CUDA, swiglu="triton")
    taken = resolve(OpsConfig(), CUDA).taken
    assert {taken[name] for name in ("rope", "rms_norm", "swiglu", "optimizer")} <= {"eager", "torch", "fused"}
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'probe.c:1:10: fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    assert "needs Python's headers" in refusal(CUDA, swiglu="triton")


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
    assert "it needs compute capability 9.x or 10.x, and this GPU's is 8.0" in refusal(CUDA, attention="fa4")
