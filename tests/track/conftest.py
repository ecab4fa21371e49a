"""Runs of tests have time to write their last rows: on a busy machine half a second may pass with nothing amiss."""

import pytest

from zero2all.track import writer


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 20.0)
