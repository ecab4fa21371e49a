"""Errors a person can act on, and the exit code each of them ends the command with.

Raise one with a paragraph: what was wrong, what was expected, what to do. The command line prints it without a
traceback. Anything else is a bug of ours, keeps its traceback and exits with 1, except for a full disk, memory that ran
out and a limit of the process: `is_disk_full`, `is_out_of_memory` and `exceeded_limit` recognise them.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""No space left; quota used up."""
SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
"""numpy says only this, whatever refused the rest."""
MANY_FILES = "Too many open files"
"""What the system says, and libraries pass on, where a process may open no more."""


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
    """Other groups (DiLoCo) did not come."""


class RunLockedError(UserError):
    """Another live process is already writing to this run."""

    exit_code = 13


class LostRunError(UserError):
    """This process had the run, and another one has it now: nothing more may be written to it from here."""

    exit_code = 14


class UnhealthyError(UserError):
    """The health check found this machine, or one that cannot be left out, slow or broken."""

    exit_code = 16


GAVE_UP_CODE = 15
"""Exit code of a command that the supervisor has given up: it fails again and again."""


def _kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


_RETRIED = {PeerFailureError.exit_code, PreemptedError.exit_code}
NEVER_AGAIN = tuple(sorted({GAVE_UP_CODE, *(kind.exit_code for kind in _kinds(UserError))} - _RETRIED))
"""Exit codes that another attempt would end with too: of the supervisor, of job files, in docs/architecture.md."""


def for_all_ranks(error: E) -> E:
    """The error, marked as one that all processes of the run raise."""
    error.of_all_ranks = True
    return error


_KINDS = {kind.__name__: kind for kind in (*_kinds(UserError), OSError)}
"""Those above: no process imports a class because another one names it."""


def error_values(error: Exception) -> list[Any]:
    """An error as plain values, for other processes: the nearest class above, or its own, and what it says."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values()), type(error).__name__)
    if isinstance(error, OSError) and error.errno is not None:
        return [name, error.errno, error.strerror, None if error.filename is None else str(error.filename)]
    return [name, str(error)]


def error_from(values: Sequence[Any]) -> Exception:
    """The error behind `error_values`. Of a class that is not above, a RuntimeError that says what it was, also to
    `is_out_of_memory` and its like."""
    name, *said = values
    return _KINDS[name](*said) if name in _KINDS else RuntimeError(f"{name}: {said[0]}")


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full.

    Libraries written in Rust raise errors that end with `(os error 28)`. numpy only says how much it wrote.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL_ERRNOS
    if isinstance(error, OSError) and SHORT_WRITE.fullmatch(str(error)):
        return True
    return any(f"(os error {number})" in str(error) for number in DISK_FULL_ERRNOS)


def exceeded_limit(error: BaseException) -> str | None:
    """Which limit of this process was reached, and what to do, without a full stop; None: it is another error."""
    import resource  # not on Windows

    for seen in _with_causes(error):
        number = seen.errno if isinstance(seen, OSError) else None
        text = str(seen) if isinstance(seen, RuntimeError | ImportError | OSError) else ""
        if number == errno.EMFILE or MANY_FILES in text:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"this process may have {most} files and connections open at a time, and needs more: raise the limit "
                f"(`ulimit -n 4096`, or LimitNOFILE of a service) and run the same command again"
            )
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        is_short = bool(SHORT_WRITE.fullmatch(text)) and largest != resource.RLIM_INFINITY
        if number == errno.EFBIG or "(os error 27)" in str(seen) or is_short:
            if largest == resource.RLIM_INFINITY:
                return "the file system does not take a file of this size: use a workspace on another one"
            return (
                f"this process may write files of at most {largest:,} bytes, and one grew to that: raise the limit "
                f"(`ulimit -f unlimited`, or LimitFSIZE of a service) and run the same command again"
            )
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


OUT_OF_MEMORY_WORDS = (
    "Cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "failed to map segment from shared object",
    "cannot allocate memory in static TLS block",
    "can't start new thread",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def says_out_of_memory(text: str) -> bool:
    """Whether this is the text of an error because memory ran out."""
    return text.startswith("MemoryError") or any(words.lower() in text.lower() for words in OUT_OF_MEMORY_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of the machine, of the GPU, or by `ulimit -v`; also where a library wraps the error."""
    return any(
        isinstance(seen, MemoryError)
        or type(seen).__name__ == "OutOfMemoryError"  # of torch, which is not imported here
        or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM)
        or (isinstance(seen, RuntimeError | ImportError | OSError) and says_out_of_memory(str(seen)))
        for seen in _with_causes(error)
    )
