"""What is possible, by arithmetic: pure formulas over a model's shape. No torch needed."""
