"""The chart library is fetched with npm where it is missing, and only the tested file is taken."""

import io
import sys
import tarfile
from pathlib import Path

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError
from zero2all.track import chart_library
from zero2all.track.chart_library import fetch_charts, has_charts

LIBRARY = chart_library.CHART_LIBRARY


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(chart_library, "VENDOR", tmp_path / "vendor")
    monkeypatch.setattr(chart_library, "CHART_LIBRARY", tmp_path / "vendor/uPlot.iife.min.js")
    return tmp_path / "vendor"


def npm_that_packs(library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named npm before all others, which answers `npm pack` with a package of this content."""
    with tarfile.open(tmp_path / "uplot.tgz", "w:gz") as tar:
        for name, content in (("dist/uPlot.iife.min.js", library), ("LICENSE", b"MIT")):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    (tmp_path / "bin").mkdir()
    script = f"#!{sys.executable}\nimport shutil\nshutil.copy({str(tmp_path / 'uplot.tgz')!r}, 'uplot-1.tgz')\n"
    (tmp_path / "bin/npm").write_text(script)
    (tmp_path / "bin/npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_the_command_that_the_board_names_fetches_the_library_once(vendor, tmp_path, monkeypatch, capsys):
    if not LIBRARY.is_file():
        pytest.skip("the chart library is missing; z2a board --fetch-charts fetches it")
    npm_that_packs(LIBRARY.read_bytes(), tmp_path, monkeypatch)
    words = chart_library.FETCH_COMMAND.split()[1:]
    assert f"`{chart_library.FETCH_COMMAND}`" in chart_library.MISSING
    assert main(words) == 0
    assert has_charts()
    assert (vendor / "LICENSE").read_bytes() == b"MIT"
    monkeypatch.setenv("PATH", "")
    assert main(words) == 0
    assert "there already" in capsys.readouterr().out


def test_a_file_that_was_not_tested_is_not_used(vendor, tmp_path, monkeypatch):
    npm_that_packs(b"alert(1)", tmp_path, monkeypatch)
    with pytest.raises(BadInputError, match="is not the file that zero2all was tested with"):
        fetch_charts()
    assert not vendor.exists()


def test_without_npm_it_is_said_how_to_get_it_and_what_npm_says_when_it_fails_is_shown(vendor, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInputError, match=r"npm was not found.*Install Node"):
        fetch_charts()
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'npm error network timed out' >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BadInputError, match=r"could not fetch uplot 1\.6\.32: npm error network timed out"):
        fetch_charts()
