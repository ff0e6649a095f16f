"""How long a worker may hold the others up, whether the server itself stood still, and what people are told."""

from __future__ import annotations

import pytest

from pyps.core.membership import Membership
from pyps.run.events import EVENTS_MAX, Events
from pyps.run.stalls import Stalls
from pyps.run.standstill import Standstill
from pyps.run.waits import Wait, Waits


@pytest.fixture
def members() -> Membership:
    members = Membership(lease_seconds=1000.0, workers_max=9)
    for name in ("a", "b"):
        members.join(name, 1, now=0.0)
        members.pushed(name, 1, now=0.0)
    return members


def test_a_worker_that_is_waited_for_and_does_not_push_stalls_and_long_steps_of_its_own_hold_nobody_up(members):
    stalls = Stalls(stall_seconds=10.0)
    assert stalls.look([], members, now=500.0) == []
    assert stalls.look(["b"], members, now=500.0) == []
    assert stalls.look(["b"], members, now=509.0) == []
    assert stalls.look(["b"], members, now=510.0) == ["b"]


def test_a_push_or_a_pause_in_the_waiting_begins_the_time_anew(members):
    stalls = Stalls(stall_seconds=10.0)
    stalls.look(["a", "b"], members, now=100.0)
    members.taken("b", 1, now=105.0)
    stalls.look(["b"], members, now=106.0)
    assert stalls.look(["a", "b"], members, now=112.0) == []
    assert stalls.look(["a", "b"], members, now=115.0) == ["b"]


def test_a_gate_that_holds_nobody_up_for_a_while_is_timed_anew():
    stalls = Stalls(stall_seconds=10.0)
    assert not stalls.look_at_gate(holds=True, now=100.0)
    assert not stalls.look_at_gate(holds=True, now=109.0)
    assert not stalls.look_at_gate(holds=False, now=109.5)
    assert not stalls.look_at_gate(holds=True, now=110.0)
    assert not stalls.look_at_gate(holds=True, now=119.0)
    assert stalls.look_at_gate(holds=True, now=120.0)


def test_only_a_look_that_comes_much_too_late_tells_of_a_standstill() -> None:
    now = [100.0]
    standstill = Standstill(0.2, clock=lambda: now[0])
    told = []
    for later in (0.2, 0.01, 1.1, 36.2, 0.2):
        now[0] += later
        told.append(standstill.look())
    assert told == [0.0, 0.0, 0.0, pytest.approx(36.0), 0.0]


def test_an_event_says_what_happened_with_its_facts_in_words():
    events = Events(lambda: 5.0)
    events.add("left", "worker left", worker="b", state="finished", message="")
    [event] = events
    assert (event.number, event.time, event.kind) == (1, 5.0, "left")
    assert event.message == "worker left: worker b, state finished"


def test_events_are_numbered_and_the_oldest_are_forgotten():
    events = Events(lambda: 0.0)
    for index in range(EVENTS_MAX + 5):
        events.add("tick", f"{index}")
    assert [event.message for event in events.since(EVENTS_MAX + 3)] == [f"{EVENTS_MAX + 3}", f"{EVENTS_MAX + 4}"]
    assert next(iter(events)).number == 6


def test_waits_tell_who_waits_for_whom_and_count_equal_ones():
    waits, woken = Waits(), []
    for_b = Wait("a", lambda: "a waits for b", lambda: ("b",), lambda: woken.append("a"))
    for_c = Wait("a", lambda: "a waits for c", lambda: ("c",), lambda: woken.append("a"))
    observer = Wait("", lambda: "an observer waits", lambda: ("b",), lambda: woken.append("eye"))
    with waits.waiting(for_b), waits.waiting(for_c), waits.waiting(observer), waits.waiting(observer):
        assert waits.descriptions() == ["a waits for b", "a waits for c", "an observer waits (2 calls)"]
        assert waits.waits_for() == {"a": ("b", "c")}
        waits.wake_all()
    assert woken == ["a", "a", "eye", "eye"]
    assert waits.descriptions() == []
