"""Measuring: operators alone, whole training steps with one thing changed at a time, and the tables of both."""
