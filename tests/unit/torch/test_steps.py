"""Downpour's schedule and how gradients gather (Dean et al. 2012, section 4.1; appendix algorithm 1.1)."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client_support import RecordingSession
from pyps_client.torch.overlap import BEHIND_MAX
from pyps_client.torch.steps import Steps
from pyps_wire.errors import RunFinished, ServerUnavailable
from support import wait_until
from training import started_steps

SIZE = 4


def make_worker(
    *,
    make_session=RecordingSession,
    first: float = 0.0,
    dtype=torch.float32,
    rate: float = 0.0,
    local: float = 0.0,
    session_has=None,
    **settings,
) -> tuple[Steps, RecordingSession, torch.nn.Parameter]:
    """A worker of a model of one tensor of numbers `first`."""
    model = torch.nn.Linear(SIZE, 1, bias=False).to(dtype)
    session = make_session([np.full(SIZE, first, np.float32)], rate=rate)
    for name, value in (session_has or {}).items():
        setattr(session, name, value)
    return started_steps(session, model, local=local, **settings), session, model.weight


def gradient(value: float) -> list[torch.Tensor]:
    return [torch.full((1, SIZE), value)]


def step_until_pulled(worker: Steps) -> None:
    """Takes steps without a minibatch, until a pull that has begun is in the model: so many are not taken without."""
    for _ in range(BEHIND_MAX):
        worker.step([None])


def payloads(session: RecordingSession) -> list[float]:
    return [float(pushed.vectors[0][0]) for pushed in session.pushes]


def appendix(gradients, *, rate, local, push_every, pull_every, paper):
    server = params = np.float64(0)
    accrued, trajectory, pushed = np.float64(0), [], []
    for step, value in enumerate(gradients):
        if step % pull_every == 0:
            params = server
        trajectory.append(params)
        accrued += value
        params = params - local * value
        if (step if paper else step + 1) % push_every == 0:
            server = server - rate * accrued
            pushed.append(accrued)
            accrued = np.float64(0)
    return trajectory, pushed


BEATS = [(1, 1), (2, 1), (1, 3), (3, 2), (2, 4), (4, 4)]


@pytest.mark.parametrize("compat", [None, "paper"])
def test_the_trajectory_is_the_appendixs(compat):
    values = [float(value) for value in range(1, 14)]
    for push_every, pull_every in BEATS:
        pace = {"push_every": push_every, "pull_every": pull_every}
        worker, session, parameter = make_worker(rate=0.5, local=0.25, compat=compat, **pace)
        seen = []
        for value in values:
            seen.append(float(parameter.detach()[0, 0]))
            worker.step(gradient(value))
        expected, pushed = appendix(values, rate=0.5, local=0.25, paper=compat == "paper", **pace)
        assert seen == pytest.approx(expected, rel=1e-6), pace
        assert payloads(session) == pushed, pace


def test_a_push_states_its_oldest_and_its_newest_base_version():
    worker, session, _ = make_worker(push_every=3)
    for version_after in (4, 9, 9):
        # Other workers' updates, which the pull within the step brings.
        session.version = version_after
        worker.tell_examples(8)
        worker.step(gradient(1.0))
    (pushed,) = session.pushes
    assert (pushed.base_version, pushed.newest_base_version) == (0, 9)
    assert (pushed.minibatch_count, pushed.example_count) == (3, 24)


def test_a_snapshot_leaves_the_model_and_its_base_version_alone():
    worker, session, parameter = make_worker(pull_every=10)
    session.parameters[0][:] = 3.0
    session.version = 5
    assert worker.snapshot()["weight"].tolist() == [[3.0] * SIZE]
    assert parameter.detach().tolist() == [[0.0] * SIZE]
    worker.step(gradient(1.0))
    assert session.pushes[0].base_version == 0


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_finished_run_leaves_its_last_parameters_in_the_model(overlap):
    worker, session, parameter = make_worker(overlap=overlap, pull_every=10)
    session.parameters[0][:] = 3.0
    session.version += 1
    session.failure = RunFinished("over")
    worker.step(gradient(1.0))
    if overlap == "step":
        wait_until(lambda: worker.step(gradient(1.0)) or worker.finished, what="the end to be known")
    assert worker.finished
    assert parameter.detach().tolist() == [[3.0] * SIZE]
    # For a server that is lost now it waits as one does that ends.
    assert "hurry" in session.events


def test_while_a_push_is_under_way_gradients_gather_and_go_together_after():
    worker, session, _ = make_worker(overlap="step")
    session.gate.clear()
    for value in (1.0, 2.0, 4.0):
        worker.step(gradient(value))
    assert session.pushes == []
    session.gate.set()
    wait_until(lambda: worker.steps_answered == 1, what="the first push")
    worker.step(gradient(8.0))
    worker.flush()
    assert payloads(session) == [1.0, 14.0]
    assert session.pushes[1].minibatch_count == 3
    worker.close()


def test_a_worker_waits_when_too_much_has_gathered():
    worker, session, _ = make_worker(overlap="step", push_every=2, pull_every=100)
    session.gate.clear()
    # One push under way, and one minibatch fewer than are too many: nobody waits, else the gate would never open.
    for _ in range(2 + 2 * BEHIND_MAX - 1):
        worker.step(gradient(1.0))
    assert session.pushes == []
    opens = threading.Timer(0.1, session.gate.set)
    opens.start()
    worker.step(gradient(1.0))
    assert payloads(session)[0] == 2.0
    opens.join()
    worker.flush()
    assert payloads(session) == [2.0, 16.0]
    worker.close()


def test_pulled_parameters_enter_the_model_in_a_step_only(monkeypatch):
    worker, session, parameter = make_worker(overlap="step")
    goes_on, bring = threading.Event(), session._pull
    monkeypatch.setattr(session, "_pull", lambda vectors: goes_on.wait(60) and bring(vectors))
    session.parameters[0][:] = 3.0
    session.version = 4
    worker.step(gradient(1.0))
    goes_on.set()
    wait_until(lambda: session.held >= 4, what="the pull's end")
    assert parameter.detach().tolist() == [[0.0] * SIZE]
    step_until_pulled(worker)
    assert parameter.detach().tolist() == [[3.0] * SIZE]
    worker.close()


def test_a_push_and_a_pull_that_are_due_together_are_one_exchange_during_the_computation():
    worker, session, _ = make_worker(overlap="step", pull_every=2)
    for expected in (["push"], ["exchange"], ["push"]):
        del session.events[:]
        worker.step(gradient(1.0))
        wait_until(lambda: worker.steps_answered == worker.steps, what="the push's end")
        assert session.events == expected
    # Where a round waits for others the pull does, and pushes go on.
    session.pull_needed = True
    del session.events[:]
    worker.step(gradient(1.0))
    worker.flush()
    wait_until(lambda: sorted(session.events) == ["pull", "push"], what="the pull")
    worker.close()


def test_a_pull_that_ended_while_a_push_failed_enters_the_model():
    worker, session, parameter = make_worker(overlap="step", pull_every=2)
    session.parameters[0][:] = 3.0
    session.version = 4
    session.failure = ServerUnavailable("127.0.0.1:1 did not answer for 600 s")
    session.gate.clear()
    for _ in range(2):
        worker.step(gradient(1.0))
    pushing, pulling = worker.overlap.pushing, worker.overlap.pulling
    assert pushing is not pulling and pulling.wait(60) and not pushing.done()
    session.gate.set()
    assert pushing.wait(60)
    with pytest.raises(ServerUnavailable, match="did not answer"):
        worker.step(gradient(1.0))

    session.failure = None
    worker.step([None])

    assert parameter.detach().tolist() == [[3.0] * SIZE]
    assert session.pulls == 2, "the first, and this one"
    worker.close()


def test_local_steps_of_half_precision_parameters_add_up_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        worker, _, parameter = make_worker(first=1.0, dtype=dtype, local=0.0001, pull_every=100)
        # The last 80 of them since the second pull.
        for _ in range(180):
            worker.step([torch.ones(1, SIZE, dtype=dtype)])
        # Each step is lost in half precision: 1 - 0.0001 is 1.
        assert parameter.tolist() == [torch.tensor([1 - 0.008] * SIZE).to(dtype).tolist()]


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=40),
    push_every=st.integers(1, 4),
    pull_every=st.integers(1, 4),
    closed=st.lists(st.booleans(), min_size=40, max_size=40),
    compat=st.sampled_from([None, "paper"]),
)
def test_the_sum_of_pushed_payloads_is_the_sum_of_gradients(values, push_every, pull_every, closed, compat):
    worker, session, _ = make_worker(
        overlap="step", push_every=push_every, pull_every=pull_every, compat=compat, rate=0.5, local=0.5
    )
    for value, hold in zip(values, closed, strict=False):
        # Held back only where the worker will not wait for it.
        if hold and worker.steps - worker.steps_answered < BEHIND_MAX - 1:
            session.gate.clear()
        else:
            session.gate.set()
        worker.step(gradient(float(value)))
    session.gate.set()
    worker.flush()
    worker.close()
    assert sum(payloads(session)) == sum(values)
    assert sum(pushed.minibatch_count for pushed in session.pushes) == len(values)


def test_parameters_that_came_before_an_exchange_failed_are_known_for_what_they_are():
    """The model's parameters lie where a server writes them: the next gradient is computed on them."""

    class Cut(RecordingSession):
        def exchange(self, plan):
            super().exchange(plan)
            if self.version == 2:
                raise ServerUnavailable("gone")
            return []

    worker, session, parameter = make_worker(make_session=Cut, rate=1.0)
    worker.step(gradient(1.0))
    with pytest.raises(ServerUnavailable):
        worker.step(gradient(1.0))
    assert parameter.tolist() == [[-2.0] * SIZE]
    worker.step(gradient(1.0))

    assert [pushed.base_version for pushed in session.pushes] == [0, 1, 2]
    assert parameter.tolist() == [[-3.0] * SIZE]


