"""The gate of steps: which calls an event wakes, and what a repeated request means."""

from pyps.core.effects import NONE, Effects
from pyps.core.pacing import StagedPacer, StepGate, TurnTaking


class Calls:
    """The waiting calls of workers, and how often each was woken."""

    def __init__(self, gate: StepGate) -> None:
        self.gate = gate
        self.woken: list[str] = []
        self._wakes = {name: lambda name=name: self.woken.append(name) for name in "abcd"}

    def carry_out(self, effects: Effects) -> list[str]:
        """Wake the calls; return the workers of the notices."""
        for wake in effects.wakes:
            wake()
        return [notice.facts["worker"] for notice in effects.notices]

    def ask(self, name: str, clock: int = 0) -> bool:
        granted, effects = self.gate.ask(name, clock, self._wakes[name])
        self.carry_out(effects)
        return granted

    def end(self, name: str) -> None:
        self.carry_out(self.gate.forget(name, self._wakes[name]))

    def cancel(self, name: str) -> None:
        self.carry_out(self.gate.forget(name, self._wakes[name], withdraw=True))

    def depart(self, name: str) -> None:
        self.carry_out(self.gate.depart(name))


def test_only_the_released_worker_is_woken_and_a_repeated_request_is_one_request():
    calls = Calls(StepGate(TurnTaking()))
    assert [calls.ask(name) for name in "abc"] == [True, False, False]
    assert not calls.ask("b")
    assert calls.ask("a"), "the answer was lost; the turn is still its own"
    assert not calls.ask("a", clock=1)
    assert calls.woken == ["b"]
    assert calls.ask("b")


def test_a_call_that_ended_is_not_woken_and_its_grant_is_kept():
    calls = Calls(StepGate(TurnTaking()))
    calls.ask("a")
    calls.ask("b")
    calls.end("b")
    calls.depart("a")
    assert calls.woken == []
    assert not calls.ask("c")
    assert calls.ask("b")


def test_all_waiting_calls_request_again_from_a_new_pacer_which_knows_who_computes():
    calls = Calls(StepGate(TurnTaking()))
    calls.ask("a")
    calls.ask("b")
    calls.carry_out(calls.gate.replace(TurnTaking(), quorum=0, at_work=[], version=0))
    assert calls.woken == ["b"]
    assert not calls.ask("b")
    assert calls.gate.waiting_for("b") == ("a",)
    calls.gate.replace(None, quorum=0, at_work=[], version=0)
    assert calls.ask("b")


def test_a_worker_that_goes_without_asking_is_no_longer_expected():
    calls = Calls(StepGate(TurnTaking()))
    calls.carry_out(calls.gate.expect(2))
    assert not calls.ask("a")
    assert calls.gate.awaited(["a", "b"]) == ("b",)
    assert calls.gate.awaited(["a"]) == ("1 more worker that has not joined",)
    calls.depart("b")
    assert calls.gate.awaited(["a"]) == ()
    assert calls.woken == ["a"]
    assert calls.ask("a")


def test_a_call_that_was_granted_its_step_and_cancelled_before_its_answer_hands_the_step_on():
    calls = Calls(StepGate(TurnTaking()))
    assert [calls.ask(name) for name in "abc"] == [True, False, False]
    calls.depart("a")
    calls.cancel("b")
    assert calls.woken == ["b", "c"]
    assert calls.ask("c")


def test_a_cancelled_call_changes_nothing_once_the_worker_has_called_again():
    gate = StepGate(TurnTaking())
    first, second = (lambda: None), (lambda: None)
    assert gate.ask("a", 0, first)[0]
    assert gate.ask("a", 0, second)[0]
    assert gate.forget("a", first, withdraw=True) == NONE
    assert not gate.ask("b", 0, first)[0]


def test_waiting_calls_are_woken_at_the_version_from_which_no_request_is_needed():
    calls = Calls(StepGate(StagedPacer(TurnTaking(), None, updates=3)))
    assert [calls.ask(name) for name in "abc"] == [True, False, False]
    calls.carry_out(calls.gate.advanced(2))
    assert calls.woken == []
    calls.carry_out(calls.gate.advanced(3))
    assert calls.woken == ["b", "c"]
    assert not calls.gate.asks


def test_a_worker_that_holds_others_up_does_so_with_one_step_until_it_is_set_aside():
    calls = Calls(StepGate(TurnTaking()))
    assert [calls.ask(name) for name in "ab"] == [True, False]
    first = calls.gate.holding_up()
    assert list(first) == ["a"] and calls.gate.holding_up() == first
    assert not calls.ask("a", clock=1)
    assert calls.ask("b")
    assert list(calls.gate.holding_up()) == ["b"], "one that waits itself holds nobody up"
    assert not calls.ask("b", clock=1)
    assert calls.ask("a", clock=1)
    assert calls.gate.holding_up() != first
    calls.carry_out(calls.gate.set_aside("a"))
    assert (calls.woken[-1], calls.gate.holding_up()) == ("b", {})
