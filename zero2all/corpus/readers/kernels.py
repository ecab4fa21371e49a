"""The two scans that need every byte: where the elements of a JSON array lie, and where the rows of a CSV file end.

Compiled by numba (about 2 s once a machine, then kept on disk). Both carry their state from chunk to chunk in a small
array, so a file of any size is scanned in constant memory.
"""

# ruff: noqa: SIM109, SIM300 - plain comparisons compile fastest

from __future__ import annotations

import numpy as np
from numba import njit, types

MAX_DEPTH = 1024
"""Brackets within brackets; orjson refuses more too."""

# What the JSON scan expects next.
VALUE, VALUE_OR_END, KEY, KEY_OR_END, COLON, COMMA_OR_END, STRING, KEY_STRING, SCALAR = range(9)
# Why it came back.
MORE, FULL, END, ERROR = range(4)
# Its state.
EXPECT, DEPTH, ESCAPE, START, STATUS = range(5)

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OBJECT, _ARRAY = 0, 1


@njit(
    types.UniTuple(types.int64, 2)(
        _BYTES, types.int64, types.int64, types.int64[::1], types.uint8[::1], types.int64[:, ::1]
    ),
    cache=True,
    nogil=True,
)
def scan_elements(data, position, base, state, stack, out):  # type: ignore[no-untyped-def]
    """Go through a chunk of a JSON array from `position`; the array's own bracket lies before it.

    Writes (start, end) of each element that ends, plus `base`, to `out`. Returns (position reached, elements written);
    state[STATUS] says why it stopped: chunk used up, `out` full, end of the array, or a byte that cannot stand there.
    Missing and doubled commas between elements are let pass: nothing is lost by them.
    """
    size = data.shape[0]
    expect, depth, escape, start = state[0], state[1], state[2], state[3]
    status = MORE
    count = 0
    i = position
    while i < size:
        c = data[i]
        ended = False
        if expect == STRING or expect == KEY_STRING:
            if escape:
                escape = 0
                i += 1
                continue
            while c != 34 and c != 92:
                i += 1
                if i == size:
                    break
                c = data[i]
            if i == size:
                break
            i += 1
            if c == 92:
                escape = 1
                continue
            if expect == KEY_STRING:
                expect = COLON
                continue
            expect = COMMA_OR_END
            ended = True
        elif expect == SCALAR:
            if c == 44 or c == 93 or c == 125 or c == 32 or c == 10 or c == 13 or c == 9:
                expect = COMMA_OR_END
                ended = True
            elif c == 34 or c == 123 or c == 91 or c == 58:
                status = ERROR
                break
            else:
                i += 1
                continue
        elif c == 32 or c == 10 or c == 13 or c == 9:
            i += 1
            continue
        elif expect == COLON:
            if c != 58:
                status = ERROR
                break
            expect = VALUE
            i += 1
            continue
        elif expect == KEY or expect == KEY_OR_END:
            if c == 34:
                expect = KEY_STRING
                i += 1
                continue
            if c != 125 or expect == KEY:
                status = ERROR
                break
            depth -= 1
            expect = COMMA_OR_END
            ended = True
            i += 1
        elif expect == COMMA_OR_END and depth > 0:
            if c == 44:
                expect = KEY if stack[depth - 1] == _OBJECT else VALUE
                i += 1
                continue
            if (c == 93 and stack[depth - 1] == _ARRAY) or (c == 125 and stack[depth - 1] == _OBJECT):
                depth -= 1
                ended = True
                i += 1
            else:
                status = ERROR
                break
        else:  # a value; between elements also a comma or the end
            if depth == 0:
                if c == 44:
                    i += 1
                    continue
                if c == 93:
                    status = END
                    i += 1
                    break
                start = base + i
            if c == 34:
                expect = STRING
                i += 1
                continue
            if c == 123 or c == 91:
                if depth == stack.shape[0]:
                    status = ERROR
                    break
                stack[depth] = _OBJECT if c == 123 else _ARRAY
                depth += 1
                expect = KEY_OR_END if c == 123 else VALUE_OR_END
                i += 1
                continue
            if c == 93 and expect == VALUE_OR_END:
                depth -= 1
                expect = COMMA_OR_END
                ended = True
                i += 1
            elif c == 45 or (48 <= c and c <= 57) or (65 <= c and c <= 90) or (97 <= c and c <= 122):
                expect = SCALAR
                i += 1
                continue
            else:
                status = ERROR
                break
        if ended and depth == 0:
            out[count, 0] = start
            out[count, 1] = base + i
            count += 1
            if count == out.shape[0]:
                status = FULL
                break
    state[0], state[1], state[2], state[3], state[4] = expect, depth, escape, start, status
    return i, count


# What the CSV scan is in.
FIELD_START, UNQUOTED, QUOTED, QUOTE_IN_QUOTED = range(4)


@njit(
    types.UniTuple(types.int64, 2)(
        _BYTES, types.int64, types.int64, types.int64, types.int64, types.int64[::1], types.int64[::1]
    ),
    cache=True,
    nogil=True,
)
def scan_rows(data, position, base, delimiter, limit, state, out):  # type: ignore[no-untyped-def]
    """Go through a chunk of a CSV file from `position`, as the csv module does.

    Writes where each row ends, plus `base`, to `out`. Returns (position reached, rows written): less than the size of
    the chunk when `out` is full. state: where in a field, start of the row in progress. A row above `limit` ends at the
    next line end, quoted or not, so that a quote that is never closed costs one row.
    """
    where, row_start = state[0], state[1]
    size = data.shape[0]
    count = 0
    i = position
    while i < size:
        c = data[i]
        i += 1
        if c == 10:
            if where != QUOTED or base + i - row_start > limit:
                where = FIELD_START
                row_start = base + i
                out[count] = row_start
                count += 1
                if count == out.shape[0]:
                    break
        elif c == 34:
            if where == FIELD_START or where == QUOTE_IN_QUOTED:
                where = QUOTED
            elif where == QUOTED:
                where = QUOTE_IN_QUOTED
        elif where != QUOTED:
            where = FIELD_START if c == delimiter else UNQUOTED
    state[0], state[1] = where, row_start
    return i, count


def new_array_state(expect: int) -> np.ndarray:
    """A state for `scan_elements` outside of any element."""
    return np.array([expect, 0, 0, -1, MORE], dtype=np.int64)