# The protocol in force: what it grants, what it wants summed, what it takes.


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_worker_asks_before_its_first_pull_and_after_each_push_before_the_pull(overlap):
    worker, session, parameter = make_worker(
        rate=1.0, push_every=2, overlap=overlap, session_has={"ask_to_proceed": True}
    )
    for _ in range(4):
        worker.step(gradient(1.0))
    round_of_two = ["pull", "push", "proceed", "pull"]
    assert session.events == ["proceed", "pull", *round_of_two, *round_of_two]
    assert float(parameter.detach()[0, 0]) == -4
    worker.close()


def test_a_protocols_accumulation_is_followed_into_and_out_of_between_steps():
    worker, session, _ = make_worker()
    for wanted, count in ((0, 3), (4, 6), (0, 2), (3, 5), (2, 3)):
        session.accumulate = wanted
        for _ in range(count):
            worker.step(gradient(1.0))
    worker.flush()
    # Two that were left when four were no longer wanted go with the next one; so do two of three when two suffice.
    assert payloads(session) == [1, 1, 1, 4, 3, 1, 3, 3, 2]
    assert session.pulls == 1 + len(session.pushes)


@pytest.mark.parametrize("setting", ["push_every", "pull_every"])
def test_the_users_push_every_overrides_the_protocols_with_one_warning(setting, caplog):
    make_worker(push_every=4, pull_every=4, session_has={"accumulate": 4})
    assert caplog.messages == []
    worker, session, _ = make_worker(**{setting: 2}, session_has={"protocol": "asgd:accumulate=4"})
    for wanted in (4, 0, 4):
        session.accumulate = wanted
        for _ in range(4):
            worker.step(gradient(1.0))
    (warning,) = caplog.messages
    assert f"{setting} is 2 here, but asgd:accumulate=4 wants 4 minibatches" in warning
    expected = [2.0] * 6 if setting == "push_every" else [4.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    assert payloads(session) == expected


def test_a_protocol_that_spaces_pulls_later_warns_once_where_there_are_no_local_steps(caplog):
    worker, session, _ = make_worker(local_rate_known=False)
    for wanted in (0, 4, 0, 2):
        assert len(caplog.messages) == (worker.steps > 1), wanted
        session.accumulate = wanted
        worker.step(gradient(1.0))


def test_an_overlapped_worker_waits_while_the_protocol_takes_the_present_version_only(caplog, monkeypatch):
    caplog.set_level("INFO")
    worker, session, parameter = make_worker(rate=1.0, overlap="step", session_has={"protocol": "hardsync"})
    wait = worker.overlap.wait

    def wait_until_sent() -> None:
        session.gate.set()
        wait()

    monkeypatch.setattr(worker.overlap, "wait", wait_until_sent)
    session.gate.clear()
    for _ in range(2):
        worker.step(gradient(1.0))
    assert session.pushes == []  # under way, beside the computation
    session.current_version_only = True
    for count in range(3):
        worker.step(gradient(1.0))
        # Nothing is under way between steps, and the model holds all that was pushed.
        assert session.events[-1] == "exchange"
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


def test_what_was_answered_is_known_by_the_number_of_minibatches():
    worker, session, _ = make_worker(push_every=2, overlap="step")
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


def test_a_portions_end_does_not_change_the_workers_own_push_every():
    worker, session, _ = make_worker(push_every=3)
    worker.end_portion_after(3)
    for _ in range(6):
        worker.step(gradient(1.0))
    assert [pushed.minibatch_count for pushed in session.pushes] == [3, 3]


def test_an_idle_step_pushes_nothing_and_only_where_others_wait_for_it():
    worker, session, _ = make_worker()
    worker.idle()
    assert (session.pushes, worker.steps) == ([], 0)
    for name in ("current_version_only", "ask_to_proceed"):
        for overlap in ("off", "step"):
            worker, session, _ = make_worker(session_has={name: True}, overlap=overlap)
            worker.step(gradient(1.0))
            pulls = session.pulls
            worker.idle()
            assert [pushed.present for pushed in session.pushes] == [[True], [False]], (name, overlap)
            assert (worker.steps, session.clock, session.pulls > pulls) == (2, 2, True)
            assert worker.steps_answered == 2
            worker.close()
