"""Errors a person can act on, and the exit code each of them ends the command with.

Raise one with a paragraph: what was wrong, what was expected, what to do. The command line prints it without a
traceback. Anything else is a bug of ours, keeps its traceback and exits with 1, except for a full disk and for memory
that ran out: `is_disk_full` and `is_out_of_memory` recognise them.
"""

import errno
import re
from typing import TypeVar

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space left; quota used up; larger than a file may be here."""


class UserError(Exception):
    """Something outside the program is wrong, and the message says how to mend it."""

    exit_code = 3
    of_all_ranks = False
    """Whether all processes of a run raise this same error: then the first of them says it for all."""
    is_said = False
    """Whether the process that started this one says it, once for all."""


E = TypeVar("E", bound=UserError)


class UsageError(UserError):
    """The command line or the config cannot be understood."""

    exit_code = 2


class BadInputError(UserError):
    """A file or folder that was given cannot be used as it is."""


class DiskError(UserError):
    """Not enough room on the disk, or in memory (`is_out_of_memory`), or the disk refused a write."""

    exit_code = 4


class PreemptedError(UserError):
    """The run was asked to stop, saved its state, and can be continued."""

    exit_code = 10


class AnomalyError(UserError):
    """The run stopped itself because going on would waste the work."""

    exit_code = 12


class PeerFailureError(UserError):
    """Another process of the run has died or hangs. Nothing is wrong with this one; run the same command again."""

    exit_code = 1


class AbsentGroupsError(PeerFailureError):
    """Other groups of a slow link did not come."""


class RunLockedError(UserError):
    """Another live process is already writing to this run."""

    exit_code = 13


class LostRunError(UserError):
    """This process had the run, and another one has it now: nothing more may be written to it from here."""

    exit_code = 14


class UnhealthyError(UserError):
    """The health check found this machine, or one that cannot be left out, slow or broken."""

    exit_code = 16


def for_all_ranks(error: E) -> E:
    """The error, marked as one that all processes of the run raise."""
    error.of_all_ranks = True
    return error


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full.

    Libraries written in Rust raise errors that end with `(os error 28)`. numpy only says how much it wrote.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL_ERRNOS
    if isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        return True
    return any(f"(os error {number})" in str(error) for number in DISK_FULL_ERRNOS)


OUT_OF_MEMORY_WORDS = (
    "Cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "failed to map segment from shared object",
    "cannot allocate memory in static TLS block",
    "can't start new thread",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def says_out_of_memory(text: str) -> bool:
    """Whether this is the text of an error because memory ran out."""
    return text.startswith("MemoryError") or any(words.lower() in text.lower() for words in OUT_OF_MEMORY_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of the machine, of the GPU, or by `ulimit -v`; also where a library wraps the error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return True
        if isinstance(seen, RuntimeError | ImportError | OSError) and says_out_of_memory(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False
