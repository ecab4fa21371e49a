"""The command `z2a`: parse, call, print. No logic lives here, and no stage is imported before its verb runs."""

from zero2all.cli.main import main

__all__ = ["main"]
