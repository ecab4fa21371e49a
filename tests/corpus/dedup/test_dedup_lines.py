from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.lines import LineCounter, count_lines, frequent_lines, strip_lines, uses_lines

CONFIG = DedupConfig(lines=True, line_records=3)


def count_units(root: Path, units: list[list[str]], config: DedupConfig = CONFIG) -> list[Path]:
    folders = []
    for number, texts in enumerate(units):
        folders.append(root / str(number))
        folders[-1].mkdir()
        counter = LineCounter(config)
        for text in texts:
            counter.add([text])
        counter.write(folders[-1])
    return folders


def test_lines_of_many_records_are_removed_over_all_units(tmp_path: Path) -> None:
    units = [["菜单 首页\n正文甲", "正文乙\n 菜单 首页 "], ["菜单 首页\n正文丙\n\n尾", "没有"]]
    frequent = frequent_lines(count_units(tmp_path, units), CONFIG)
    assert len(frequent) == 1
    assert strip_lines(units[0] + units[1], frequent, CONFIG) == ["正文甲", "正文乙", "正文丙\n\n尾", "没有"]


def test_a_line_counts_once_a_record_and_short_lines_never(tmp_path: Path) -> None:
    units = [["重复的行\n重复的行\n重复的行", "重复的行\n短"], ["短", "短", "短", "短"]]
    folders = count_units(tmp_path, units)
    assert len(frequent_lines(folders, CONFIG)) == 0
    assert len(frequent_lines(folders, DedupConfig(lines=True, line_records=2))) == 1


def test_most_frequent_lines_come_first_and_memory_does_not_matter(tmp_path: Path) -> None:
    texts = ["\n".join(f"line number {n}" for n in range(upto)) for upto in range(1, 60)]
    folders = count_units(tmp_path, [texts[:30], texts[30:]])
    few = DedupConfig(lines=True, line_records=3, line_max_frequent=2)
    assert strip_lines([texts[4]], frequent_lines(folders, few), few) == ["line number 2\nline number 3\nline number 4"]
    whole = frequent_lines(folders, CONFIG)
    assert len(whole) == 57
    assert (frequent_lines(folders, CONFIG, memory_bytes=100) == whole).all()


def test_nothing_is_counted_for_code_or_without_the_option() -> None:
    assert uses_lines("zh", CONFIG)
    assert not uses_lines("code", CONFIG)
    assert not uses_lines("zh", DedupConfig())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab 天\n\t🙂", max_size=30), max_size=6))
def test_counting_and_stripping_follow_the_definition(texts: list[str]) -> None:
    config = DedupConfig(lines=True, line_min_chars=2)

    def key(line: str) -> str:
        return line.strip(" \t\r")

    expected: dict[str, int] = {}
    for text in texts:
        for line in {key(line) for line in text.split("\n")}:
            if len(line) >= 2:
                expected[line] = expected.get(line, 0) + 1
    counted = count_lines(texts, config)
    assert sorted(counted["records"]) == sorted(expected.values())
    frequent = np.sort(counted["hash"][counted["records"] >= 2])
    stripped = ["\n".join(x for x in text.split("\n") if expected.get(key(x), 0) < 2) for text in texts]
    assert strip_lines(texts, frequent, config) == stripped
