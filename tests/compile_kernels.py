"""Compiles the kernels of corpus and tokenizer into numba's cache. `make test` runs it while mypy checks: on a clean
clone each worker of the tests would compile them for itself, which takes 45 s of a core."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from zero2all.cli import main

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = ("corpus build own={} --valid-share 0.1", "tokenizer train --vocab-size 400", "pack --workers 1")


def compile_kernels(folder: Path) -> None:
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))[:12])
    pieces = [text[first : first + 3000] for first in range(0, len(text), 3000)]
    rows = [json.dumps({"text": piece}) + "\n" for piece in [*pieces, pieces[0]]]  # one twice, for dedup
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    for command in COMMANDS:
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = main([*command.format(folder / "rows.jsonl").split(), "--work", str(folder / "work")])
        if code:
            sys.exit(f"z2a {command} ended with code {code}:\n{said.getvalue()}")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        compile_kernels(Path(temporary))
