"""Each optimizer against its formulas, written again in float64 with numpy, over 20 steps."""

import numpy as np
import pytest
import torch

from tests.train.optimizers.parameters import logical, whole_masters
from zero2all.config.training import MuonConfig, OptimConfig
from zero2all.train.optimizers.factory import build_optimizer
from zero2all.train.optimizers.muon import of_unit_length, orthogonalise

STEPS, LR, DECAY, SCALE = 20, 0.01, 0.3, 0.7
PARAMETERS = (
    *(logical("wide", (6, 7)), logical("pairs", (8, 5), alternating=2), logical("down", (4, 9))),
    *(logical("experts", (3, 4, 5)), logical("table", (12, 5), "embedding"), logical("norm", (8,), "norm")),
)
TABLE = {one.name: one for one in PARAMETERS}
SHAPES = {name: one.shape for name, one in TABLE.items()}
DECAYS = {name: 0.0 if name == "norm" else DECAY for name in TABLE}
POLAR_EXPRESS = (
    (8.15655, -22.48329, 15.87877),
    (4.04293, -2.80892, 0.50002),
    (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449),
    (2.34654, -1.70978, 0.42324),
)
BETAS = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}


def rates():
    """A rate that changes: correction terms must not depend on it."""
    return [LR * (1 + 0.5 * np.sin(step)) for step in range(STEPS)]


def gradients(name):
    generator = np.random.default_rng(len(name))
    return [generator.normal(size=SHAPES[name]) * (0.1 + 0.1 * step) for step in range(STEPS)]


def initial(name):
    return np.random.default_rng(7 + len(name)).normal(size=SHAPES[name])


def run(config, dtype=torch.float32, implementation="auto", grad_dtype=None):
    parameters = {name: torch.tensor(initial(name)).to(dtype) for name in SHAPES}
    slopes = {}
    optimizer = build_optimizer(whole_masters(parameters, slopes), config, TABLE, implementation)
    all_gradients = {name: gradients(name) for name in SHAPES}
    for step, rate in enumerate(rates()):
        for name in parameters:
            # Reaches the optimizer too long by 1 / SCALE, which grads_scale takes back.
            slopes[name] = (torch.tensor(all_gradients[name][step]) / SCALE).to(grad_dtype or dtype)
        optimizer.set_learning_rate(rate)
        optimizer.step(grads_scale=torch.tensor(SCALE, dtype=torch.float64 if dtype == torch.float64 else None))
    return parameters, optimizer


def config_of(kind, **options):
    return OptimConfig(kind=kind, weight_decay=DECAY, **options)


