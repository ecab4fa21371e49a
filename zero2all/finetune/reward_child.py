"""The process in which a reward function of the user runs: `python reward_child.py FILE.py FUNCTION`.

Each line on stdin is [number, answer, record]; each line of the output is [number, value, error], of which one is null.
It dies with the process that started it (Linux). What the function prints goes to stderr. Only the standard library:
the user's file decides what else is loaded.
"""

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import sys
from pathlib import Path


def main() -> None:
    """Answer until stdin ends."""
    path, name = sys.argv[1:]
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    problem = None
    try:
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec = importlib.util.spec_from_file_location("reward", path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        function = getattr(module, name)
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps([0, None, problem]), file=output, flush=True)
    for line in sys.stdin if problem is None else ():
        number, answer, record = json.loads(line)
        print(json.dumps([number, *judged(function, answer, record)]), file=output, flush=True)


def judged(function, answer, record):  # type: ignore[no-untyped-def]
    """The value of one answer, or why there is none."""
    try:
        value = function(answer, record)
        if value is None:
            return None, "it returned None"
        if not math.isfinite(float(value)):
            return None, f"the value is {float(value)}"
        return float(value), None
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main()
