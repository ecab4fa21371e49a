"""Programs that print the figures in the README and docs; `results/` holds what they printed."""
