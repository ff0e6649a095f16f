"""Steps in the memory that a session lends: exchanges, gradients computed in place, who looks for NaN."""

import numpy as np
import pytest
import torch

from client_support import RecordingSession, values_of
from pyps_wire.errors import ServerUnavailable
from training import layout_of, started_steps


class Worker:
    """A linear layer without bias on a plain SGD session, trained as RemoteOptimizer would."""

    def __init__(self, *, rate: float = 1.0, session_has=None, **settings) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1, bias=False)
        self.session = RecordingSession(values_of(layout_of(self.model)), rate=rate, **(session_has or {}))
        self.steps = started_steps(self.session, self.model, **settings)

    def step(self, gradient: float | list[float], *, zero: bool | None = False) -> None:
        if zero:
            self.steps.before_clearing(in_place=True)
        if zero is False:
            self.model.zero_grad()
        elif zero:
            self.model.zero_grad(set_to_none=False)
        # Its gradient is the inputs, which autograd adds to what is there.
        self.model(torch.as_tensor(gradient, dtype=torch.float32).expand(3).view(1, 3)).sum().backward()
        self.steps.step([parameter.grad for parameter in self.model.parameters()])

    @property
    def lent_gradient(self) -> np.ndarray:
        return self.steps.gradients.vectors[0]

    @property
    def lies_in_place(self) -> bool:
        return self.model.weight.grad.data_ptr() == self.lent_gradient.ctypes.data

    @property
    def pushed(self) -> list[list[float]]:
        return [pushed.vectors[0].tolist() for pushed in self.session.pushes]

    @property
    def weight(self) -> list[float]:
        return self.model.weight.detach()[0].tolist()

    @property
    def served(self) -> list[float]:
        return self.session.parameters[0].tolist()


def test_a_push_and_a_pull_of_one_step_are_one_exchange():
    for setting, events in (
        ({}, ["exchange"] * 6),
        ({"push_every": 2, "pull_every": 3}, ["push", "pull", "push", "exchange"]),
        # In a round that others complete the worker pulls after it, and so waits.
        ({"session_has": {"pull_needed": True}}, ["exchange", "pull"] * 6),
        ({"pull_every": 10, "session_has": {"pull_needed": True}}, ["push", "pull"] * 6),
    ):
        worker = Worker(**setting)
        for _ in range(6):
            worker.step(1.0)
        assert worker.session.events == ["pull", *events]
        assert worker.weight == worker.served
        if not setting:
            assert [pushed.base_version for pushed in worker.session.pushes] == list(range(6))


def test_a_grant_that_an_exchange_first_asks_for_is_followed_by_a_pull():
    worker = Worker()
    exchange = worker.session.exchange

    def asked_from_now_on(*vectors, **described):
        worker.session.ask_to_proceed = True
        return exchange(*vectors, **described)

    worker.session.exchange = asked_from_now_on
    worker.step(1.0)
    assert worker.session.events == ["pull", "exchange", "proceed", "pull"]


def test_an_exchange_that_fails_leaves_no_gradient_behind():
    worker = Worker()
    worker.session.failure = ServerUnavailable("gone")
    with pytest.raises(ServerUnavailable):
        worker.step(1.0)
    worker.session.failure = None
    worker.step(2.0)
    assert worker.pushed == [[2, 2, 2]]


def test_gradients_are_computed_where_they_are_pushed_from_once_made_zero_in_place():
    worker = Worker()
    # There is none to be made zero; two that are; one that goes on adding up; one set to None, and so copied.
    ways = ((1.0, True, False), (2.0, True, True), (3.0, True, True), (4.0, None, True), (5.0, False, False))
    for value, zero, in_place in ways:
        worker.step(value, zero=zero)
        assert worker.lies_in_place == in_place, value
    assert worker.pushed == [[1] * 3, [2] * 3, [3] * 3, [7] * 3, [5] * 3]


