"""Decide on a small model first: sweeps over settings and seeds, a scaling law and mixtures from one's own runs."""
