"""Pacing: who is woken, and what a question that is repeated means."""

from __future__ import annotations

import pytest

from pyps.core.pacing import TurnTaking
from pyps.run.pacing import Pacing
from shards import RunDriver


class Calls:
    """The waiting calls of workers, and how often each was woken."""

    def __init__(self, pacing: Pacing) -> None:
        self.pacing = pacing
        self.woken: list[str] = []
        self._wakes = {name: lambda name=name: self.woken.append(name) for name in "abcd"}

    def ask(self, name: str, clock: int = 0) -> bool:
        return self.pacing.may_proceed(name, clock=clock, wake=self._wakes[name])

    def end(self, name: str) -> None:
        self.pacing.forget(name, self._wakes[name])

    def cancel(self, name: str) -> None:
        self.pacing.forget(name, self._wakes[name], withdraw=True)


def test_only_the_worker_that_is_released_is_woken_and_a_question_repeated_is_one_question():
    calls = Calls(Pacing(TurnTaking()))
    assert [calls.ask(name) for name in "abc"] == [True, False, False]
    assert not calls.ask("b")
    assert calls.ask("a"), "the answer was lost; the turn is still its own"
    assert not calls.ask("a", clock=1)
    assert calls.woken == ["b"]
    assert calls.ask("b")


def test_a_call_that_ended_is_not_woken_and_its_grant_is_kept():
    calls = Calls(Pacing(TurnTaking()))
    calls.ask("a")
    calls.ask("b")
    calls.end("b")
    calls.pacing.depart("a")
    assert calls.woken == []
    assert not calls.ask("c")
    assert calls.ask("b")


def test_another_pacer_is_asked_by_all_that_wait_and_knows_who_computes():
    calls = Calls(Pacing(TurnTaking()))
    calls.ask("a")
    calls.ask("b")
    calls.pacing.replace(TurnTaking())
    assert calls.woken == ["b"]
    assert not calls.ask("b")
    assert calls.pacing.waited_for() == {"a"}
    calls.pacing.replace(None)
    assert calls.ask("b")


@pytest.mark.parametrize(
    ("protocol", "ahead"),
    [("async", 1), ("asgd", 1), ("softsync:n=1", 1), ("hardsync", 0), ("backup:b=1", 0), ("ssp:s=1", 0), ("serial", 0)],
)
def test_free_workers_begin_an_epoch_ahead_where_nobody_waits_for_anothers_steps(protocol, ahead):
    assert RunDriver("a", "b", protocol=protocol).run.epochs_ahead() == ahead


def test_a_worker_that_goes_without_asking_is_no_longer_expected():
    calls = Calls(Pacing(TurnTaking(quorum=2)))
    assert not calls.ask("a")
    assert calls.pacing.awaited(["a", "b"]) == ("b",)
    assert calls.pacing.awaited(["a"]) == ("1 more worker that has not joined",)
    calls.pacing.depart("b")
    assert calls.pacing.awaited(["a"]) == ()
    assert calls.woken == ["a"]
    assert calls.ask("a")


def test_a_call_that_was_granted_its_step_and_cancelled_before_its_answer_hands_the_step_on():
    calls = Calls(Pacing(TurnTaking()))
    assert [calls.ask(name) for name in "abc"] == [True, False, False]
    calls.pacing.depart("a")
    calls.cancel("b")
    assert calls.woken == ["b", "c"]
    assert calls.ask("c")


def test_a_call_cancelled_after_the_worker_asked_anew_changes_nothing():
    pacing = Pacing(TurnTaking())
    first, second = (lambda: None), (lambda: None)
    assert pacing.may_proceed("a", clock=0, wake=first)
    assert pacing.may_proceed("a", clock=0, wake=second)
    pacing.forget("a", first, withdraw=True)
    assert not pacing.may_proceed("b", clock=0, wake=first)


def test_the_time_of_a_worker_that_takes_its_next_step_begins_anew():
    calls = Calls(Pacing(TurnTaking()))
    assert [calls.ask(name) for name in "ab"] == [True, False]
    assert calls.pacing.set_aside(now=0.0, stall_seconds=2.0) == []
    assert not calls.ask("a", clock=1)
    assert calls.ask("b")
    assert calls.ask("a", clock=1) is False
    assert not calls.ask("b", clock=1)
    assert calls.ask("a", clock=1)
    assert calls.pacing.set_aside(now=2.0, stall_seconds=2.0) == []
    assert calls.pacing.set_aside(now=4.0, stall_seconds=2.0) == ["a"]
