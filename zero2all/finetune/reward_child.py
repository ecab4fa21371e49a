"""The process in which a reward function of the user runs: `python reward_child.py FILE.py FUNCTION`.

Each line on stdin is [answer, record]; each line of the output is {"value": …} or {"error": …}. What the function
prints goes to stderr. Only the standard library: the user's file decides what else is loaded.
"""

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
    try:
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec = importlib.util.spec_from_file_location("reward", path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        function = getattr(module, name)
        ready: dict[str, float | str] = {"value": 0.0}
    except BaseException as error:
        ready = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(ready), file=output, flush=True)
    for line in sys.stdin if "value" in ready else ():
        print(json.dumps(judged(function, *json.loads(line))), file=output, flush=True)


def judged(function, answer, record):  # type: ignore[no-untyped-def]
    """What the function says of one answer; None: it cannot be judged."""
    try:
        value = function(answer, record)
        if value is None:
            return {"value": None}
        if not math.isfinite(float(value)):
            return {"error": f"the value is {float(value)}"}
        return {"value": float(value)}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
