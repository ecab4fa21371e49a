"""What ranks tell each other, in real processes: exact values, and nothing taken from a rank that breaks the rules."""

import errno
import json
import math
import random
import sys
import textwrap

import pytest

from tests.hostile import COUNTS, SEED, hostile_bytes
from tests.processes import Program
from zero2all.common import errors, peers
from zero2all.common.errors import BadInputError, DiskError, UserError, error_from, error_values
from zero2all.common.peers import LARGEST_BYTES, Peers
from zero2all.packed.shard_format import DamagedShardError

START = """
import json, pickle, sys
import torch, torch.distributed as dist
from zero2all.common import peers
from zero2all.common.errors import DiskError, UserError
from zero2all.parallel.world import World
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
world = World(rank, 3, control=dist.group.WORLD)
def said_by(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'of_all_ranks', None)}: {error}"
"""


@pytest.fixture
def three(warm, tmp_path):
    """Run code in three ranks; `found` of each, as JSON."""

    def run(code):
        whole = f"{START}{textwrap.dedent(code)}\nprint('found', json.dumps(found))"
        words = [[str(rank), str(tmp_path / "store")] for rank in range(3)]
        programs = [Program(warm, whole, each, tmp_path / f"{each[0]}.txt") for each in words]
        for program in programs:
            assert program.wait() == 0, program.text()
        lines = [program.text().splitlines()[-1].removeprefix("found ") for program in programs]
        return [json.loads(line) for line in lines]

    return run


VALUES = [None, True, -0.0, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1 << 90, "北京 \udc80", {"a": [[], {}, ""]}]


def test_values_come_back_exactly_from_every_rank(three):
    found = three(f"""
        own = [rank, {VALUES!r}, (1, (2,)), [float("nan"), float("inf"), float("-inf")]] if rank != 1 else "x" * 70000
        found = [world.gather(own), world.broadcast(own), world.run_on_rank0(lambda: own)]
    """)
    assert json.dumps(found[1]) == json.dumps(found[2]) == json.dumps(found[0])
    (first, second, third), sent, ran = found[0]
    assert ([first[0], third[0], second], first[1:3]) == ([0, 2, "x" * 70000], [VALUES, [1, [2]]])
    assert str(first[1][2]) == "-0.0"
    assert math.isnan(first[3][0])
    assert first[3][1:] == [math.inf, -math.inf]
    assert str(sent) == str(ran) == str(first)


def test_an_error_is_raised_by_all_ranks_with_its_class_and_text_and_one_that_is_unknown_as_a_text(three):
    found = three("""
        class OddError(DiskError):
            pass

        def fail(error):
            raise error

        errors = [OddError("full"), FileNotFoundError(2, "gone", "a/b"), KeyError("k")]

        def together():
            return fail(OddError("full")) if rank == 2 else 7

        found = [
            *(said_by(lambda: world.run_on_rank0(lambda: fail(error))) for error in errors),
            said_by(lambda: world.run_together(together)).partition(" on ")[0],
        ]
    """)
    gone = "FileNotFoundError None: [Errno 2] gone: 'a/b'"
    other = ["DiskError True: full", gone, "RuntimeError None: KeyError: 'k'", "DiskError True: Rank 2"]
    assert found[0] == ["OddError True: full", gone, "KeyError None: 'k'", "DiskError True: Rank 2"]
    assert (found[1], found[2][:3]) == (other, other[:3])
    assert found[2][3].startswith("OddError")


def test_a_rank_that_announces_too_much_is_named_before_anything_is_allocated(three):
    found = three("""
        import resource

        def announce(length):  # as an outsider in the place of rank 1
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
            dist.all_gather(lengths, torch.tensor([length]))

        tried = (-1, peers.LARGEST_BYTES + 1)
        found = [said_by(lambda: announce(each) if rank == 1 else world.gather("small")) for each in tried]
        found.append(said_by(lambda: world.gather("x" * peers.LARGEST_BYTES if rank == 1 else "")))

        def too_long():
            dist.broadcast(torch.tensor([1 << 40]), 0)

        found.append(said_by(lambda: too_long() if rank == 0 else world.broadcast(None)))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    """)
    said = "BadInputError True: Rank {} announced a value of {:,} bytes; ranks send each other at most"
    for of_rank in (found[0], found[2]):
        assert of_rank[0].startswith(said.format(1, -1))
        assert of_rank[1].startswith(said.format(1, LARGEST_BYTES + 1))
    assert all(of_rank[2].startswith("BadInputError True: Rank 1 announced") for of_rank in found), "its own rank too"
    assert all(of_rank[3].startswith(said.format(0, 1 << 40)) for of_rank in found[1:])
    assert max(of_rank[4] for of_rank in found) < 2000, "MB"


def test_a_pickle_from_another_rank_is_refused_and_its_code_does_not_run(three, tmp_path):
    found = three(f"""
        import os

        class Malice:
            def __reduce__(self):
                return os.mkdir, ({str(tmp_path / "trap")!r},)

        if rank == 1:
            peers._bytes = lambda _value: bytearray(pickle.dumps(Malice()))
        found = said_by(lambda: world.gather(1))
    """)
    assert all(text.startswith("BadInputError True: What rank 1 sent cannot be read as JSON") for text in found)
    assert not (tmp_path / "trap").exists()


def test_a_process_alone_sees_its_values_as_the_others_would():
    assert (Peers().gather((1, (2,))), Peers().broadcast({"a": (1,)})) == ([[1, [2]]], {"a": [1]})
    for value in ({1: 2}, [{"a": {None: 1}}], {1, 2}, b"bytes", DiskError("x")):
        with pytest.raises(TypeError):
            Peers().gather(value)


def test_an_error_keeps_the_nearest_class_that_is_known_and_none_is_imported_because_another_names_it():
    for error, kind, text in (
        (errors.LostRunError("taken"), errors.LostRunError, "taken"),
        (DamagedShardError("a file"), DamagedShardError.__base__, "a file"),
        (PermissionError(errno.EACCES, "no", "f"), PermissionError, "[Errno 13] no: 'f'"),
        (OSError("10 requested and 4 written"), OSError, "10 requested and 4 written"),
        (ValueError("odd"), RuntimeError, "ValueError: odd"),
    ):
        found = error_from(json.loads(json.dumps(error_values(error))))
        assert type(found) is kind
        assert str(found) == text
        assert not isinstance(error, UserError) or found.exit_code == error.exit_code
    for error in (OSError(errno.ENOSPC, "No space left on device"), ValueError("io error (os error 28)")):
        assert errors.is_disk_full(error_from(error_values(error)))
    assert errors.is_out_of_memory(error_from(error_values(MemoryError())))
    sys.modules.pop("antigravity", None)
    assert type(error_from(["antigravity.Error", "x"])) is RuntimeError
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("count", COUNTS)
def test_hostile_bytes_are_a_value_or_an_error_that_names_the_rank(count):
    rng = random.Random(SEED)
    good = bytes(peers._bytes({"steps": [1, 2.5, float("nan")], "text": "二", "none": None}))
    refused = []
    for _ in range(count):
        try:
            peers._value(hostile_bytes(rng, good), 3)
        except BadInputError as error:
            refused.append(str(error))
    assert 0 < len(refused) < count
    assert all("rank 3" in text for text in refused)
