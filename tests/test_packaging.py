"""Every file of the package that is not Python is in a wheel, and what the packages that are installed here ask of one
another is met by the pins; `make lock` asks a registry and sees all packages."""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


LOCKED = [line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
PINS = {canonicalize_name(name): version for name, version in LOCKED}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_pin_is_accepted_by_the_packages_that_need_it(machine, python):
    place = {**default_environment(), "platform_machine": machine, "python_version": python, "extra": ""}
    place["python_full_version"] = f"{python}.0"
    refused = []
    looked_at = 0
    for name in PINS:
        try:
            needs = [Requirement(text) for text in distribution(name).requires or ()]
        except ModuleNotFoundError:
            continue  # not installed here
        for need in needs:
            pin = PINS.get(canonicalize_name(need.name))
            if pin is not None and (need.marker is None or need.marker.evaluate(place)):
                looked_at += 1
                if not need.specifier.contains(pin, prereleases=True):
                    refused.append(f"{name} needs {need}, the lock has {pin}")
    assert looked_at > 50
    assert not refused
