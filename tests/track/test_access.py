"""Where a server of ours listens, and whom its gate lets through."""

from __future__ import annotations

import pytest

from zero2all.common.errors import UsageError
from zero2all.track.access import listen


def test_an_address_that_this_machine_does_not_have_is_named_as_the_mistake():
    with pytest.raises(UsageError, match=r"`--host 192\.0\.2\.1` is no address of this machine") as refusal:
        listen("192.0.2.1", 0, 6107)
    assert "--port" not in str(refusal.value)
