"""Coordinators after each other: from its Attach on one is the only one, and the work goes on with it."""

from __future__ import annotations

import pytest

from pyps.work import Ended, NothingNow
from pyps_wire.errors import BadRequest, Superseded
from work_crews import begin, coordinated


def test_an_attached_coordinator_fences_off_the_one_before_it():
    queue = coordinated(4)
    queue.attach(1)
    queue.attach(2)
    with pytest.raises(Superseded, match="coordinator 1 was followed by coordinator 2"):
        begin(queue, 1, epoch=1)
    with pytest.raises(Superseded):
        queue.attach(1)
    begin(queue, 1, epoch=2)
    assert queue.pass_ == 1


def test_an_attached_coordinator_does_not_take_the_pass_of_another_for_its_own():
    queue = coordinated(4)
    begin(queue, 3, epoch=1)
    queue.attach(2)
    with pytest.raises(BadRequest, match="pass 3 has begun before; take a higher one"):
        begin(queue, 3, epoch=2)
    begin(queue, 4, epoch=2)
    # Once more is no other pass.
    held = queue.lease("a", 1, now=0.0)
    begin(queue, 4, epoch=2)
    assert queue.claim("a", 1, held.lease_id, now=1.0).granted


def test_an_attached_coordinator_lifts_the_end_of_the_work():
    told: list[str] = []
    queue = coordinated(4, tell=lambda kind, what, **facts: told.append(what))
    queue.attach(1)
    queue.end(coordinator_epoch=1, message="enough")
    queue.attach(1)
    assert queue.lease("a", 1, now=0.0) == Ended(0, "enough")
    queue.attach(2)
    assert not queue.progress(0.0).ended
    assert queue.lease("a", 1, now=0.0) == NothingNow(0)
    assert told[-1] == "work goes on: another coordinator came"


def test_a_coordinator_that_waits_is_woken_when_another_attaches():
    queue, woken = coordinated(4), []
    begin(queue, epoch=1)
    queue.await_pass(1, coordinator_epoch=1, now=0.0, wake=lambda: woken.append("former"))
    queue.attach(2)
    assert woken == ["former"]
