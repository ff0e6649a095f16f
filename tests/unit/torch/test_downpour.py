"""Downpour's schedule and how gradients gather (Dean et al. 2012, section 4.1; appendix algorithm 1.1)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from downpours import SIZE, downpour, gradient, payloads
from pyps_client.torch.downpour import BEHIND_MAX, Downpour
from pyps_client.torch.layout import plan
from pyps_client.torch.pace import Pace
from pyps_wire.errors import BadRequest, NotFinite, RunFinished, ServerUnavailable
from recording_session import RecordingSession
from support import wait_until


def appendix(gradients, *, rate, local, push_every, pull_every, paper):
    """The appendix's loop for one worker and a plain SGD server, with every thread's work done at once."""
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


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize(("push_every", "pull_every"), [(1, 1), (2, 1), (1, 3), (3, 2), (2, 4), (4, 4)])
def test_the_trajectory_is_the_appendixs(push_every, pull_every, paper) -> None:
    values = [float(value) for value in range(1, 14)]
    worker, session, parameter = downpour(
        rate=0.5,
        local=0.25,
        push_every=push_every,
        pull_every=pull_every,
        compat="paper" if paper else None,
    )
    seen = []
    for value in values:
        seen.append(float(parameter.detach()[0, 0]))
        worker.step(gradient(value))
    expected, pushed = appendix(values, rate=0.5, local=0.25, push_every=push_every, pull_every=pull_every, paper=paper)
    assert seen == pytest.approx(expected, rel=1e-6)
    assert payloads(session) == pushed


def test_a_push_states_its_oldest_and_its_newest_base_version() -> None:
    worker, session, _ = downpour(push_every=3)
    for version_after in (4, 9, 9):
        # Other workers' updates, which the pull within the step brings.
        session.version = version_after
        worker.step(gradient(1.0), example_count=8)
    (pushed,) = session.pushes
    assert (pushed.base_version, pushed.newest_base_version) == (0, 9)
    assert (pushed.minibatch_count, pushed.example_count) == (3, 24)


def test_a_gradient_with_nan_is_skipped_and_the_next_one_goes() -> None:
    worker, session, _ = downpour()
    worker.step(gradient(float("nan")))
    worker.step(gradient(1.0))
    assert payloads(session) == [1.0]
    assert worker.skipped == 1


def test_a_nan_among_gathered_minibatches_spoils_only_its_own() -> None:
    worker, session, _ = downpour(push_every=3)
    for value in (1.0, float("inf"), 2.0):
        worker.step(gradient(value))
    assert payloads(session) == [3.0]
    assert session.pushes[0].minibatch_count == 2


def test_ten_bad_gradients_in_a_row_end_the_worker() -> None:
    worker, session, _ = downpour()
    for _ in range(9):
        worker.step(gradient(float("nan")))
    with pytest.raises(NotFinite, match="weight"):
        worker.step(gradient(float("nan")))
    assert session.pushes == []


def test_ten_overflows_on_the_wire_in_a_row_end_the_worker() -> None:
    worker, session, _ = downpour(codec="float16")
    for _ in range(9):
        worker.step(gradient(1e6))
    with pytest.raises(NotFinite):
        worker.step(gradient(1e6))
    assert session.pushes == []


def test_a_sparse_gradient_is_refused_by_name() -> None:
    worker, _, _ = downpour()
    with pytest.raises(BadRequest, match=r"gradient of 'weight' has layout torch\.sparse_coo"):
        worker.step([torch.ones(1, SIZE).to_sparse()])


def test_a_snapshot_leaves_the_model_and_its_base_version_alone() -> None:
    worker, session, parameter = downpour(pull_every=10)
    session.parameters[0][:] = 3.0
    session.version = 5
    assert worker.snapshot()["weight"].tolist() == [[3.0] * SIZE]
    assert parameter.detach().tolist() == [[0.0] * SIZE]
    worker.step(gradient(1.0))
    assert session.pushes[0].base_version == 0


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_finished_run_leaves_its_last_parameters_in_the_model(overlap) -> None:
    worker, session, parameter = downpour(overlap=overlap, pull_every=10)
    session.parameters[0][:] = 3.0
    session.version += 1
    session.failure = RunFinished("over")
    worker.step(gradient(1.0))
    if overlap == "step":
        wait_until(lambda: not worker._link._pushing.busy, what="the push's end")
        worker.step(gradient(1.0))
    assert worker.finished
    assert parameter.detach().tolist() == [[3.0] * SIZE]


def test_while_a_push_is_under_way_gradients_gather_and_go_together_after() -> None:
    worker, session, _ = downpour(overlap="step")
    session.gate.clear()
    for value in (1.0, 2.0, 4.0):
        worker.step(gradient(value))
    assert session.pushes == []
    session.gate.set()
    wait_until(lambda: not worker._link._pushing.busy, what="the first push")
    worker.step(gradient(8.0))
    worker.flush()
    assert payloads(session) == [1.0, 14.0]
    assert session.pushes[1].minibatch_count == 3
    worker.close()


def test_a_worker_waits_when_too_much_has_gathered() -> None:
    worker, session, _ = downpour(overlap="step", push_every=2)
    session.gate.clear()
    # One push under way, and one minibatch fewer than are too many.
    for _ in range(2 + 2 * BEHIND_MAX - 1):
        worker.step(gradient(1.0))
    session.gate.set()
    worker.step(gradient(1.0))
    worker.flush()
    assert payloads(session) == [2.0, 16.0]
    worker.close()


def test_pulled_parameters_enter_the_model_in_a_step_only() -> None:
    worker, session, parameter = downpour(overlap="step")
    session.parameters[0][:] = 3.0
    session.version = 4
    worker.step(gradient(1.0))
    wait_until(lambda: not worker._link._pulling.busy, what="the pull's end")
    before = parameter.detach().clone()
    worker.step(gradient(1.0))
    assert parameter.detach().tolist() == [[3.0] * SIZE]
    assert before.tolist() in ([[0.0] * SIZE], [[3.0] * SIZE])
    worker.close()


def test_an_error_on_a_thread_comes_out_of_the_next_step() -> None:
    worker, session, _ = downpour(overlap="step")
    session.failure = ServerUnavailable("127.0.0.1:1 did not answer for 600 s")
    session.gate.clear()
    worker.step(gradient(1.0))
    session.gate.set()
    wait_until(lambda: not worker._link._pushing.busy, what="the push's end")
    with pytest.raises(ServerUnavailable, match="did not answer"):
        worker.step(gradient(1.0))
    worker.close()


def test_read_my_writes_takes_gathered_steps_on_what_was_pulled() -> None:
    """Section 2.3 of the specification, item 4."""
    worker, session, parameter = downpour(rate=1.0, local=1.0, push_every=3, read_my_writes=True)
    seen = []
    for _ in range(6):
        # Other workers' updates.
        session.parameters[0] -= 10
        session.version += 1
        worker.step(gradient(1.0))
        seen.append(float(parameter.detach()[0, 0]))
    assert seen == [-11, -22, -33, -44, -55, -66]


def test_read_my_writes_takes_steps_that_are_under_way_too() -> None:
    worker, session, parameter = downpour(rate=1.0, local=1.0, overlap="step", read_my_writes=True)
    session.gate.clear()
    worker.step(gradient(1.0))
    worker.step(gradient(2.0))
    wait_until(lambda: not worker._link._pulling.busy, what="the pull's end")
    worker.step(gradient(4.0))
    assert float(parameter.detach()[0, 0]) == -7
    session.gate.set()
    worker.flush()
    worker.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_local_steps_of_half_precision_parameters_add_up_in_float32(dtype) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(SIZE, 1, bias=False).to(dtype)
    session = RecordingSession([np.ones(SIZE, np.float32)])
    layout = plan(model, [{"params": list(model.parameters())}])
    worker = Downpour(
        session,
        layout,
        pace=Pace(pull_every=100),
        local_rates=lambda: [0.0001],
    )
    worker.start()
    for _ in range(80):
        worker.step([torch.ones(1, SIZE, dtype=dtype)])
    # Each step is lost in half precision: 1 - 0.0001 is 1.
    assert model.weight.tolist() == [torch.tensor([1 - 0.008] * SIZE).to(dtype).tolist()]


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=40),
    push_every=st.integers(1, 4),
    pull_every=st.integers(1, 4),
    closed=st.lists(st.booleans(), min_size=40, max_size=40),
    compat=st.sampled_from([None, "paper"]),
)
def test_the_sum_of_pushed_payloads_is_the_sum_of_gradients(values, push_every, pull_every, closed, compat) -> None:
    worker, session, _ = downpour(
        overlap="step", push_every=push_every, pull_every=pull_every, compat=compat, rate=0.5, local=0.5
    )
    for value, hold in zip(values, closed, strict=False):
        # Held back only where the worker will not wait for it.
        if hold and worker._gradients.minibatch_count < BEHIND_MAX - 1:
            session.gate.clear()
        else:
            session.gate.set()
        worker.step(gradient(float(value)))
    session.gate.set()
    worker.flush()
    worker.close()
    assert sum(payloads(session)) == sum(values)
    assert sum(pushed.minibatch_count for pushed in session.pushes) == len(values)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"push_every": 0}, "push_every is 0; expected a whole number"),
        ({"pull_every": 1.5}, r"pull_every is 1\.5"),
        ({"compat": "tf"}, "compat is 'tf'; expected None or 'paper'"),
        ({"overlap": "full"}, "overlap is 'full'; expected 'off' or 'step'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(setting, message) -> None:
    with pytest.raises(BadRequest, match=message):
        downpour(**setting)


def test_parameters_that_came_before_an_exchange_failed_are_known_for_what_they_are() -> None:
    """The model's parameters lie where a server writes them: the next gradient is computed on them."""

    class Cut(RecordingSession):
        """One whose next exchange brings parameters and then fails."""

        def exchange(self, vectors, parameters, **described):
            super().exchange(vectors, parameters, **described)
            if self.version == 2:
                raise ServerUnavailable("gone")
            return []

    torch.set_num_threads(1)
    model = torch.nn.Linear(SIZE, 1, bias=False)
    session = Cut([np.zeros(SIZE, np.float32)], rate=1.0)
    worker = Downpour(
        session, plan(model, [{"params": list(model.parameters())}]), pace=Pace(), local_rates=lambda: [0.0]
    )
    worker.start()
    worker.step(gradient(1.0))
    with pytest.raises(ServerUnavailable):
        worker.step(gradient(1.0))
    assert model.weight.tolist() == [[-2.0] * SIZE]
    worker.step(gradient(1.0))

    assert [pushed.base_version for pushed in session.pushes] == [0, 1, 2]
    assert model.weight.tolist() == [[-3.0] * SIZE]
