"""YAML from strangers: small texts that stand for endless values are refused before they are built."""

from __future__ import annotations

import contextlib
import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero2all.common.yamlio import DEEPEST, LARGEST_BYTES, MOST_VALUES, YamlError, YamlRefusedError, loads, read_yaml


def bomb(levels: int, link: str = "[{}]") -> str:
    """Lists of nine of the one before: 9^levels values in a line each."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} {link.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb(12), f"more than {MOST_VALUES:,} values"),
        (bomb(40), f"more than {MOST_VALUES:,} values"),
        ("a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 30)), "values"),
        ("[" * 100_000, "nested deeper"),
        ("[" * 400 + "]" * 400, "nested deeper"),
        ("{a: " * 300 + "1" + "}" * 300, "nested deeper"),
        ("\n".join("  " * n + "a:" for n in range(200)), "nested deeper"),
        ("a: &a [1, *a]", "refers to itself"),
        ("a: &a {b: {c: *a}}", "refers to itself"),
        ("a: 1\nb: 2\na: 3", "line 3: `a` is listed twice"),
        ("x" * (LARGEST_BYTES + 1), "characters"),
    ],
    ids=range(11),
)
def test_what_stands_for_too_much_is_refused_at_once(text, words):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(YamlRefusedError, match=words):
        loads(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "took more than 200 MB"


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: *no",
        "a: 2024-13-45",
        f"a: {'9' * 5000}",
        "a: !!python/object:os.system x",
        "? {a: b}\n: c",
        "\0",
    ],
)
def test_what_is_no_plain_yaml_is_an_error_of_one_kind(text):
    with pytest.raises(YamlError):
        loads(text)


def test_aliases_merges_and_depth_of_an_honest_file_are_read():
    text = "base: &base {lr: 1, name: x}\none:\n  <<: *base\n  lr: 2\ntwo: *base\nlist: &l [1, 2]\nsame: [*l, *l]"
    base = {"lr": 1, "name": "x"}
    assert loads(text) == {"base": base, "one": {**base, "lr": 2}, "two": base, "list": [1, 2], "same": [[1, 2]] * 2}
    depth = DEEPEST - 1
    value = loads("{a: " * depth + "1" + "}" * depth)
    for _ in range(depth):
        value = value["a"]
    assert value == 1
    assert len(loads("\n".join(f"source{n}: {{path: raw/{n}, channel: en}}" for n in range(3000)))) == 3000


@given(st.text(alphabet="ab01:-[]{}&*#|>!%'\"\n ?,<~.", max_size=40))
def test_any_text_is_a_value_or_a_yaml_error(text):
    with contextlib.suppress(YamlError):
        loads(text)


def test_a_fifo_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(OSError, match="not a regular file"):
        read_yaml(tmp_path / "config.yaml")


def test_the_place_of_an_error_names_the_file_if_there_is_one(tmp_path):
    path = tmp_path / "plan.yaml"
    for text, place in (("a: [", r"line \d, column"), ("a: \0", "position 3")):
        path.write_text(text)
        with pytest.raises(YamlError, match=f'in "{path}", {place}'):
            read_yaml(path)
        with pytest.raises(YamlError, match=f"\n *{place}") as caught:
            loads(text)
        assert "unicode string" not in str(caught.value)
