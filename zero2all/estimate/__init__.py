"""What is computed: pure formulas over a model's shape, without torch; below run/, the estimates of a run's config."""
