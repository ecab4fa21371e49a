"""One rank of a group that does rounds over a link, for tests: `python group_worker.py SETTINGS LOG`.

Its outer state is a hash of all payloads that were ever used, so two groups have the same state only if they used the
same payloads in the same order. The log has a line per round: round, set, state.
"""

from __future__ import annotations

import gc
import hashlib
import json
import signal
import sys
import time
import traceback
from pathlib import Path

from zero2all.parallel.config import SlowLinkConfig
from zero2all.parallel.group_link import GroupLink
from zero2all.parallel.group_wire import Expected

FACTS = {"train.seed": 1, "ranks": 2}
SECRET = b"the secret of the groups of a test"
PAYLOAD_BYTES, STATE_BYTES = 3000, 32


def expected(payload_bytes: int = PAYLOAD_BYTES) -> Expected:
    """Two fragments; a payload or state that begins with four times 0xFF cannot be used."""
    return Expected([payload_bytes] * 2, STATE_BYTES, lambda _, data: "it is bad" if data[:4] == b"\xff" * 4 else "")


def payload_of(group: int, rank: int, number: int, length: int = PAYLOAD_BYTES) -> bytes:
    return hashlib.shake_128(f"{group} {rank} {number}".encode()).digest(length)


def do_rounds(link: GroupLink, log, rounds, state=b"", number=0, step_seconds=0.0, fragments=1, slow=None):
    """Rounds until `rounds`, as training does them; returns the last state. `slow`: what to wait for in a round."""
    while True:
        if (label := link.behind()) is not None:
            number, state = link.adopt()
            assert label == number
            log({"adopted": number, "state": state.hex()})
        if number >= rounds:
            return state
        (slow or {}).get(number, lambda: time.sleep(step_seconds))()
        for fragment in range(fragments):
            link.offer(number, fragment, payload_of(link.group, link.rank, number * fragments + fragment))
            found = link.collect(number, fragment)
            if link.behind() is not None:
                break
            for group in sorted(found):
                assert found[group] == payload_of(group, link.rank, number * fragments + fragment)
                state = hashlib.sha256(state + found[group]).digest()
            link.serve_state(number + 1 if fragment == fragments - 1 else number, lambda: state)  # noqa: B023
            log({"round": number, "fragment": fragment, "set": sorted(found), "state": state.hex()})
        else:
            number += 1


def dump(_signal, frame) -> None:
    """Print what this rank waits for; also of a link that is still joining."""
    link = next(each for each in gc.get_objects() if type(each) is GroupLink)
    known = {
        "outcomes": [*map(str, link.outcomes)],
        "payloads": str({key: [*has] for key, has in link._payloads.items()}),
    }
    if mind := link._mind:
        has = str({key: {str(member): [*ranks] for member, ranks in has.items()} for key, has in mind.has.items()})
        known |= {"heard": mind.heard, "has": has, "states": mind.states, "members": mind.members}
        known |= {"own": mind._status(), "alike": [*mind._alike], "served": [*mind.served]}
        known |= {"control": [group for group, channel in mind.control.items() if channel.is_up]}
    known |= {"connected": [group for group, each in link.data.items() if each.is_up]}
    known |= {"inner": {rank: each.is_up for rank, each in link.inner.items()}}
    where = "".join(traceback.format_stack(frame)[-3:])
    print(f"group {link.group} rank {link.rank}: {json.dumps(known)}\n{where}", file=sys.stderr, flush=True)


def main() -> None:
    signal.signal(signal.SIGUSR1, dump)
    settings, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank, ranks = settings.pop("rank"), settings.pop("ranks", 2)
    options = {name: settings.pop(name) for name in ("rounds", "step_seconds")}
    with path.open("a", buffering=1) as file:
        say = lambda row: file.write(json.dumps({"time": time.time(), **row}) + "\n")  # noqa: E731
        link = GroupLink(SlowLinkConfig(**settings), "test", rank, ranks, FACTS, 60.0, SECRET, expected())
        say({"started": True})
        do_rounds(link, say, **options)
        say({"finished": True})
        link.close()


if __name__ == "__main__":
    main()
