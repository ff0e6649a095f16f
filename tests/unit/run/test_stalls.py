"""How long a worker may hold the others up."""

from __future__ import annotations

import pytest

from pyps.core.membership import Membership
from pyps.run.stalls import Stalls


@pytest.fixture
def members() -> Membership:
    members = Membership(lease_seconds=1000.0, workers_max=9)
    for name in ("a", "b"):
        members.join(name, 1, now=0.0)
        members.pushed(name, 1, now=0.0)
    return members


def test_a_worker_that_is_waited_for_and_does_not_push_stalls(members):
    stalls = Stalls(stall_seconds=10.0)
    assert stalls.look(["b"], members, now=100.0) == []
    assert stalls.look(["b"], members, now=109.0) == []
    assert stalls.look(["b"], members, now=110.0) == ["b"]


def test_long_steps_of_its_own_hold_nobody_up(members):
    stalls = Stalls(stall_seconds=10.0)
    assert stalls.look([], members, now=500.0) == []
    assert stalls.look(["b"], members, now=500.0) == []


def test_a_push_or_a_pause_in_the_waiting_begins_the_time_anew(members):
    stalls = Stalls(stall_seconds=10.0)
    stalls.look(["a", "b"], members, now=100.0)
    members.taken("b", 1, now=105.0)
    stalls.look(["b"], members, now=106.0)
    assert stalls.look(["a", "b"], members, now=112.0) == []
    assert stalls.look(["a", "b"], members, now=115.0) == ["b"]


def test_only_workers_that_have_not_pushed_for_a_while_are_looked_at(members):
    stalls = Stalls(stall_seconds=10.0)
    members.taken("b", 1, now=99.5)
    assert stalls.idle(members.alive(), now=100.0) == {"a"}
    members.join("c", 1, now=50.0)
    assert stalls.idle(members.alive(), now=100.0) == {"a", "c"}


def test_a_gate_that_holds_nobody_up_for_a_while_is_timed_anew():
    stalls = Stalls(stall_seconds=10.0)
    assert not stalls.look_at_gate(holds=True, now=100.0)
    assert not stalls.look_at_gate(holds=True, now=109.0)
    assert not stalls.look_at_gate(holds=False, now=109.5)
    assert not stalls.look_at_gate(holds=True, now=110.0)
    assert not stalls.look_at_gate(holds=True, now=119.0)
    assert stalls.look_at_gate(holds=True, now=120.0)
