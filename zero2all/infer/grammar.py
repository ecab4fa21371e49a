"""Answers that follow a grammar: JSON schemas, grammars as llama.cpp has them (GBNF).

llguidance says which tokens may come next. Its limits do not hold for all that a stranger can send (a multipleOf of
eight digits keeps it busy for minutes), so it runs in a process of its own, with bounded memory, that is ended where an
answer takes too long: the request fails, the others get a new process, which reads what they wrote so far.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.infer.boundary import Vocabulary

CHILD = Path(__file__).with_name("grammar_child.py")
MOST_BYTES, MOST_ANSWER_BYTES = 16_384, 1 << 20
FAILED = b"-"
"""How an answer begins that says what is wrong."""
START_SECONDS, CHECK_SECONDS, MASK_SECONDS = 60.0, 0.5, 1.0


class Grammars:
    """Which tokens may come next in the answers that are written. One process is the engine's; one judges new grammars
    for all other threads, so that the engine never waits for a bad one. A grammar is its kind (json, gbnf, regex) and
    its text."""

    def __init__(self, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        self._child, self._judge = (_Child(vocabulary.pieces, list(ends)) for _ in range(2))
        self._lock = threading.Lock()

    def check(self, grammar: tuple[str, str]) -> None:
        """Refuse what is no grammar, or takes too long."""
        if find_spec("llguidance") is None:
            raise UsageError("Grammars and JSON schemas need the package llguidance: pip install 'zero2all[grammar]'.")
        size = len(grammar[1].encode())
        if size > MOST_BYTES:
            raise UsageError(f"The grammar or schema has {size:,} bytes; at most {MOST_BYTES:,} are taken.")
        with self._lock:
            self._judge.mask(0, grammar, (), CHECK_SECONDS)
            self._judge.forget(0)

    def allowed(self, number: int, grammar: tuple[str, str], ids: Sequence[int], more_ends: frozenset[int]) -> Tensor:
        """Which ids may follow (V,), where answer `number` has `ids` so far."""
        mask = self._child.mask(number, grammar, ids, MASK_SECONDS)
        pieces, ends = self._child.words
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(pieces)].astype(bool)
        bits[sorted(more_ends)] = bits[ends[0]]
        if not bits.any():
            raise UsageError("The grammar asks for text that no token of this model spells.")
        return torch.from_numpy(bits)

    def forget(self, number: int) -> None:
        """The answer has ended."""
        self._child.forget(number)

    def close(self) -> None:
        """End the processes."""
        self._child.stop()
        with self._lock:
            self._judge.stop()


class _Child:
    """The process with llguidance; it starts when it is needed, and ends with this one."""

    def __init__(self, pieces: list[bytes], ends: list[int]) -> None:
        self.words = pieces, ends
        self._process: subprocess.Popen[bytes] | None = None
        self._read: dict[int, int] = {}  # number -> how many of its ids the process has read

    def mask(self, number: int, grammar: tuple[str, str], ids: Sequence[int], seconds: float) -> bytes:
        if self._process is None:
            self._start()
        read = self._read.pop(number, None)
        answer = self._ask((number, grammar if read is None else None, list(ids[read or 0 :])), seconds)
        if answer is None:
            raise UsageError(f"The grammar or schema is too large: its next tokens took over {seconds:g} s.")
        if answer[:1] == FAILED:
            reason = answer[1:].decode("utf-8", "replace")[:300]
            raise UsageError(f"The grammar or schema cannot be followed: {reason}")
        self._read[number] = len(ids)
        return answer[1:]

    def forget(self, number: int) -> None:
        if self._read.pop(number, None) is not None:
            self._ask((number, None, None), MASK_SECONDS)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None
            self._read.clear()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-P", str(CHILD), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        pieces, ends = self.words
        if not self._ask(([piece.hex() for piece in pieces], ends), START_SECONDS):
            raise UsageError("The process that reads grammars did not start.")

    def _ask(self, words: object, seconds: float) -> bytes | None:
        """Bytes, not objects: what has read a hostile grammar must not make us run code. None: no answer came in time,
        or its memory was full, and the process has ended."""
        try:
            self._connection.send_bytes(json.dumps(words).encode())
            if self._connection.poll(seconds):
                return self._connection.recv_bytes(MOST_ANSWER_BYTES)
        except (EOFError, OSError):
            pass
        self.stop()
        return None
