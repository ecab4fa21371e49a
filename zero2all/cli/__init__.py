"""The command `z2a`: parse, call, print. No logic lives here, and no stage is imported before its verb runs."""

import signal
import sys

if sys.argv[0].endswith(("/z2a", "/zero2all/__main__.py")) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main` can report it: in an import it would be a traceback

from zero2all.cli.main import main

__all__ = ["main"]
