import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus.dedup import dedup_helpers as helpers
from tests.corpus.dedup.dedup_helpers import InOrder, changed, clusters, dropped, en_text, make_units, outcome, zh_text
from zero2all.common.errors import BadInputError, UsageError
from zero2all.corpus.dedup.cluster import EXACT_DUPLICATE, KEEP, NEAR_DUPLICATE, find_duplicates
from zero2all.corpus.dedup.config import DedupConfig


def drops(units: list[list[str]], tmp_path: Path, channel: str = "zh", **settings: Any) -> list[list[int]]:
    folders = make_units(tmp_path / "units", units, channel, **settings)
    return outcome(find_duplicates(folders, tmp_path / "work", DedupConfig(**settings)))[0]


def test_of_exact_duplicates_across_units_the_longest_stays_or_the_first(tmp_path: Path) -> None:
    rng = random.Random(1)
    a, b, c = (zh_text(rng) for _ in range(3))
    assert drops([[a, b], [b, a, c], [c]], tmp_path / "first", near="off") == [[0, 0], [1, 1, 0], [1]]
    assert drops([["ab cd", "ab  cd"], ["ab\n\ncd ."]], tmp_path / "longest", "en", near="off") == [[1, 0], [0]]
    assert drops([["天地玄黄", "天地玄黄"]], tmp_path / "off", exact=False, near="off") == [[0, 0]]
    assert find_duplicates([], tmp_path / "none", DedupConfig()).first_ids == (0,)
    result = find_duplicates(make_units(tmp_path / "units", [[], []]), tmp_path / "work", DedupConfig())
    assert (outcome(result)[0], clusters(result)) == ([[], []], {})


def test_of_near_duplicates_the_longest_stays_and_the_cluster_is_recorded(tmp_path: Path) -> None:
    rng = random.Random(2)
    text, other = zh_text(rng), zh_text(rng)
    longest = changed(text, 0.04, rng) + "天地"
    folders = make_units(tmp_path / "units", [[text, other], [changed(text, 0.04, rng), longest, text + " "]])
    result = find_duplicates(folders, tmp_path / "work", DedupConfig())
    assert outcome(result)[0] == [[EXACT_DUPLICATE, KEEP], [NEAR_DUPLICATE, KEEP, NEAR_DUPLICATE]]
    ((kept, members),) = clusters(result).items()
    assert kept == 3
    assert [(document, reason) for document, reason, _ in members] == [(0, 1), (2, 2), (4, 2)]
    assert all(0.75 < similarity < 1 for *_, similarity in members)
    assert result.first_ids == (0, 2, 5)


def test_a_chain_of_small_changes_is_not_swallowed_whole(tmp_path: Path) -> None:
    rng = random.Random(3)
    steps = [zh_text(rng, 1000)]
    for step in range(9):  # each differs from the one before by a fresh tenth: 0.82, then 0.67, ...
        at = step * 100
        steps.append(steps[-1][:at] + zh_text(rng, 100)[:100] + steps[-1][at + 100 :])
    result = find_duplicates(make_units(tmp_path / "units", [steps]), tmp_path / "work", DedupConfig())
    assert 4 <= len([at for at, drop in enumerate(result.drops(0)) if drop == KEEP]) <= 6
    for kept_one, members in clusters(result).items():
        assert all(abs(document - kept_one) <= 1 for document, *_ in members)


