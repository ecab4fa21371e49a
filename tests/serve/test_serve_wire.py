"""Whatever stands in a body: it is read, or refused in words. Nothing else may happen."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.common.errors import UserError
from zero2all.infer.load import LoadedModel
from zero2all.infer.text import TextRequest
from zero2all.serve.wire import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    IGNORED,
    NEUTRAL,
    RefusedError,
    chat_call,
    completion_call,
)

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "assistant", "x"]), "content": JSON})
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 400), min_size=1, max_size=4),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
}


def bodies(names: Any) -> st.SearchStrategy[dict[str, Any]]:
    known = {name: USUAL.get(name, JSON) | JSON for name in (*names, *NEUTRAL, *IGNORED)}
    return st.lists(st.sampled_from(sorted(known)), max_size=5, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: known[name] for name in chosen}, optional={"strange": JSON})
    )


@settings(max_examples=60, deadline=None)
@given(body=JSON | bodies(COMPLETION_FIELDS))
def test_any_body_of_a_completion_is_read_or_refused(loaded: LoadedModel, body):
    read_or_refused(completion_call, body, loaded)


@settings(max_examples=60, deadline=None)
@given(body=JSON | bodies(CHAT_FIELDS))
def test_any_body_of_a_chat_is_read_or_refused(loaded: LoadedModel, body):
    read_or_refused(chat_call, body, loaded)


def read_or_refused(read: Any, body: Any, loaded: LoadedModel) -> None:
    with contextlib.suppress(RefusedError, UserError):
        call = read(body, loaded, 100)
        assert call.requests
        assert all(isinstance(request, TextRequest) for request in call.requests)
