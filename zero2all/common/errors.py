"""Errors a person can act on, and the exit code each of them ends the command with.

Raise one of these with a whole paragraph: what was wrong, what was expected, what to do. The command line prints
it without a traceback. Anything else that escapes is a bug of ours, keeps its traceback and exits with 1.
"""


class UserError(Exception):
    """Something outside the program is wrong, and the message says how to mend it."""

    exit_code = 3


class UsageError(UserError):
    """The command line or the config cannot be understood."""

    exit_code = 2


class BadInputError(UserError):
    """A file or folder that was given cannot be used as it is."""

    exit_code = 3


class DiskError(UserError):
    """Not enough room, or the disk refused a write."""

    exit_code = 4


class PreemptedError(UserError):
    """The run was asked to stop, saved its state, and can be continued."""

    exit_code = 10


class AnomalyError(UserError):
    """The run stopped itself because going on would waste the work."""

    exit_code = 12


class RunLockedError(UserError):
    """Another live process is already writing to this run."""

    exit_code = 13
