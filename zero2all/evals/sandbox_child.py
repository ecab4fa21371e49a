"""The inside of the sandbox: a script that limits its own process, and then runs the program it was given.

Started by `sandbox.py` as `python -I -S sandbox_child.py`, with a JSON object on stdin; to stdout go the secret and,
after it, how the program ended and what protected us. Standard library only.

On Linux the kernel holds the program, and what is given up cannot be taken back, by no code in whatever language:

- Files: Landlock (Linux 5.13 and later) lets it read its own empty folder, the standard library without site-packages,
  and the system's shared libraries. Where there is no Landlock, a mount namespace with a root of its own holds just
  these. Nothing else can be opened: no file of the user, nothing below /proc. Their names and sizes can be asked for.
- System calls (x86-64, arm64): a seccomp filter allows computing, opening files for reading, and writing to what is
  open already; it refuses sockets, new processes and threads, signals to others, and any change to a file.

Where the kernel has one of them not, an audit hook of Python refuses the same: that stops what a language model writes
by mistake, not a person who wants to get out.
"""

import builtins
import ctypes
import json
import os
import resource
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # the last: errno EPERM
LOAD, JUMP_EQUAL, JUMP_FROM, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32_CALLS = 0x40000000

CALLS: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, arm64); None: that machine has no such call
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222)},
    **{"mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134)},
    **{"rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67)},
    **{"readv": (19, 65), "writev": (20, 66), "stat": (4, None), "lstat": (6, None), "poll": (7, None)},
    **{"access": (21, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216)},
    **{"madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "nanosleep": (35, 101)},
    **{"getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17)},
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
COMMANDS: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "ioctl": ((16, 29), (0x5401, 0x5413, 0x5450, 0x5451)),  # is it a terminal, its size, close on exec or not
    "fcntl": ((72, 25), (0, 1, 2, 3, 4, 1030)),  # duplicate, flags
}
"""Calls that do many things, and what of them is allowed, by the second argument: `F_SETOWN` would send signals."""
PROTECTIONS = ("landlock", "namespace", "seccomp")
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Version -> how many rights on files it knows; the later ones know 16."""
READ_FILE, READ_DIR = 1 << 2, 1 << 3
CLONE_NEWNS, CLONE_NEWUSER, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 1 << 12, 1 << 14, 1 << 18
LIBRARY = Path(os.__file__).parent
SHARED = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", "/etc/ld.so.cache", "/usr/share/zoneinfo")
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def filter_system_calls() -> bool:
    """From now on the kernel refuses whatever is not in CALLS; False where this machine cannot."""
    place, architecture = MACHINES.get(os.uname().machine, (None, 0))
    if place is None or sys.maxsize < 2**32:
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
    for both, commands in COMMANDS.values():
        steps += [(JUMP_EQUAL, 0, 2 * len(commands) + 2, both[place]), (LOAD, 0, 0, 24)]
        for command in commands:
            steps += [(JUMP_EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW)]
        steps.append((RETURN, 0, 0, REFUSE))
    for numbers in CALLS.values():
        number = numbers[place]
        if number is not None:
            steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    steps.append((RETURN, 0, 0, REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    return ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def readable() -> list[Path]:
    """What a program must read to import the standard library: each part of it, and shared libraries."""
    own = [path for path in LIBRARY.iterdir() if path.name not in ("site-packages", "dist-packages")]
    return [path for path in (*own, *LIBRARY.parent.glob("*.so*"), *map(Path, SHARED)) if path.exists()]


def allow_by_landlock(paths: list[Path]) -> bool:
    """From now on the kernel lets this process read these, and open nothing else; False where it cannot."""
    libc = ctypes.CDLL(None)
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_long(0), 1)
    if version < 1:
        return False
    handled = (1 << LANDLOCK_RIGHTS.get(version, 16)) - 1
    rules = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)  # TCP; signals, sockets
    ruleset = libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_long(len(rules)), 0)
    is_whole = ruleset >= 0
    for path in (*paths, LIBRARY, Path()):
        rights = READ_DIR if path == LIBRARY else READ_FILE | READ_DIR if path.is_dir() else READ_FILE
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        is_whole &= libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, handle), 0) == 0
        os.close(handle)
    return is_whole and libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0


def allow_by_namespace(paths: list[Path]) -> bool:
    """The same by a root folder of our own, in which only these are mounted: what is not there cannot be opened."""
    libc, root, user, group = ctypes.CDLL(None), Path.cwd(), os.geteuid(), os.getegid()

    def mount(source: str, target: Path, kind: bytes | None, flags: int) -> bool:
        return libc.mount(source.encode(), bytes(target), kind, ctypes.c_ulong(flags), None) == 0

    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        return False
    with suppress(OSError):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
        is_whole = mount("none", Path("/"), None, MS_PRIVATE | MS_REC) and mount("none", root, b"tmpfs", 0)
        for path in paths:
            target = root / path.relative_to("/")
            (target if path.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
            target.touch()
            is_whole = is_whole and mount(str(path), target, None, MS_BIND | MS_REC)
        (root / "program").mkdir()
        os.chroot(root)
        os.chdir("/program")
        return is_whole
    return False


REFUSED_EVENTS = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "pty."),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.putenv", "os.utime", "os.setxattr", "os.removexattr", "os.startfile", "shutil.", "tempfile.", "ctypes."),
    *("resource.prlimit", "resource.setrlimit", "signal.pthread_kill", "syslog.", "winreg.", "mmap.", "fcntl."),
)


def refuse_by_hook(paths: list[Path]) -> None:
    """The same by an audit hook: it sees what Python's own library does, and nothing else."""
    allowed = {path.resolve() for path in (*paths, Path())}

    def is_hidden(path: Any) -> bool:
        place = Path(os.fsdecode(path or ".")).resolve()
        return allowed.isdisjoint((place, *place.parents))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event == "open" and (
            (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")) or (arguments[2] or 0) & 0o3103
        )
        is_read = event in ("open", "os.listdir", "os.scandir") and not isinstance(arguments[0], int)
        is_import = event == "os.listdir" and arguments[0] == str(LIBRARY)
        if is_write or event.startswith(REFUSED_EVENTS) or (is_read and not is_import and is_hidden(arguments[0])):
            raise PermissionError(f"{event} is not allowed in the sandbox")

    sys.addaudithook(hook)


def limit_resources(seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Processor time, memory, files and processes."""
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes),  # the verdict
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
    os.environ.clear()  # Python has put its locale there
    verdict = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what the program prints goes nowhere, so it cannot flood anybody
        os.dup2(nowhere, number)
    import math  # noqa: F401  (loaded here: most programs need it, and then it costs no opened file)
    import typing  # noqa: F401

    files, calls = protect(given)
    outcome = run(given["program"])
    os.write(verdict, f"{given['secret']}{outcome}|{files}|{calls}".encode())
    os._exit(0)  # what the program left behind (threads, exit handlers) has no say any more


def protect(given: dict[str, Any]) -> tuple[str, str]:
    """Give up what a program shall not have; returns what guards files and system calls from now on."""
    paths, left = readable(), set(PROTECTIONS) - set(given["without"])
    files = calls = "audit hook"
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        left.clear()
    if "landlock" in left and allow_by_landlock(paths):
        files = "landlock"
    elif {"namespace", "seccomp"} <= left and allow_by_namespace(paths):  # seccomp: else it could leave that root again
        files = "namespace"
    limit_resources(given["cpu_seconds"], given["memory_bytes"], given["file_bytes"])
    if "seccomp" in left and filter_system_calls():
        calls = "seccomp"
    if "audit hook" in (files, calls):
        refuse_by_hook(paths)
    return files, calls


def run(program: str) -> str:
    """passed, or how it failed: with the name of a built-in exception, since any other text could be what it read."""
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "program"})
    except MemoryError:
        return "out of memory"
    except BaseException as error:
        kinds = (kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
        return f"failed: {next(kinds)}"
    return "passed"


if __name__ == "__main__":
    main()
