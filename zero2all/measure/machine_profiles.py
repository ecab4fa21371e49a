"""Where the profiles of machines lie, what each is valid for, and the one for this machine.

A profile (`estimate.machine`) is measured by `z2a perf calibrate`. It holds for one device with one driver, one
torch, one CUDA and one power limit: when any of them changes, it is stale, and using it is refused with what changed.
Profiles belong to a user, not to a workspace: they lie in ~/.cache/zero2all/profiles, or where Z2A_PROFILES says.
"""

import os
import re
from pathlib import Path

import torch

import zero2all
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.manifest import fingerprint
from zero2all.estimate.machine import Machine, named_cluster, read_machine
from zero2all.measure.clock import device_name
from zero2all.measure.doctor.finding import output_of
from zero2all.measure.doctor.host import processor
from zero2all.parallel.device import pick_device

FOLDER_VARIABLE = "Z2A_PROFILES"
SMI_FIELDS = {"driver": "driver_version", "power_limit": "power.limit"}


def profiles_folder() -> Path:
    """The folder of the profiles."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero2all" / "profiles"


def profile_key(device: torch.device) -> dict[str, str]:
    """What a profile of this device depends on."""
    key = {"device": device_name(device), "torch": str(torch.__version__), "zero2all": zero2all.__version__}
    if device.type != "cuda":
        return {**key, "device": processor(), "threads": str(torch.get_num_threads())}
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    key |= {"uuid": identity, "cuda": str(torch.version.cuda)}
    query = f"--query-gpu={','.join(SMI_FIELDS.values())}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id=GPU-{identity}"]
    found = [value.strip() for value in (output_of(command, 30)[0] or "").split(",")]
    return key | dict(zip(SMI_FIELDS, found if len(found) == len(SMI_FIELDS) else ["unknown"] * 2, strict=True))


def profile_path(key: dict[str, str]) -> Path:
    """The file of the profile with this key."""
    name = re.sub(r"[^a-z0-9]+", "-", key["device"].lower()).strip("-")
    return profiles_folder() / f"{name}-{fingerprint(key)[:10]}.json"


def stale_because(profile: dict[str, str], here: dict[str, str]) -> list[str]:
    """Every difference between the key of a profile and that of this machine, in words."""
    return [
        f"{name} was {profile.get(name, 'not recorded')} and is {here.get(name, 'not known')} now"
        for name in sorted({*profile, *here})
        if profile.get(name) != here.get(name)
    ]


def named_machine(
    cluster: str | None, profile: Path | None, device: torch.device | None = None, runs_here: bool = False
) -> Machine:
    """A cluster by name, the profile in a file, or that of this machine. What `runs_here` needs the last."""
    if cluster is not None and profile is not None:
        raise UsageError("--cluster and --profile both name a machine. Give one of them.")
    if cluster is not None:
        return named_cluster(cluster)
    if profile is None:
        return profile_here(device or pick_device("auto"))
    return profile_from(profile, device if runs_here else None)


def profile_here(device: torch.device) -> Machine:
    """The profile of this machine; BadInputError where there is none, or only stale ones: what changed since."""
    here = profile_key(device)
    path = profile_path(here)
    if path.is_file():
        return read_machine(path)
    others = [(found, read_machine(found).key) for found in sorted(profiles_folder().glob("*.json"))]
    same = [(found, key) for found, key in others if key.get("device") == here["device"]]
    if not same:
        raise BadInputError(
            f"There is no profile of {here['device']} in {profiles_folder()}. Measure one, which takes 3 minutes: "
            f"`z2a perf calibrate`. Or name a cluster: --cluster h200."
        )
    found, key = max(same, key=lambda one: one[0].stat().st_mtime)
    changes = "; ".join(stale_because(key, here))
    raise BadInputError(f"The profile {found.name} is stale: {changes}. Measure again: `z2a perf calibrate`.")


def profile_from(path: Path, device: torch.device | None) -> Machine:
    """The profile in a file. With `device`, what runs there is compared with it, so its key has to be that device's."""
    if not path.is_file():
        raise BadInputError(f"--profile {path} is not a file. `z2a perf calibrate` prints where it writes one.")
    machine = read_machine(path)
    here = None if device is None else profile_key(device)
    if here is not None and machine.key and (changes := stale_because(machine.key, here)):
        raise BadInputError(f"{path} is not of this machine: {'; '.join(changes)}. Measure it: `z2a perf calibrate`.")
    return machine
