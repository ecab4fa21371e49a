"""Ports for servers that a test starts in a moment."""

import itertools
import os
import random
import socket
from contextlib import suppress

# The kernel gives ports from 32768 on to connections and to servers that ask for any. One of those may be taken by
# somebody else between the question and its use; one below may not. Each worker of pytest has a thousand of its own.
FIRST = 15_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.count(random.SystemRandom().randrange(1_000))


def free_port() -> int:
    """A port on which nothing listens; another one at every call."""
    for number in _numbers:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", FIRST + number % 1_000))
            return int(probe.getsockname()[1])
    raise AssertionError("the numbers have no end")
