"""The inside of the sandbox: a script that limits its own process, and then runs the program it was given.

Started by `sandbox.py` as `python -I sandbox_child.py`, with a JSON object on stdin; to stdout go the secret and, after
it, how the program ended. Standard library only.

What holds on Linux (x86-64, arm64) is a filter of system calls (seccomp): the kernel allows computing, reading files,
and writing to what is open already; it refuses sockets, new processes and threads, signals to others, and opening,
creating, renaming or removing any file for writing. It cannot be lifted again, by no code in whatever language. Where
the kernel has no such filter, an audit hook of Python refuses the same: that stops what a language model writes by
mistake, not a person who wants to get out.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # the last: errno EPERM
LOAD, JUMP_EQUAL, JUMP_FROM, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32_CALLS = 0x40000000

CALLS: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, arm64); None: that machine has no such call
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222)},
    **{"mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134)},
    **{"rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "ioctl": (16, 29), "pread64": (17, 67)},
    **{"readv": (19, 65), "writev": (20, 66), "stat": (4, None), "lstat": (6, None), "poll": (7, None)},
    **{"access": (21, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216)},
    **{"madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "nanosleep": (35, 101)},
    **{"getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "fcntl": (72, 25), "getcwd": (79, 17)},
    **{"readlink": (89, None), "gettimeofday": (96, 169), "getrusage": (98, 165), "sysinfo": (99, 179)},
    **{"times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175)},
    **{"getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178)},
    **{"futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128)},
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)},
    **{"exit_group": (231, 94), "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48)},
    **{"pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99), "getrandom": (318, 278)},
    **{"membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439)},
}
OPENS: dict[str, tuple[tuple[int | None, int | None], int]] = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
"""Calls that open a file, and the place of the argument that says what for: reading only is allowed."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def filter_system_calls() -> bool:
    """From now on the kernel refuses whatever is not in CALLS; False where this machine cannot."""
    place, architecture = MACHINES.get(platform.machine(), (None, 0))
    if sys.platform != "linux" or place is None or sys.maxsize < 2**32:
        return False
    for_writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
    steps = [
        (LOAD, 0, 0, 4),  # the machine's code
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number of the call
        (JUMP_FROM, 0, 1, X32_CALLS),
        (RETURN, 0, 0, KILL),
    ]
    for numbers, argument in OPENS.values():
        number = numbers[place]
        if number is not None:
            steps += [
                (JUMP_EQUAL, 0, 4, number),
                (LOAD, 0, 0, 16 + 8 * argument),
                (JUMP_BITS, 0, 1, for_writing),
                (RETURN, 0, 0, REFUSE),
                (RETURN, 0, 0, ALLOW),
            ]
    for numbers in CALLS.values():
        number = numbers[place]
        if number is not None:
            steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    steps.append((RETURN, 0, 0, REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


REFUSED_EVENTS = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "pty."),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.putenv", "os.utime", "os.setxattr", "os.removexattr", "os.startfile", "shutil.", "tempfile.", "ctypes."),
    *("resource.prlimit", "resource.setrlimit", "signal.pthread_kill", "syslog.", "winreg.", "mmap."),
)


def refuse_by_hook() -> None:
    """The same by an audit hook: it sees what Python's own library does, and nothing else."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event == "open" and (
            (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")) or (arguments[2] or 0) & 0o3103
        )
        if is_write or event.startswith(REFUSED_EVENTS):
            raise PermissionError(f"{event} is not allowed in the sandbox")

    sys.addaudithook(hook)


def limit_resources(seconds: int, memory_bytes: int) -> None:
    """Processor time, memory, files and processes."""
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NOFILE: (32, 32),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NPROC: (0, 0),  # means nothing to root, whom the filter stops
    }
    for kind, values in limits.items():
        hard = resource.getrlimit(kind)[1]
        low, high = (value if hard == resource.RLIM_INFINITY else min(value, hard) for value in values)
        resource.setrlimit(kind, (low, high))


def main() -> None:
    """Read the program, limit this process, run it, say how it ended."""
    given = json.loads(sys.stdin.buffer.read())
    verdict = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what the program prints goes nowhere, so it cannot flood anybody
        os.dup2(nowhere, number)
    import math  # noqa: F401  (loaded here: most programs need it, and then it costs no opened file)
    import typing  # noqa: F401

    limit_resources(given["cpu_seconds"], given["memory_bytes"])
    is_filtered = filter_system_calls()
    if not is_filtered:
        refuse_by_hook()
    outcome = run(given["program"])
    words = {"outcome": outcome, "protection": "seccomp" if is_filtered else "audit hook"}
    os.write(verdict, given["secret"].encode() + json.dumps(words).encode())
    os._exit(0)  # what the program left behind (threads, exit handlers) has no say any more


def run(program: str) -> str:
    """passed, or in words how it failed."""
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "program"})
    except MemoryError:
        return "out of memory"
    except BaseException as error:
        return f"failed: {type(error).__name__}: {str(error)[:200]}"
    return "passed"


if __name__ == "__main__":
    main()
