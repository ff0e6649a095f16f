"""Noticing by a clock that the server itself did nothing for a while."""

from __future__ import annotations

import pytest

from pyps.run.standstill import Standstill


def test_only_a_look_that_comes_much_too_late_tells_of_a_standstill() -> None:
    now = [100.0]
    standstill = Standstill(0.2, clock=lambda: now[0])
    told = []
    for later in (0.2, 0.01, 1.1, 36.2, 0.2):
        now[0] += later
        told.append(standstill.look())
    assert told == [0.0, 0.0, 0.0, pytest.approx(36.0), 0.0]
