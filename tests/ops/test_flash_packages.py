"""FlashAttention's own packages: taken where they work, passed over with a reason where they do not."""

import dataclasses
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from zero2all.ops import attention, flash_packages, trial
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import resolve

HOPPER = OpContext("cuda", torch.bfloat16, hidden_size=256, head_size=64, heads=4, kv_heads=2)


@pytest.fixture
def package(monkeypatch):
    """A package by the name of FlashAttention 4's, on a GPU that is this machine's CPU; its function can be set."""
    module = ModuleType(flash_packages.FA4)
    module.flash_attn_func = lambda q, k, v, **_: of_the_formula(q, k, v)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, flash_packages.FA4, module)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: module if "flash" in name else real(name, *a))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    monkeypatch.setattr(flash_packages, "TRIAL_LENGTH", 16)  # bfloat16 is slow on many CPUs
    flash_packages.problem_in_trial.cache_clear()
    flash_packages._function_of.cache_clear()
    yield module
    flash_packages.problem_in_trial.cache_clear()
    flash_packages._function_of.cache_clear()


def of_the_formula(query, key, value):
    """As the package lays heads out: (B, T, H, D)."""
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attention.math_attention(*heads, 0.0).transpose(1, 2)


def test_it_is_the_first_choice_where_it_works(package):
    assert resolve(OpsConfig(), HOPPER).taken["attention"] == "fa4"


@pytest.mark.parametrize("returns", [lambda mixed: mixed, lambda mixed: (mixed, None)], ids=["alone", "with the sums"])
def test_heads_are_handed_over_in_its_layout_and_back(package, returns):
    package.flash_attn_func = lambda q, k, v, **_: returns(of_the_formula(q, k, v))
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    found = flash_packages.flash_attention_of(flash_packages.FA4, query, key, value)
    torch.testing.assert_close(found, attention.math_attention(query, key, value, 0.0))


def test_a_package_that_fails_is_passed_over_before_the_run_begins(package):
    def breaks(*_, **__):
        raise RuntimeError("no compiler for this driver\nmore lines")

    package.flash_attn_func = breaks
    ops = resolve(OpsConfig(attention="fa4", strict=False), HOPPER)
    (choice,) = [choice for choice in ops.choices if choice.operator == "attention"]
    assert choice.got != "fa4"
    assert "it failed when it was tried: RuntimeError: no compiler for this driver" in choice.reason


def test_a_package_that_cannot_even_be_looked_into_is_not_there(monkeypatch):
    def breaks(name, *_):
        raise ImportError(f"{name} was built for another torch")

    monkeypatch.setattr(importlib.util, "find_spec", breaks)
    problem = flash_packages.problem_of(flash_packages.FA4, HOPPER)
    assert problem == "the package flash_attn.cute cannot be imported"


def fails_without_gradients(q, k, v):
    if not q.requires_grad:
        raise RuntimeError("no such kernel")
    return of_the_formula(q, k, v)


def a_gradient_that_is_no_number(q, k, v):
    if v.requires_grad:
        v.register_hook(lambda gradient: gradient * torch.nan)
    return of_the_formula(q, k, v)


def half_of_the_gradient(q, k, v):
    right = of_the_formula(q, k, v)
    return right.detach() + 0.5 * (right - right.detach())


def a_tenth_too_much(q, k, v):
    return 1.1 * of_the_formula(q, k, v)


WRONG = [fails_without_gradients, a_tenth_too_much, half_of_the_gradient, a_gradient_that_is_no_number]


@pytest.mark.parametrize("computes", WRONG)
def test_a_package_that_computes_something_else_is_passed_over(package, computes):
    package.flash_attn_func = lambda q, k, v, **_: computes(q, k, v)
    problem = "no such kernel" if computes == fails_without_gradients else "its results were wrong by"
    assert problem in str(flash_packages.problem_of(flash_packages.FA4, HOPPER))


def test_it_is_tried_once_for_each_shape_of_heads_deterministic_where_torch_is_asked_to_be(package):
    calls = []

    def counted(q, k, v, causal, deterministic):
        calls.append((q.shape[2] // k.shape[2], q.shape[3], causal, deterministic))
        return of_the_formula(q, k, v)

    package.flash_attn_func = counted
    for context in (HOPPER, HOPPER, dataclasses.replace(HOPPER, seq_len=4096)):
        assert flash_packages.problem_of(flash_packages.FA4, context) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_packages.problem_of(flash_packages.FA4, dataclasses.replace(HOPPER, heads=8)) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == 2 * [(2, 64, True, False)] + 2 * [(4, 64, True, True)]  # with gradients and without


@pytest.mark.gpu
def test_the_installed_package_passes_its_trial():
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec(flash_packages.FA4) is None:
        pytest.skip("flash-attn-4 is not installed")
    if torch.cuda.get_device_capability()[0] not in flash_packages.GENERATIONS[flash_packages.FA4]:
        pytest.skip("this GPU is not for it")
    assert flash_packages.problem_of(flash_packages.FA4, HOPPER) is None
