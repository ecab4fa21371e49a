"""Optimizers: one contract (`base.Optimizer`), one factory (`factory.build_optimizer`).

docs/optimizers.md has the formulas, what each costs in memory, and when to use which.
"""
