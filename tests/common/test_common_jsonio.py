"""JSON with and without orjson, YAML from strangers: what is read, and what is refused before it is built."""

import contextlib
import json
import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero2all.common import jsonio
from zero2all.common.yamlio import DEEPEST, LARGEST_BYTES, MOST_VALUES, YamlError, YamlRefusedError, loads, read_yaml

VALUES = [
    {"id": 1, "文": "北京\n\t\"'\\", "list": [1, -2.5, 1e-8, True, None], "nested": {"empty": {}, "none": []}},
    "emoji 🙂 and \u2028",
    0.1,
    2**53,
]
NOT_FINITE = [float("nan"), {"a": [float("inf"), 1.0, (float("-inf"),)]}]


def test_without_orjson_the_standard_library_writes_and_reads_the_same_values(monkeypatch):
    ours = [jsonio.dumps_line(value) for value in [*VALUES, *NOT_FINITE]]
    monkeypatch.setattr(jsonio, "orjson", None)
    theirs = [jsonio.dumps_line(value) for value in [*VALUES, *NOT_FINITE]]
    assert [jsonio.loads(line) for line in theirs] == [jsonio.loads(line) for line in ours]
    assert theirs[1:] == ours[1:], "the first has 1e-8, which orjson does not write as 1e-08"


def test_values_come_back_from_a_line_and_a_pretty_file_not_escaped_and_what_json_has_not_becomes_null():
    for value in VALUES:
        line = jsonio.dumps_line(value)
        assert line.endswith(b"\n")
        assert (line.count(b"\n"), jsonio.loads(line), jsonio.loads(jsonio.dumps_pretty(value))) == (1, value, value)
    assert "北京" in jsonio.dumps_line(VALUES[0]).decode()
    assert "北京" in jsonio.dumps_pretty(VALUES[0]).decode()
    assert jsonio.dumps_line(NOT_FINITE) == b'[null,{"a":[null,1.0,[null]]}]\n'
    assert json.loads(jsonio.dumps_pretty(NOT_FINITE)) == [None, {"a": [None, 1.0, [None]]}]


@pytest.mark.parametrize("has_orjson", [True, False])
def test_damage_is_a_value_error(monkeypatch, has_orjson):
    if not has_orjson:
        monkeypatch.setattr(jsonio, "orjson", None)
    for damaged in (b"", b"{", b"[NaN]", b"Infinity", b"\xff", b'"a" b'):
        with pytest.raises(ValueError):  # noqa: PT011 - the libraries word it differently
            jsonio.loads(damaged)


def test_what_would_be_misread_in_silence_is_refused_in_files_that_decide():
    for text, words in (
        ('{"a": 1, "b": 2, "a": 3}', "'a' is listed twice"),
        ('{"files": {"x": {"bytes": 1, "bytes": 2}}}', "'bytes' is listed twice"),
        ('{"a": 1e999}', "too large"),
        (f'{{"a": {"9" * 5000}}}', "5,000 digits"),
        ("[" * 100_000, "nested deeper"),
        ('{"a": NaN}', "NaN"),
        (r'{"a": "\ud800"}', "surrogate"),
        (b"\xff\xfe{\x00}\x00", "utf-8"),
    ):
        with pytest.raises(ValueError, match=words):
            jsonio.loads_strict(text if isinstance(text, bytes) else text.encode())


def test_ordinary_values_are_read_the_same_by_both_readers():
    text = r'{"名": ["\u4e2d\ud83d\ude00", 1, -2.5e10, null, true, {"a": {}, "b": {}}], "n": 9007199254740993}'.encode()
    assert jsonio.loads_strict(text) == jsonio.loads(text)
    # What transformers writes for "no limit":
    assert jsonio.loads_strict(b'{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] > 1e29


def bomb(levels: int, link: str = "[{}]") -> str:
    """Lists of nine of the one before: 9^levels values in a line each."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} {link.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, levels)]
    return "\n".join(lines)


def test_what_stands_for_too_much_is_refused_at_once():
    for text, words in (
        (bomb(40), f"more than {MOST_VALUES:,} values"),
        ("a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 30)), "values"),
        ("[" * 100_000, "nested deeper"),
        ("\n".join("  " * n + "a:" for n in range(200)), "nested deeper"),
        ("a: &a {b: {c: *a}}", "refers to itself"),
        ("a: 1\nb: 2\na: 3", "line 3: `a` is listed twice"),
        ("x" * (LARGEST_BYTES + 1), "characters"),
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(YamlRefusedError, match=words):
            loads(text)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "took more than 200 MB"


def test_what_is_no_plain_yaml_is_an_error_of_one_kind():
    endless = f"a: {'9' * 5000}"
    for text in ("a: [", "a: *no", "a: 2024-13-45", endless, "a: !!python/object:os.system x", "? {a: b}\n: c"):
        with pytest.raises(YamlError):
            loads(text)


def test_aliases_merges_and_depth_of_an_honest_file_are_read():
    text = "base: &base {lr: 1, name: x}\none:\n  <<: *base\n  lr: 2\ntwo: *base\nlist: &l [1, 2]\nsame: [*l, *l]"
    base = {"lr": 1, "name": "x"}
    assert loads(text) == {"base": base, "one": {**base, "lr": 2}, "two": base, "list": [1, 2], "same": [[1, 2]] * 2}
    depth = DEEPEST - 1
    assert str(loads("{a: " * depth + "1" + "}" * depth)).count("{") == depth
    assert len(loads("\n".join(f"source{n}: {{path: raw/{n}, channel: en}}" for n in range(3000)))) == 3000


@given(st.text(alphabet="ab01:-[]{}&*#|>!%'\"\n ?,<~.", max_size=40))
def test_any_text_is_a_value_or_a_yaml_error(text):
    with contextlib.suppress(YamlError):
        loads(text)


def test_the_place_of_an_error_names_the_file_if_there_is_one_and_a_fifo_is_not_waited_for(tmp_path):
    path = tmp_path / "plan.yaml"
    for text, place in (("a: [", r"line \d, column"), ("a: \0", "position 3")):
        path.write_text(text)
        with pytest.raises(YamlError, match=f'in "{path}", {place}'):
            read_yaml(path)
        with pytest.raises(YamlError, match=f"\n *{place}") as caught:
            loads(text)
        assert "unicode string" not in str(caught.value)
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(OSError, match="not a regular file"):
        read_yaml(tmp_path / "config.yaml")