def adamw(name, b1=0.8, b2=0.9, eps=1e-6):
    w, m, v = initial(name), 0.0, 0.0
    for step, (lr, g) in enumerate(zip(rates(), gradients(name), strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        w = w - lr * DECAYS[name] * w - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
    return w


def length(x):
    return np.sqrt((x**2).sum())


def polar(u, iterations):
    x = u / np.sqrt((u**2).sum(axis=1, keepdims=True)) / (1.01 * np.sqrt(len(u)))
    for a, b, c in (*POLAR_EXPRESS, (1.875, -1.25, 0.375), (1.875, -1.25, 0.375))[:iterations]:
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x * np.sqrt(min(x.shape)) / length(x)


def muon(name, mu=0.7, nesterov=True, iterations=5, b2=0.9, cautious=True, weight_decay_share=1.0):
    if TABLE[name].kind != "matrix":
        return adamw(name)
    turns, columns = TABLE[name].alternating, SHAPES[name][-1]
    w, m, means = initial(name), 0.0, {}
    for lr, g in zip(rates(), gradients(name), strict=True):
        m = mu * m + (1 - mu) * g
        u = (1 - mu) * g + mu * m if nesterov else m
        whole, old = w.reshape(-1, SHAPES[name][-2], columns).copy(), w.reshape(-1, SHAPES[name][-2], columns)
        for at in np.ndindex(len(whole), turns):
            rows = (at[0], slice(at[1], None, turns))  # each matrix by itself
            o = polar(u.reshape(whole.shape)[rows], iterations)
            axis = 1 if o.shape[0] >= columns else 0
            if b2:
                means[at] = b2 * means.get(at, 0.0) + (1 - b2) * (o**2).mean(axis=axis, keepdims=True)
                before = length(o)
                o = o / np.sqrt(means[at])
                o *= before / length(o)
            o = o * np.sqrt(max(1, o.shape[0] / columns))
            decays = DECAY * weight_decay_share * (np.sign(o) * np.sign(old[rows]) >= 0 if cautious else 1.0)
            whole[rows] = old[rows] - lr * o - lr * decays * old[rows]
        w = whole.reshape(w.shape)
    return w


CASES = {
    "adamw, fused": (config_of("adamw", **BETAS), "fused", adamw),
    "adamw, reference": (config_of("adamw", **BETAS), "eager", adamw),
    "muon": (config_of("muon", momentum=0.7, **BETAS), "auto", muon),
    "muon, plain": (
        config_of("muon", momentum=0.7, nesterov=False, muon=MuonConfig(7, beta2=0.0, cautious_decay=False), **BETAS),
        "auto",
        lambda name: muon(name, 0.7, False, 7, 0.0, False),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_twenty_steps_follow_the_formulas(case, dtype, close):
    config, implementation, reference = CASES[case]
    if dtype == torch.float64 and implementation == "fused":
        implementation = "auto"  # which takes the formula: the kernel reads its factor in float32
    parameters, _ = run(config, dtype, implementation)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter.numpy(), reference(name), rtol=close, atol=close, err_msg=name)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_bfloat16_weights_follow_adamw_to_their_precision(rounding):
    parameters, optimizer = run(config_of("adamw_bf16", bf16_rounding=rounding, **BETAS), torch.bfloat16)
    state = optimizer.state_tensors()
    errors = []
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.bfloat16
        exact = parameter.double()
        if rounding == "kahan":
            exact = exact + state[f"rest/{name}"].values.double()
        # The reference starts at the weights as bfloat16 has them, which is not what is tested.
        start = torch.tensor(initial(name))
        exact += (start - start.bfloat16().double()) * np.prod([1 - rate * DECAYS[name] for rate in rates()])
        errors.append((exact.numpy() - adamw(name)).ravel())
    error = np.concatenate(errors)
    # Twenty roundings of weights around 1 to steps of 2^-7 wander; what kahan keeps does not.
    assert np.abs(error).max() < (0.06 if rounding == "stochastic" else 0.01)
    assert abs(error.mean()) < (0.004 if rounding == "stochastic" else 0.001)


def test_8_bit_moments_follow_adamw_closely():
    parameters, optimizer = run(config_of("adamw_8bit", **BETAS))
    state = optimizer.state_tensors()
    assert state["exp_avg_codes/down"].values.dtype == torch.int8
    assert state["exp_avg_sq_codes/down"].values.dtype == torch.uint8
    assert state["exp_avg/norm"].values.dtype == torch.float32
    np.testing.assert_allclose(parameters["norm"].numpy(), adamw("norm"), rtol=2e-5)
    moved = sum(LR for _ in range(STEPS))
    for name in ("wide", "pairs", "down", "experts", "table"):
        error = np.abs(parameters[name].numpy() - adamw(name))
        assert error.max() < 0.2 * moved, name
        assert error.mean() < 0.03 * moved, name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradients_in_bfloat16_are_widened_first(kind):
    config = config_of(kind, **BETAS)
    exact, _ = run(config)
    rounded, _ = run(config, grad_dtype=torch.bfloat16)
    for name in SHAPES:
        torch.testing.assert_close(rounded[name], exact[name], rtol=0.1, atol=0.1)


def orthogonal(matrices, iterations=5):
    stack = matrices.view(-1, *matrices.shape[-2:])
    return orthogonalise(of_unit_length(stack, matrices.dtype), iterations).view(matrices.shape)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (3, 8, 20)])
def test_orthogonalising_evens_out_the_singular_values(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for iterations, near in ((5, 0.2), (7, 0.01)):
        assert float((torch.linalg.svdvals(orthogonal(matrices, iterations)) - 1).abs().max()) < near
    low = torch.linalg.svdvals(orthogonal(matrices.bfloat16()).float())
    assert float((low - 1).abs().max()) < 0.25


def test_orthogonalising_ignores_the_length_of_a_matrix_and_of_its_rows():
    matrix = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(orthogonal(matrix * 1e-12), orthogonal(matrix))
    torch.testing.assert_close(orthogonal(matrix * torch.tensor([[1.0], [9], [1], [0.1], [3]])), orthogonal(matrix))
    assert not orthogonal(torch.zeros(4, 4)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_zero_or_too_short_to_measure_make_no_singular_value_above_one(dtype):
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(2)).to(dtype)
    for short in (0.0, 1e-20, 1e-24, 1e-28, 1e-32):  # the squares of such values are 0 in float32
        given = matrix * torch.tensor([[1.0], [short], [1], [0.1], [short], [3]], dtype=dtype)
        assert float(torch.linalg.svdvals(of_unit_length(given, dtype)).max()) < 1
        found = torch.linalg.svdvals(orthogonal(given))
        assert float((found[:4] - 1).abs().max()) < 0.2
        assert short or float(found[4:].max()) < 1e-5


def test_the_momentum_and_the_decay_of_a_step_can_be_set():
    config = config_of("muon", momentum=0.95, muon=MuonConfig(beta2=0.0), **BETAS)
    table = {"wide": TABLE["wide"]}
    parameter, slopes = torch.tensor(initial("wide")), {}
    optimizer = build_optimizer(whole_masters({"wide": parameter}, slopes), config, table)
    for rate, gradient in zip(rates(), gradients("wide"), strict=True):
        slopes["wide"] = torch.tensor(gradient)
        optimizer.set_learning_rate(rate, weight_decay_share=0.25, momentum=0.7)
        optimizer.step()
    np.testing.assert_allclose(parameter.numpy(), muon("wide", b2=0.0, weight_decay_share=0.25), rtol=1e-12)


def test_the_embedding_may_have_a_beta2_of_its_own():
    exact, _ = run(config_of("muon", **{**BETAS, "beta2": 0.99, "embedding_beta2": 0.9}), torch.float64)
    np.testing.assert_allclose(exact["table"].numpy(), adamw("table"), rtol=1e-12)
    np.testing.assert_allclose(exact["norm"].numpy(), adamw("norm", b2=0.99), rtol=1e-12)
    (problem,) = OptimConfig(embedding_beta2=0.9).problems("optim")
    assert "only optim.kind muon" in str(problem)
