"""The learning rate has one owner."""

from __future__ import annotations

import pytest

from pyps.run.schedule_owner import ScheduleOwner
from pyps_wire.errors import ScheduleOwned


def test_the_first_worker_that_sends_a_rate_owns_the_schedule_until_it_goes():
    owner = ScheduleOwner()
    assert owner.claim("a", schedule="")
    assert not owner.claim("a", schedule="")
    with pytest.raises(ScheduleOwned, match=r"'b'.*'a' owns"):
        owner.claim("b", schedule="")
    assert not owner.release("b")
    assert owner.release("a")
    assert owner.claim("b", schedule="")
    assert owner.worker_id == "b"


def test_a_server_with_a_schedule_of_its_own_takes_no_rate():
    owner = ScheduleOwner()
    with pytest.raises(ScheduleOwned, match="step:every=5"):
        owner.claim("a", schedule="step:every=5")
    assert owner.worker_id == ""
