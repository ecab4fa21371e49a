"""Without Triton everything but our kernels works: every module can be imported, and a model trains."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = '''
import importlib, pkgutil, sys

class WithoutTriton:
    """A finder that answers for triton as if it were not installed: None, so that `find_spec` says so too."""
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutTriton(finder) for finder in sys.meta_path]
import zero2all
names = [module.name for module in pkgutil.walk_packages(zero2all.__path__, "zero2all.")
         if not module.name.startswith("zero2all.ops.kernels") and not module.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
assert "triton" not in sys.modules and "zero2all.ops.kernels.linear" not in sys.modules

import numpy as np, torch
from zero2all.parallel.parameter_table import init_weights
from zero2all.config import config_from_values
from zero2all.model.z2all import Z2all
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.train.build import op_context
from zero2all.train.state import new_state
from zero2all.parallel.world import World
from zero2all.train.train_step import StepPlan, train_step

config = config_from_values({
    "model": {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "layers": 1, "heads": 2, "kv_heads": 1,
              "max_seq_len": 16},
    "data": {"seq_len": 16}, "optim": {"lr_max": 0.02}, "schedule": {"warmup_steps": 0},
    "train": {"name": "run", "steps": 100, "tokens_per_step": 64, "micro_batch_samples": 2},
}, "of a test")
for dtype in (torch.float32, torch.bfloat16):
    ops = resolve(config.ops, op_context(config, "cpu", dtype))
    model = Z2all(config.model, ops)
    init_weights(model, 0)
    state = new_state(model.train(), config.optim, dtype)
    tokens = np.random.default_rng(0).integers(0, 50, (4, 17))
    batch = Batch(tokens, np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64), 0)
    results = [train_step(state, batch, 1, config, World(), StepPlan(5e-3)).result() for _ in range(8)]
    assert all(result.updated for result in results)
    assert results[-1].loss < results[0].loss - 0.3, [result.loss for result in results]
print(len(names), "modules")
'''


def test_every_module_but_the_kernels_imports_and_a_model_trains():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 50
