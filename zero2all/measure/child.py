"""A measurement in a process of its own: what it allocates, compiles or breaks ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero2all.common.files import read_json_object

MEASURED, OUT_OF_MEMORY, CANNOT_RUN, FAILED = "measured", "out of memory", "cannot run here", "failed"
TAIL_LINES = 8


def run_child(
    module: str,
    words: Sequence[object],
    overrides: Sequence[str],
    timeout: float,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a module of this room writes to its --result, or how its process ended."""
    with tempfile.TemporaryDirectory(prefix="z2a-child-") as folder:
        result, log = Path(folder) / "result.json", log or Path(folder) / "log"
        command = [sys.executable, "-m", f"zero2all.measure.{module}", *map(str, words), "--result", str(result)]
        try:
            with open(log, "wb") as output:
                code = subprocess.run(
                    [*command, "--", *overrides],
                    env={**os.environ, **(variables or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout,
                ).returncode
        except subprocess.TimeoutExpired:
            return {"status": FAILED, "reason": f"not finished after {timeout:g} s"}
        if result.is_file():
            return read_json_object(result)
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    if code == -9:
        return {"status": OUT_OF_MEMORY, "reason": "the system killed the process (signal 9)"}
    return {"status": FAILED, "reason": f"exit code {code}: {' | '.join(tail)}"}
