"""Memory does not grow with the input. Peak resident size of a fresh process, libraries included (numba 100 MB)."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from zero2all.corpus.listing import list_files
from zero2all.corpus.readers import ReaderLimits, RawRow, plan_units, read_unit
limits = ReaderLimits(max_record_bytes=8_000_000, unit_bytes=16_000_000)
[file] = list_files(Path(sys.argv[1])).files
rows, reasons = 0, []
for unit in plan_units(file, limits):
    for item in read_unit(unit, limits, lambda _: None):
        if isinstance(item, RawRow):
            rows += 1
        else:
            reasons.append(item.reason)
status = Path("/proc/self/status").read_text()
print(rows, int(status.split("VmHWM:")[1].split()[0]) // 1024, *reasons)
"""


def read_in_own_process(path: Path) -> tuple[int, int, list[str]]:
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows, peak, *reasons = done.stdout.split()
    return int(rows), int(peak), reasons


def test_array_of_60_mb(tmp_path: Path):
    row = {"id": 1, "text": "一些文字 and words " * 60, "list": [1, {"a": "}]"}]}
    data = json.dumps(row, ensure_ascii=False).encode()
    count = 60_000_000 // len(data)
    (tmp_path / "a.json").write_bytes(b"[" + b",\n".join([data] * count) + b"]")
    rows, peak, reasons = read_in_own_process(tmp_path / "a.json")
    assert (rows, reasons) == (count, [])
    assert peak < 230


@pytest.mark.parametrize(
    "kind",
    ["jsonl", "json", "pretty", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("jsonl.gz", "txt", "csv"))],
)
def test_line_of_40_mb(tmp_path: Path, kind: str):
    small, large = b'{"text": "small"}', b'{"text": "' + "中文".encode() * 6_700_000 + b'"}'
    data = {
        "json": b"[" + small + b",\n" + large + b",\n" + small + b"]",
        "csv": b'id,text\n1,small\n2,"' + b"x" * 40_000_000 + b'"\n3,small\n',
        "txt": large[10:],
        "pretty": b'{\n "text": "' + b"x" * 40_000_000 + b'"\n}',
    }.get(kind, small + b"\n" + large + b"\n" + small + b"\n")
    path = tmp_path / ("a.json" if kind == "pretty" else f"a.{kind}")
    path.write_bytes(gzip.compress(data, 1) if kind == "jsonl.gz" else data)
    del data
    rows, peak, reasons = read_in_own_process(path)
    if kind == "txt":  # cut into documents
        assert rows > 1000
        assert reasons == []
    else:
        assert (rows, reasons) == (0 if kind == "pretty" else 2, ["too_large"])
    assert peak < (150 if kind == "pretty" else 230)
