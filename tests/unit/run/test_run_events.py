"""Events and waits: what people are told of a run."""

from __future__ import annotations

from pyps.run.events import EVENTS_MAX, Events
from pyps.run.waits import Wait, Waits


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
