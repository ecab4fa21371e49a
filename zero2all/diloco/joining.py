"""The start of a run of several groups: wait for the others, and say who is missing and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zero2all.common.connections import NotOfThisRunError, dial, split_address
from zero2all.common.errors import AbsentGroupsError
from zero2all.common.language import message
from zero2all.common.progress import say
from zero2all.diloco.coordinator import RoundCoordinator

LOOK_SECONDS, NOTICE_SECONDS, AGAIN_SECONDS = 1.0, 10.0, 60.0
"""While a group waits for another: pause between two looks why it does not come, and when that is said."""
LAST_WORD_SECONDS = 0.5
LOOKS = {"looks": True}
"""The hello of a process that only wants to know who listens."""


def wait_for_groups(
    coordinator: RoundCoordinator, secret: bytes, seconds: float, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the coordinator runs or has failed, or a signal comes."""
    reasons: list[str] = []
    threading.Thread(target=_look_for_missing, args=(coordinator, secret, reasons), daemon=True).start()
    deadline = time.monotonic() + seconds
    with coordinator.changed:
        while not _is_over(coordinator) and not is_stopped():
            if not coordinator.missing():
                coordinator.begin()
                # As long as it takes to get a state, while the group that has it is there.
                deadline = max(deadline, time.monotonic() + seconds)
            elif time.monotonic() > deadline:
                coordinator.fail(_absence(coordinator, seconds, reasons))
            coordinator.changed.wait(0.2)
    if coordinator.failure is not None:
        time.sleep(LAST_WORD_SECONDS)  # so that the other groups see what differs, too


def _is_over(coordinator: RoundCoordinator) -> bool:
    return coordinator.is_running or coordinator.failure is not None or coordinator.is_closed


def _absence(coordinator: RoundCoordinator, seconds: float, reasons: list[str]) -> AbsentGroupsError:
    """Who did not come in time."""
    config = coordinator.config
    names = ", ".join(f"{group} ({config.groups[group]})" for group in coordinator.missing())
    lines = [
        f"These groups of {config.count} did not join within parallel.join_seconds ({seconds:g} s): {names}. Look for "
        f"their errors, and check that their addresses in diloco.groups are right and that no firewall blocks the "
        f"port.",
        *reasons,
    ]
    if coordinator.history.weight:
        lines.append(
            "If they have finished the run, start them again, too: they give their final weights to this group. Or "
            "copy their run folder."
        )
    return AbsentGroupsError(" ".join(lines))


def _look_for_missing(coordinator: RoundCoordinator, secret: bytes, reasons: list[str]) -> None:
    """In a thread: find out why other groups do not come, and say it after a while."""
    say_at = time.monotonic() + NOTICE_SECONDS
    while True:
        with coordinator.changed:
            if coordinator.changed.wait_for(lambda: _is_over(coordinator), LOOK_SECONDS):
                return
            missing = coordinator.missing()
        reasons[:] = [_why_missing(coordinator, group, secret) for group in missing]  # no lock: a name may take seconds
        if reasons and time.monotonic() > say_at:
            say_at = time.monotonic() + AGAIN_SECONDS
            say(f"z2a: waiting for other groups. {' '.join(reasons)}")


def _why_missing(coordinator: RoundCoordinator, group: int, secret: bytes) -> str:
    from zero2all.parallel.rendezvous import why_not_reached  # needs torch

    own, address = coordinator.group, coordinator.config.groups[group]
    if group in coordinator.statuses:
        return message(f"Group {group} at {address} is here, but has not met all other groups.")
    try:
        dial(split_address(address), secret, f"group {group}", LOOKS, LOOK_SECONDS).close()
        why = ""
    except NotOfThisRunError as error:
        why = str(error)
    except OSError:
        why = why_not_reached(*split_address(address), f"group {group}")
    if why:
        return message(f"Group {group} cannot be reached at {address}: {why}.")
    if group < own:
        return message(f"At {address} something answers, but not as group {group} does: the port is wrong.")
    here = coordinator.config.groups[own]
    why = f"a firewall blocks the way to {here}, it has another address for group {own}, or the port is wrong"
    return message(f"Group {group} at {address} can be reached, but has not connected to group {own}: {why}.")
