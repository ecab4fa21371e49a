"""Every file of the package that is not Python is named in pyproject.toml, so that it is in a wheel."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_data_files_are_declared():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    declared = {path for name, globs in patterns.items() for glob in globs for path in _files(name, glob)}
    ours = {path for path in (ROOT / "zero2all").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in ours - declared if path.suffix not in (".py", ".pyc")} == set()
    assert all(_files(name, glob) for name, globs in patterns.items() for glob in globs if "vendor" not in glob)


def _files(package: str, glob: str) -> list[Path]:
    """What a line of package-data covers; `*` is every package."""
    return list((ROOT / "zero2all").rglob(glob) if package == "*" else ROOT.joinpath(*package.split(".")).glob(glob))
