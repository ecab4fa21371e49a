"""requirements.lock: what installed packages ask of one another is met by its pins, on every machine of the promise.

This looks at the packages that are installed here, so an ordinary torch (with CUDA) checks more than a CPU build.
`make lock` asks a registry and sees all of them.
"""

from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "requirements.lock").read_text().splitlines())
}


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
