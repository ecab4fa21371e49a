"""Estimates of a whole run from its config: memory, time, the fastest layout. They need torch and the trainer."""
