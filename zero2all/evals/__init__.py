"""Judging and using a trained model: held-out bits per byte, probes, generation."""