@pytest.mark.parametrize("channel", ["zh", "en", "code"])
def test_unrelated_short_and_empty_documents(channel: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    texts = ["", "", "天", "a", "天地", "a b", "- -", "* *", *(zh_text(rng, n) for n in range(1, 40))]
    texts += [en_text(rng, words) for words in range(1, 40)]
    expected = [int(text in texts[:at]) for at, text in enumerate(texts)]
    assert drops([texts[:20], [], texts[20:]], tmp_path, channel) == [expected[:20], [], expected[20:]]


def test_large_families_leave_one_each(tmp_path: Path) -> None:
    """Buckets above the size that is compared pair by pair."""
    rng = random.Random(6)
    families = [zh_text(rng, 300) for _ in range(3)]
    texts = [changed(families[n % 3], 0.03, rng) for n in range(450)]
    folders = make_units(tmp_path / "units", [texts[:200], texts[200:]])
    result = find_duplicates(folders, tmp_path / "work", DedupConfig())
    dropped = np.concatenate([result.drops(0), result.drops(1)])
    assert sorted([n % 3 for n in np.flatnonzero(dropped == KEEP)]) == [0, 1, 2]
    for members in clusters(result).values():
        assert len({document % 3 for document, *_ in members}) == 1


def test_outcome_does_not_depend_on_parts_workers_or_order(tmp_path: Path) -> None:
    folders = helpers.random_units(tmp_path / "units", 4000, units=3, copies=0.5)
    reference = outcome(find_duplicates(folders, tmp_path / "reference", DedupConfig()))
    assert {0, 1, 2} == {value for unit in reference[0] for value in unit}
    few = InOrder()
    assert outcome(find_duplicates(folders, tmp_path / "a", DedupConfig(), 1 << 20, few)) == reference
    assert few.tasks >= 7
    backwards = InOrder(lambda positions: positions[::-1])
    assert outcome(find_duplicates(folders, tmp_path / "b", DedupConfig(), 3 << 20, backwards)) == reference
    killed, rng = 0, random.Random(9)  # and a search that was killed and run again finds the same
    for task in (1, 3, 5, 7, 9, 11, 13):
        child = os.fork()
        if child == 0:
            find_duplicates(folders, tmp_path / "work", DedupConfig(), 1 << 20, KilledAt(task, rng.uniform(0, 0.02)))
            os._exit(0)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    again = find_duplicates(folders, tmp_path / "work", DedupConfig(), 1 << 20)
    assert killed >= 3
    assert outcome(again) == reference
    assert not list((tmp_path / "work").glob("steps*"))
    assert not list((tmp_path / "work").glob("*partial*"))


def test_outcome_does_not_depend_on_how_records_are_cut_into_units(tmp_path: Path) -> None:
    rng = random.Random(8)
    bases = [zh_text(rng, 200) for _ in range(40)]
    texts = [changed(rng.choice(bases), 0.03, rng) if rng.random() < 0.5 else rng.choice(bases) for _ in range(200)]
    whole = outcome(find_duplicates(make_units(tmp_path / "one", [texts]), tmp_path / "a", DedupConfig()))
    units = make_units(tmp_path / "many", [texts[:1], texts[1:120], [], texts[120:]])
    cut = outcome(find_duplicates(units, tmp_path / "b", DedupConfig()))
    assert (list(chain.from_iterable(cut[0])), cut[1]) == (whole[0][0], whole[1])


class KilledAt(InOrder):
    """Kills its process, as kill -9 does, some time after a task has begun."""

    def __init__(self, task: int, seconds: float) -> None:
        super().__init__()
        self.kill_at, self.seconds = task, seconds

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for position, task in enumerate(tasks):
            self.tasks += 1
            if self.tasks == self.kill_at:
                threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            yield position, function(task)


def test_a_finished_search_is_not_done_again_but_other_input_is(tmp_path: Path) -> None:
    folders = make_units(tmp_path / "units", [["天地玄黄宇宙洪荒", "天地玄黄宇宙洪荒"]])
    find_duplicates(folders, tmp_path / "work", DedupConfig())
    tasks = InOrder()
    assert dropped(find_duplicates(folders, tmp_path / "work", DedupConfig(), engine=tasks), EXACT_DUPLICATE) == 1
    assert tasks.tasks == 0
    assert dropped(find_duplicates(folders, tmp_path / "work", DedupConfig(exact=False)), EXACT_DUPLICATE) == 0
    more = [*folders, *make_units(tmp_path / "more", [["天地玄黄宇宙洪荒"]])]
    assert dropped(find_duplicates(more, tmp_path / "work", DedupConfig()), EXACT_DUPLICATE) == 2
    bare = make_units(tmp_path / "bare", [["天地玄黄"]], near="off")
    with pytest.raises(BadInputError, match=r"signatures\.bin is missing"):
        find_duplicates(bare, tmp_path / "other", DedupConfig())
    with pytest.raises(UsageError, match="bands x rows is 100 x 6"):
        find_duplicates(bare, tmp_path / "other", DedupConfig(bands=100))


PEAK = """
import sys
from itertools import chain
from pathlib import Path
from zero2all.corpus.dedup.cluster import find_duplicates
from zero2all.corpus.dedup.config import DedupConfig
units = sorted(Path(sys.argv[1]).glob("unit-*"))
result = find_duplicates(units, Path(sys.argv[1]) / "work", DedupConfig(), memory_bytes=8 << 20)
near = sum(int((result.drops(unit) == 2).sum()) for unit in range(len(units)))
assert near > 0.1 * result.first_ids[-1], result
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(line.split()[1]) * 1024)
"""


@pytest.mark.slow
def test_memory_is_at_most_40_bytes_a_document_beyond_a_constant(tmp_path: Path) -> None:
    peaks = {}
    for documents in (60_000, 360_000):
        folder = tmp_path / str(documents)
        helpers.random_units(folder, documents, units=6)
        command = [sys.executable, "-c", PEAK, str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        peaks[documents] = int(run.stdout)
    assert (peaks[360_000] - peaks[60_000]) / 300_000 <= 40, peaks
