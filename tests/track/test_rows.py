"""What the lines of a metrics file give: every number to the last bit, and damage costs one line only."""

from __future__ import annotations

import json
import math
import random

import pytest

from zero2all.common import jsonio
from zero2all.track import rows
from zero2all.track.columns import MetricNames, ParsedRows


def parsed(lines: list[bytes]) -> ParsedRows:
    return rows.parse(b"".join(line + b"\n" for line in lines), MetricNames())


def row(step: int, values: dict, time: float = 1.5, tokens: int = 7) -> bytes:
    return jsonio.dumps_line({"step": step, "time": time, "tokens": tokens, "values": values})[:-1]


def test_every_double_comes_back_to_the_last_bit():
    rng = random.Random(0)
    numbers = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-320, 300) for _ in range(3000)]
    numbers += [0.0, -0.0, 5e-324, 1.7976931348623157e308, 1e22, 1e23, 2**53 + 1, -7]
    lines = [row(step, {"a": number, "b/c": -number}, time=abs(number)) for step, number in enumerate(numbers)]
    block = parsed(lines)
    assert block.metrics["a"][1].tolist() == [float(number) for number in numbers]


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "text", "1.5", None, True, False, [1], {"x": 1}, [], {}, [1, 2], 2**63, 2**64 - 1],
)
@pytest.mark.parametrize("every", [1, 7])
def test_values_that_are_no_plain_numbers_are_treated_the_same_way(value, every):
    lines = [row(step, {"loss": 1.25, "odd": value if step % every == 0 else 2.5}) for step in range(100)]
    block = parsed(lines)
    assert len(block.step) == 100
    is_number = value in ("NaN", "Infinity", "-Infinity") or type(value) is int
    odd = len(range(0, 100, every))
    assert block.skipped_values == (0 if is_number else odd)
    assert len(block.metrics["odd"][1] if "odd" in block.metrics else ()) == 100 - block.skipped_values


@pytest.mark.parametrize("rows_before", [3, 60])
def test_a_row_with_a_negative_step_is_left_out(rows_before):
    """It would count as the newest."""
    lines = [*(row(step, {"loss": 1.0}) for step in range(rows_before)), row(-1, {"loss": 9.0})]
    assert parsed(lines).step.tolist() == [*range(rows_before)]


DAMAGE = [
    b"",
    b"   ",
    b"\x00\xff\xfe",
    b"[" * 100_000,
    b'{"step":1.5,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}}',
    b'{"step":"1","time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}}',
    b'{"step":1,"time":"NaN","tokens":7,"values":{"a":1.0,"b":2.0}}',
    b'{"step":1,"time":1.5,"tokens":null,"values":{"a":1.0,"b":2.0}}',
    b'{"step":1,"time":1.5,"tokens":true,"values":{"a":1.0,"b":2.0}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":1 2}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":01,"b":2.0}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}} }}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0,"kind":"x"}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1e999,"b":2.0}}',
    b'{"step":99999999999999999999999,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}}',
    b'{"step":9223372036854775808,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}}',
    b'{"step": 1, "time": 1.5, "tokens": 7, "values": {"a": 1.0, "b": 2.0}}',
    b'{"time":1.5,"step":1,"tokens":7,"values":{"a":1.0,"b":2.0}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{}}',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":2.0}}\r',
    b'{"step":1,"time":1.5,"tokens":7,"values":{"a":1.0,"b":"]"}}',
    b'{"step":1,"time":1.5,"kind":"x","data":{"a":1.0,"b":2.0}}',
]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize("place", [0, 30, 59])
def test_one_damaged_line_costs_only_itself(damage, place):
    lines = [row(step, {"a": step / 7, "b": 2.0}) for step in range(60)]
    lines[place] = damage
    block = parsed(lines)
    good = [step / 7 for step in range(60) if step != place]
    assert set(good) <= set(block.metrics["a"][1].tolist())


def test_random_damage_never_raises_and_never_changes_another_line():
    rng = random.Random(7)
    whole = [row(step, {"a": step / 7, "b": 2.0}) for step in range(80)]
    for _ in range(60):
        text = bytearray(b"\n".join(whole))
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(text))
            text[place] = rng.choice(b'0123456789,:"{}[]eE.-+ \\natn\n\xff')
        lines = bytes(text).split(b"\n")
        untouched = {int(json.loads(line)["step"]) for line in lines if line in whole}
        assert untouched <= set(parsed(lines).step.tolist())


def test_a_million_names_are_counted_and_not_kept():
    names = MetricNames(limit=100)
    lines = [row(step, {f"metric {step}/{number}": 1.0 for number in range(50)}) for step in range(200)]
    block = rows.parse(b"\n".join(lines) + b"\n", names)
    assert len(block.metrics) == 100
    assert names.left_out_values == 200 * 50 - 100


def test_rows_of_json_without_orjson_are_read_too(monkeypatch):
    monkeypatch.setattr(jsonio, "orjson", None)
    lines = [json.dumps({"step": n, "time": 1.5, "tokens": 1, "values": {"a": n / 3}}).encode() for n in range(50)]
    parsed(lines)
    compact = [line.replace(b" ", b"") for line in lines]
    assert parsed(compact).metrics["a"][1].tolist() == [n / 3 for n in range(50)]
    assert math.isclose(parsed(compact).time[0], 1.5)
