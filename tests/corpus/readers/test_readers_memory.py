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
for path in sys.argv[1:]:
    [file] = list_files(Path(path)).files
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
SMALL, LARGE = b'{"text": "small"}', b'{"text": "' + "中文".encode() * 6_700_000 + b'"}'


def read_in_own_process(*paths: Path) -> list[tuple[int, int, list[str]]]:
    """Rows, peak so far in MB and what was damaged, of each file."""
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = [line.split() for line in done.stdout.splitlines()]
    return [(int(rows), int(peak), reasons) for rows, peak, *reasons in found]


def test_lines_of_40_mb_and_an_array_of_60_mb(tmp_path: Path):
    row = {"id": 1, "text": "一些文字 and words " * 60, "list": [1, {"a": "}]"}]}
    data = json.dumps(row, ensure_ascii=False).encode()
    count = 60_000_000 // len(data)
    paths = [tmp_path / name for name in ("pretty.json", "a.jsonl", "a.json", "array.json")]
    paths[0].write_bytes(b'{\n "text": "' + b"x" * 40_000_000 + b'"\n}')
    paths[1].write_bytes(SMALL + b"\n" + LARGE + b"\n" + SMALL + b"\n")
    paths[2].write_bytes(b"[" + SMALL + b",\n" + LARGE + b",\n" + SMALL + b"]")
    paths[3].write_bytes(b"[" + b",\n".join([data] * count) + b"]")
    found = read_in_own_process(*paths)
    damage = [(rows, reasons) for rows, _, reasons in found]
    assert damage == [(0, ["too_large"]), (2, ["too_large"]), (2, ["too_large"]), (count, [])]
    assert found[0][1] < 150
    assert found[-1][1] < 230


@pytest.mark.slow
def test_lines_of_40_mb_in_other_formats(tmp_path: Path):
    paths = [tmp_path / name for name in ("a.jsonl.gz", "a.csv", "a.txt")]
    paths[0].write_bytes(gzip.compress(SMALL + b"\n" + LARGE + b"\n" + SMALL + b"\n", 1))
    paths[1].write_bytes(b'id,text\n1,small\n2,"' + b"x" * 40_000_000 + b'"\n3,small\n')
    paths[2].write_bytes(LARGE[10:])
    zipped, table, text = read_in_own_process(*paths)
    assert zipped[::2] == table[::2] == (2, ["too_large"])
    assert text[0] > 1000, "it is cut into documents"
    assert text[1] < 230
