"""Virtual time: what comes first, and that a run is a function of its inputs."""

from __future__ import annotations

from pyps.simulation.scheduler import Scheduler


def test_actions_are_called_in_the_order_of_their_times() -> None:
    scheduler, called = Scheduler(), []
    for time in (3.0, 1.0, 2.0):
        scheduler.at(time, lambda time=time: called.append((time, scheduler.now)))  # type: ignore[misc]
    while scheduler.step():
        pass
    assert called == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_at_equal_times_the_worker_whose_name_is_first_goes_first_then_what_was_asked_first() -> None:
    scheduler, called = Scheduler(), []
    for worker_id, what in (("b", "b1"), ("a", "a1"), ("b", "b2"), ("a", "a2"), ("", "operator")):
        scheduler.at(1.0, lambda what=what: called.append(what), worker_id=worker_id)  # type: ignore[misc]
    while scheduler.step():
        pass
    assert called == ["operator", "a1", "a2", "b1", "b2"]


def test_what_is_asked_for_in_the_past_is_done_now() -> None:
    scheduler, called = Scheduler(), []
    scheduler.at(5.0, lambda: scheduler.at(1.0, lambda: called.append(scheduler.now)))
    while scheduler.step():
        pass
    assert called == [5.0]


def test_the_next_time_is_infinite_when_nothing_is_left() -> None:
    scheduler = Scheduler()
    scheduler.at(2.0, lambda: None)
    assert scheduler.next_time == 2.0
    assert scheduler.step()
    assert scheduler.next_time == float("inf")
    assert not scheduler.step()