@pytest.mark.parametrize("zeros", [[True, None] * 4, [False, True, None, True] * 2])
def test_several_minibatches_of_a_push_add_up_whatever_becomes_of_gradients_between(zeros):
    worker = Worker(push_every=2, pull_every=1)
    expected, gradient = [], 0.0
    for number, zero in enumerate(zeros):
        value = float(2**number)
        gradient = (gradient if zero is None else 0.0) + value
        expected.append(gradient)
        worker.step(value, zero=zero)
        assert worker.model.weight.grad.tolist() == [[gradient] * 3]
    assert worker.pushed == [[a + b] * 3 for a, b in zip(expected[::2], expected[1::2], strict=True)]


def test_a_protocol_that_wants_sums_in_between_spoils_none():
    for overlap in ("off", "step"):
        worker = Worker(overlap=overlap)
        worker.step(1.0)
        for step in range(12):
            worker.session.accumulate = (0, 3, 0)[step // 4]
            worker.step(float(step), zero=True)
        worker.steps.flush()
        worker.steps.close()
        assert sum(pushed[0] for pushed in worker.pushed) == 1 + sum(range(12)), overlap


def test_parameters_are_in_the_pulled_vectors_until_the_first_local_step():
    worker = Worker(local=0.5, session_has={"accumulate": 1})
    vector = worker.steps.parameters.vectors[0]
    worker.step(1.0)
    assert worker.model.weight.data_ptr() == vector.ctypes.data
    # The protocol brings local steps about in the middle of the run.
    worker.session.accumulate = 2
    worker.step(1.0)
    pulled = vector.tolist()
    assert pulled == worker.served
    assert worker.weight == [value - 0.5 for value in pulled]
    worker.step(1.0)
    assert worker.weight == worker.served


def test_what_the_user_wrote_into_parameters_is_gone_after_the_next_pull():
    """As where pulled parameters are copied into the model, though no newer ones came."""
    worker = Worker()
    worker.step(1.0)
    with torch.no_grad():
        worker.model.weight.fill_(9.0)
    worker.steps.step([None])
    assert worker.weight == worker.served
    with torch.no_grad():
        worker.model.weight.fill_(9.0)
    worker.steps.step([None])
    assert worker.weight == worker.served
    assert worker.session.events.count("snapshot") == 1


def test_training_is_the_same_whether_worker_or_server_checks_for_nan():
    for codec, skipped in (("float32", 2), ("float16", 3)):
        workers = [Worker(session_has={"checks_first": first, "codec": codec}) for first in (False, True)]
        for worker in workers:
            for value in (1.0, float("nan"), 1e5, 2.0, float("-inf"), 3.0):
                worker.step(value, zero=True)
        assert workers[0].weight == workers[1].weight
        assert [worker.steps.finite.skipped for worker in workers] == [skipped] * 2


def test_a_worker_checks_for_nan_where_one_would_spoil_more_than_its_own_push():
    for setting in ({"push_every": 2}, {"pull_every": 2, "local": 1.0}, {"overlap": "step"}):
        worker = Worker(session_has={"checks_first": True}, **setting)
        for skipped, value in enumerate((float("nan"), 1.0, float("nan")), start=1):
            worker.step(value)
            assert worker.steps.finite.skipped == (skipped + 1) // 2, setting
            assert np.isfinite(worker.weight).all(), setting
        worker.steps.flush()
        worker.steps.close()
        assert worker.pushed == [[1] * 3]


@pytest.mark.parametrize("private", [True, False])
def test_a_closed_worker_leaves_the_model_as_it_is(private):
    worker = Worker(session_has={"private": private})
    worker.step(1.0)
    worker.step(1.0, zero=True)
    weight, gradient = worker.weight, worker.model.weight.grad.tolist()
    worker.steps.close()
    assert (worker.weight, worker.model.weight.grad.tolist()) == (weight, gradient)
    # Memory that others see is let go.
    lent = worker.steps.parameters.vectors[0].ctypes.data
    assert (worker.model.weight.data_ptr() == lent) == private
    assert worker.lies_in_place == private


def test_a_gradient_beyond_float32_is_skipped():
    worker = Worker()
    worker.model.double()
    worker.steps.step([torch.full((1, 3), 1e300, dtype=torch.float64)])
    assert worker.session.pushes == []
    assert worker.steps.finite.skipped == 1
