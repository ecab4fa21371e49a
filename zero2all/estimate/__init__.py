"""What is computed: pure formulas over a model's shape, without torch. `predict/` applies them to a run's config."""
