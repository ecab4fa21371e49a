"""Optimizers: one file each, one contract (`base.Optimizer`), one factory (`build_optimizer`).

docs/optimizers.md has the formulas, what each costs in memory, and when to use which.
"""

from zero2all.train.optimizers.base import Optimizer, ParameterGroup
from zero2all.train.optimizers.factory import Implementation, build_optimizer
from zero2all.train.optimizers.roles import Role, model_roles

__all__ = ["Implementation", "Optimizer", "ParameterGroup", "Role", "build_optimizer", "model_roles"]
