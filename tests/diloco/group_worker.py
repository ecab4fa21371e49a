"""A group that does rounds over a link, for tests: `python group_worker.py SETTINGS LOG`.

Its outer state is a hash of all payloads that were ever used, so two groups have the same state only if they used the
same payloads in the same order. The log has a line per round: round, set, state.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from zero2all.common.progress import show_log
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.link import GroupLink, Membership
from zero2all.diloco.messages import Key
from zero2all.diloco.transport import Expected

FACTS = {"train.seed": 1}
SECRET = b"the secret of the groups of a test"
PAYLOAD_BYTES, STATE_BYTES = 3000, 36


def expected(payload_bytes: int = PAYLOAD_BYTES) -> Expected:
    """Two fragments; a payload or state that begins with four times 0xFF cannot be used."""
    return Expected([payload_bytes] * 2, STATE_BYTES, lambda _, data: "it is bad" if data[:4] == b"\xff" * 4 else "")


def membership(config: DilocoConfig, **fields) -> Membership:
    usual = {"run": "test", "facts": FACTS, "secret": SECRET, "expected": expected(), "join_seconds": 60.0}
    return Membership(config, **{**usual, **fields})


def payload_of(group: int, number: int, length: int = PAYLOAD_BYTES) -> bytes:
    return hashlib.shake_128(f"{group} {number}".encode()).digest(length)


def state_bytes(number: int, state: bytes) -> bytes:
    """A state as groups give it to each other: the next round and the hash."""
    return number.to_bytes(4, "big") + state.ljust(32, b"\0")


def do_rounds(link: GroupLink, log, rounds, state=b"", number=0, step_seconds=0.0, fragments=1, slow=None):
    """Rounds until `rounds`, as training does them; returns the last state. `slow`: what to wait for in a round."""
    while True:
        if link.is_behind:
            data = link.adopt()
            number, state = int.from_bytes(data[:4], "big"), data[4:]
            log({"adopted": number, "state": state.hex()})
        if number >= rounds:
            return state
        (slow or {}).get(number, lambda: time.sleep(step_seconds))()
        for fragment in range(fragments):
            key, at = Key(number, fragment), number * fragments + fragment
            link.offer(key, payload_of(link.group, at))
            found = link.collect(key)
            if link.is_behind:
                break
            for group in sorted(found):
                assert found[group] == payload_of(group, at)
                state = hashlib.sha256(state + found[group]).digest()
            if link.is_asked:
                link.serve(state_bytes(number + (fragment == fragments - 1), state))
            log({"round": number, "fragment": fragment, "set": sorted(found), "state": state.hex()})
        else:
            number += 1


def main() -> None:
    show_log()
    settings, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    options = {name: settings.pop(name) for name in ("rounds", "step_seconds")}
    with path.open("a", buffering=1) as file:
        say = lambda row: file.write(json.dumps({"time": time.time(), **row}) + "\n")  # noqa: E731
        link = GroupLink(membership(DilocoConfig(**settings)))
        say({"started": True})
        do_rounds(link, say, **options)
        say({"finished": True})
        link.close()


if __name__ == "__main__":
    main()
