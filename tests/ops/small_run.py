"""Fifty steps of a model small enough to train in seconds, with operators of one's choice."""

from typing import Any

import numpy as np
import torch

from zero2all.config import RunConfig, config_from_values
from zero2all.config.schedule import learning_rate
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import Ops, resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.parameter_table import init_weights
from zero2all.parallel.world import World
from zero2all.train.build import op_context
from zero2all.train.state import DTYPES, new_state
from zero2all.train.train_step import StepPlan, train_step

VOCAB = 50
EAGER = OpsConfig(
    attention="math",
    rope="eager",
    rms_norm="eager",
    swiglu="eager",
    linear="plain",
    embedding="torch",
    linear_cross_entropy="off",
    cross_entropy="eager",
    optimizer="eager",
)


def run_config(precision: str, layers: int = 2, samples: int = 4, **model: Any) -> RunConfig:
    return config_from_values(
        {
            "model": {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 48,
                "layers": layers,
                "heads": 4,
                "kv_heads": 2,
                "max_seq_len": 16,
                **model,
            },
            "data": {"seq_len": 8},
            "optim": {"lr_max": 5e-3},
            "schedule": {"warmup_steps": 5},
            "train": {
                "name": "run",
                "steps": 50,
                "tokens_per_step": 8 * samples,
                "micro_batch_samples": 2,
                "precision": precision,
                "z_loss": 1e-3,
            },
        },
        "of a test",
    )


def batch(step: int, samples: int) -> Batch:
    """Counting up from a random start: something to learn."""
    starts = np.random.default_rng(step).integers(0, VOCAB, (samples, 1))
    zeros = np.zeros(samples, dtype=np.int64)
    return Batch((starts + np.arange(9)) % VOCAB, zeros, zeros, 0)


def losses_of_a_run(ops: Ops, precision: str, steps: int, device: str = "cpu", **sizes: Any) -> torch.Tensor:
    """The loss of each step."""
    config = run_config(precision, **sizes)
    model = Z2all(config.model, ops)
    init_weights(model, 0)
    state = new_state(model.to(device).train(), config.optim, DTYPES[precision])
    batches = [batch(step, config.train.tokens_per_step // config.data.seq_len) for step in range(steps)]
    state.micro_batch_samples = int(config.train.micro_batch_samples)
    world = World(device=torch.device(device))
    results = []
    for number, each in enumerate(batches):
        rate = learning_rate(number, config.train.steps, config.optim.lr_max, config.schedule)
        results.append(train_step(state, each, 1, config, world, StepPlan(rate)).result())
    assert all(result.updated for result in results)
    return torch.tensor([result.loss for result in results], dtype=torch.float64)


def resolved(config: OpsConfig, precision: str) -> Ops:
    """The operators of such a run on the CPU."""
    return resolve(config, op_context(run_config(precision), "cpu", DTYPES[precision]))
