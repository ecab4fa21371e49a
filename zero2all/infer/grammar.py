"""Answers that follow a grammar: JSON schemas, regular expressions, grammars as llama.cpp has them (GBNF).

llguidance says which tokens may come next. Its limits do not hold for all that a stranger can send (a multipleOf of
eight digits keeps it busy for minutes), so it runs in a process of its own, with bounded memory, that is ended where an
answer takes too long: the request fails, the others get a new process, which reads what they wrote so far.
"""

from __future__ import annotations

import contextlib
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
MOST_BYTES = 16_384
START_SECONDS, CHECK_SECONDS, MASK_SECONDS = 60.0, 0.5, 1.0
KNOWN = 256
Grammar = tuple[str, str]
"""Its kind (json, regex, gbnf) and its text."""


class GrammarError(UsageError):
    """A grammar that is none, or too large to be followed."""


class Grammars:
    """Which tokens may come next in each of the answers that are written."""

    def __init__(self, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        self._ends = list(ends)
        self._child, self._judge = (_Child(vocabulary.pieces, self._ends) for _ in range(2))
        self._lock = threading.Lock()
        self._good: dict[Grammar, None] = {}

    def check(self, grammar: Grammar) -> None:
        """Refuse what is no grammar, or takes too long. For any thread."""
        if find_spec("llguidance") is None:
            raise UsageError("Grammars and JSON schemas need the package llguidance: pip install 'zero2all[grammar]'.")
        size = len(grammar[1].encode())
        if size > MOST_BYTES:
            raise GrammarError(f"The grammar or schema has {size:,} bytes; at most {MOST_BYTES:,} are taken.")
        if not self._lock.acquire(timeout=10):
            raise GrammarError("Other grammars are being read. Try again in a few seconds.")
        try:
            if grammar not in self._good:
                self._judge.mask(0, grammar, (), CHECK_SECONDS)
                self._judge.forget(0)
                self._good = dict.fromkeys([*self._good, grammar][-KNOWN:])
            self._child.start()  # here: whoever writes does not wait for it
        finally:
            self._lock.release()

    def allowed(self, number: int, grammar: Grammar, ids: Sequence[int], more_ends: frozenset[int]) -> Tensor:
        """Which ids may follow (V,), where answer `number` has `ids` so far. Of one thread."""
        mask = self._child.mask(number, grammar, ids, MASK_SECONDS)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._child.rows].astype(bool)
        bits[sorted(more_ends)] = bits[self._ends[0]]
        if not bits.any():
            raise GrammarError("The grammar asks for text that no token of this model spells.")
        return torch.from_numpy(bits)

    def forget(self, number: int) -> None:
        """The answer has ended."""
        self._child.forget(number)

    def close(self) -> None:
        """End the processes."""
        self._child.stop()
        self._judge.stop()


class _Child:
    """The process with llguidance; it starts when it is needed, and ends with this one."""

    def __init__(self, pieces: list[bytes], ends: list[int]) -> None:
        self._words, self.rows = (pieces, ends), len(pieces)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._read: dict[int, int] = {}  # number -> how many of its ids the process has read

    def start(self) -> None:
        with self._lock:
            if self._process is not None:
                return
            self._connection, theirs = Pipe()
            command = [sys.executable, "-P", str(CHILD), str(theirs.fileno())]
            quiet = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdout=quiet, stderr=quiet, start_new_session=True
            )
            theirs.close()
            self._connection.send(self._words)
            if not self._answer(START_SECONDS):
                raise GrammarError("The process that reads grammars did not start.")

    def mask(self, number: int, grammar: Grammar, ids: Sequence[int], seconds: float) -> bytes:
        with self._lock:
            self.start()
            read = self._read.get(number)
            self._tell(number, grammar if read is None else None, list(ids[read or 0 :]))
            answer = self._answer(seconds)
            if answer is None:
                raise GrammarError(f"The grammar or schema is too large: its next tokens took over {seconds:g} s.")
            if isinstance(answer, str):
                self.forget(number)
                raise GrammarError(f"The grammar or schema cannot be followed: {answer[:300]}")
            self._read[number] = len(ids)
            return answer

    def forget(self, number: int) -> None:
        if number not in self._read:  # without the lock: this is asked at the end of every text
            return
        with self._lock:
            if self._read.pop(number, None) is not None:
                self._tell(number, None, None)

    def stop(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._connection.close()
                self._process = None
                self._read.clear()

    def _tell(self, *words: object) -> None:
        with contextlib.suppress(OSError):  # it has ended: then there is no answer
            self._connection.send(words)

    def _answer(self, seconds: float) -> bytes | str | None:
        """None: it did not come, and the process has ended."""
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):  # its memory was full
            pass
        self.stop()
        return None
