"""A process that has imported torch, which takes seconds, and forks a child for every program it is asked to run.
Requests and answers are JSON lines on stdin and stdout."""

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType

# What a trainer needs, imported for the children; the first optimizer of a process imports torch._dynamo.
import torch._dynamo  # noqa: F401

import zero2all.cli
import zero2all.train.run  # noqa: F401
from zero2all.common.progress import show_log

PR_SET_PDEATHSIG = 1


def run(code: str, arguments: list[str], output: str) -> None:
    """The child: everything it prints goes to `output`. It dies with this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(number, target)
    sys.argv = ["z2a", *arguments]
    show_log()
    exit_code = 1
    try:
        # Like `python -c`: a `__main__` without a file, which worker processes of the child need not import again.
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<test>", "exec"), vars(program))
        exit_code = 0
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def main() -> None:
    """Serve until stdin ends."""
    sys.path[0] = str(Path(__file__).parents[1])  # so that a child may import from `tests`
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they close stdin
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            done, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        else:
            answer = os.fork()
            if answer == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                run(**request)
        print(json.dumps(answer), flush=True)


main()
