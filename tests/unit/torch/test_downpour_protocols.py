"""How Downpour follows the protocol in force: what it grants, what it wants summed, what it takes."""

import pytest

from downpours import downpour, gradient, payloads
from support import wait_until


def test_a_worker_asks_before_its_first_pull_and_after_each_push_before_the_pull() -> None:
    worker, session, _ = downpour(push_every=2, session_has={"ask_to_proceed": True})
    for _ in range(4):
        worker.step(gradient(1.0))
    round_of_two = ["pull", "push", "proceed", "pull"]
    assert session.events == ["proceed", "pull", *round_of_two, *round_of_two]


def test_where_steps_are_granted_nothing_goes_on_beside_the_computation() -> None:
    worker, session, parameter = downpour(rate=1.0, overlap="step", session_has={"ask_to_proceed": True})
    for count in range(1, 4):
        worker.step(gradient(1.0))
        assert session.events[-3:] == ["push", "proceed", "pull"]
        # The parameters of the next minibatch hold this one's update.
        assert float(parameter.detach()[0, 0]) == -count
    worker.close()


def test_a_round_that_waits_for_others_forces_a_pull_however_rare_pulls_are() -> None:
    worker, session, _ = downpour(pull_every=10)
    worker.step(gradient(1.0))
    assert session.pulls == 1
    session.pull_needed = True
    worker.step(gradient(1.0))
    assert session.pulls == 2


def test_a_protocols_accumulation_is_followed_into_and_out_of_between_steps() -> None:
    worker, session, _ = downpour()
    for wanted, count in ((0, 3), (4, 6), (0, 2), (3, 5), (2, 3)):
        session.accumulate = wanted
        for _ in range(count):
            worker.step(gradient(1.0))
    worker.flush()
    # Two that were left when four were no longer wanted go with the next one; so do two of three when two suffice.
    assert payloads(session) == [1, 1, 1, 4, 3, 1, 3, 3, 2]
    assert session.pulls == 1 + len(session.pushes)


def test_an_overlapped_worker_follows_the_protocols_accumulation() -> None:
    worker, session, _ = downpour(overlap="step")
    for wanted in (0, 4, 0, 2):
        session.accumulate = wanted
        for _ in range(7):
            worker.step(gradient(1.0))
    worker.flush()
    worker.close()
    assert sum(payloads(session)) == 28


@pytest.mark.parametrize("setting", ["push_every", "pull_every"])
def test_the_users_own_number_stays_beside_the_protocols_with_one_warning(setting, caplog) -> None:
    worker, session, _ = downpour(**{setting: 2}, session_has={"protocol": "asgd:accumulate=4"})
    for wanted in (4, 0, 4):
        session.accumulate = wanted
        for _ in range(4):
            worker.step(gradient(1.0))
    (warning,) = caplog.messages
    assert f"{setting} is 2 here, but asgd:accumulate=4 wants 4 minibatches" in warning
    expected = [2.0] * 6 if setting == "push_every" else [4.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    assert payloads(session) == expected


def test_the_same_number_as_the_protocols_needs_no_warning(caplog) -> None:
    downpour(push_every=4, pull_every=4, session_has={"accumulate": 4})
    assert caplog.messages == []


def test_an_overlapped_worker_waits_while_the_protocol_takes_the_present_version_only(caplog) -> None:
    caplog.set_level("INFO")
    worker, session, parameter = downpour(rate=1.0, overlap="step", session_has={"protocol": "hardsync"})
    session.gate.clear()
    for _ in range(2):
        worker.step(gradient(1.0))
    assert session.pushes == []  # under way, beside the computation
    session.gate.set()
    session.current_version_only = True
    for count in range(3):
        worker.step(gradient(1.0))
        # Nothing is under way between steps, and the model holds all that was pushed.
        # On threads of its own: an overlapped worker never exchanges. A pull begun before may end beside the push.
        assert session.events[-1] == "pull"
        assert "exchange" not in session.events
        assert float(parameter.detach()[0, 0]) == -3 - count
        assert session.held == session.version
    assert [pushed.base_version for pushed in session.pushes[-2:]] == [session.version - 2, session.version - 1]
    session.current_version_only = False
    session.gate.clear()
    worker.step(gradient(1.0))
    pushes = len(session.pushes)
    session.gate.set()
    worker.flush()
    worker.close()
    assert pushes == len(session.pushes) - 1
    # Once; what threads of earlier tests may still log is not counted.
    assert sum("hardsync takes gradients of the present version only" in text for text in caplog.messages) == 1
    assert sum(payloads(session)) == 6


def test_what_was_answered_is_known_by_the_number_of_minibatches() -> None:
    worker, session, _ = downpour(push_every=2, overlap="step")
    worker.step(gradient(1.0))
    assert worker.steps_answered == 0
    session.gate.clear()
    worker.step(gradient(1.0))
    worker.step(gradient(1.0))
    assert worker.steps_answered == 0
    session.gate.set()
    wait_until(lambda: worker.steps_answered == 2)
    worker.flush()
    assert worker.steps_answered == 3
    # What has no gradient, or none that is finite, needs no answer.
    worker.step([None])
    assert worker.steps_answered == 4
    worker.step(gradient(float("nan")))
    assert worker.steps_answered == 5


def test_a_portions_end_leaves_the_workers_own_beat_alone() -> None:
    worker, session, _ = downpour(push_every=3)
    worker.end_portion_after(3)
    for _ in range(6):
        worker.step(gradient(1.0))
    assert [pushed.minibatch_count for pushed in session.pushes] == [3, 3]


@pytest.mark.parametrize("overlap", ["off", "step"])
@pytest.mark.parametrize("name", ["current_version_only", "ask_to_proceed"])
def test_an_idle_step_says_that_there_is_nothing_where_others_wait_for_it(name, overlap) -> None:
    worker, session, _ = downpour(session_has={name: True}, overlap=overlap)
    worker.step(gradient(1.0))
    pulls = session.pulls
    worker.idle()
    assert [pushed.present for pushed in session.pushes] == [[True], [False]]
    assert (worker.steps, session.clock, session.pulls > pulls) == (2, 2, True)
    assert worker.steps_answered == 2


def test_an_idle_step_is_none_where_nobody_waits_for_it() -> None:
    worker, session, _ = downpour()
    worker.idle()
    assert (session.pushes, worker.steps) == ([], 0)
