"""The notebook runs from its first cell to its last, in an empty folder, and its model answers."""

import json
import re

import pytest

from tests.pages import ROOT

PATH = ROOT / "docs" / "zero2all.ipynb"
LARGEST_BYTES = 20_000
STEPS = "STEPS = 200"
"""What the test makes fewer."""


def cells(kind: str) -> list[str]:
    found = json.loads(PATH.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_the_notebook_is_small_and_stores_nothing_of_a_run():
    assert PATH.stat().st_size < LARGEST_BYTES
    notebook = json.loads(PATH.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    named = re.findall(r"\((docs/[\w.]+)\)", "\n".join(cells("markdown")))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_notebook_runs_from_text_to_chat(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert sum(source.count(STEPS) for source in cells("code")) == 1
    space: dict = {}
    for number, source in enumerate(cells("code")):
        exec(compile(source.replace(STEPS, "STEPS = 80"), f"code cell {number}", "exec"), space)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert space["right"] >= 10, space["answers"]  # of 12
    true, false = (space["model"].score(f"The capital of Norway is {city}.").loss for city in ("Oslo", "Lima"))
    assert true < false
