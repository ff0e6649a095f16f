import numpy as np
import pytest
import torch

from client_support import RecordingSession, values_of
from pyps_client.torch.buffers import SharedBuffers
from pyps_client.torch.layout import plan
from pyps_client.torch.overlap import BEHIND_MAX, steps_of
from pyps_client.torch.schedule import Settings
from pyps_wire.common_pb2 import PAYLOAD_KIND_BUFFER, PAYLOAD_KIND_GRADIENT
from pyps_wire.errors import InvalidArgument

SIZE = 3


class Worker:
    """A network of one batch norm, trained through a session that adds what is pushed of its statistics."""

    def __init__(self, session: RecordingSession | None = None, *, mode: str, is_first: bool = True, **pace) -> None:
        torch.set_num_threads(1)
        self.module = torch.nn.BatchNorm1d(SIZE)
        layout = plan(self.module, [{"params": list(self.module.parameters())}], with_buffers=True)
        self.session = session or RecordingSession(values_of(layout), rate=0.1)
        settings = Settings(**pace)
        self.steps = steps_of(
            self.session,
            layout,
            settings,
            local_rates=lambda: [0.0],
            buffers=SharedBuffers(self.module, layout, mode, is_first=is_first, overlaps=settings.overlap == "step"),
        )
        self.steps.start()

    def train(self, values: torch.Tensor) -> None:
        self.module.zero_grad()
        self.module(values).square().mean().backward()
        self.steps.step([parameter.grad for parameter in self.module.parameters()])

    @property
    def mean(self) -> np.ndarray:
        return self.module.running_mean.numpy().copy()

    @property
    def served_mean(self) -> np.ndarray:
        return self.session.parameters[1][:SIZE]


def minibatches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, SIZE, generator=generator) + 3 for _ in range(count)]


def statistics_alone(values: list[torch.Tensor]) -> torch.nn.BatchNorm1d:
    module = torch.nn.BatchNorm1d(SIZE)
    for minibatch in values:
        module(minibatch)
    return module


def test_buffers_are_a_group_of_their_own_whose_moves_are_pushed():
    worker = Worker(mode="average")
    worker.train(minibatches(1)[0])
    (pushed,) = worker.session.pushes
    assert pushed.kinds == [PAYLOAD_KIND_GRADIENT, PAYLOAD_KIND_BUFFER]
    expected = statistics_alone(minibatches(1))
    np.testing.assert_allclose(pushed.vectors[1][:SIZE], expected.running_mean, rtol=1e-6)
    np.testing.assert_allclose(pushed.vectors[1][SIZE:], expected.running_var - 1, rtol=1e-5)


@pytest.mark.parametrize("mode", ["average", "first"])
def test_a_worker_alone_has_the_statistics_that_it_would_have_by_itself(mode):
    expected = statistics_alone(minibatches(12)).running_mean.numpy()
    for pace in ({}, {"push_every": 2}, {"push_every": 3, "pull_every": 3}):
        worker = Worker(mode=mode, **pace)
        for minibatch in minibatches(12):
            worker.train(minibatch)
        worker.steps.flush()
        np.testing.assert_allclose(worker.served_mean, expected, rtol=1e-5, err_msg=str(pace))
        worker.steps.close()


@pytest.mark.parametrize("mode", ["average", "first"])
def test_with_overlap_statistics_settle_where_they_would_alone_though_each_pull_lacks_the_newest_move(mode):
    worker = Worker(mode=mode, overlap="step")
    # Else a push brings the parameters that hold it.
    worker.session.pull_needed = True
    (minibatch,) = minibatches(1)
    for _ in range(200):
        worker.session.gate.clear()
        worker.train(minibatch)
        # So many steps end a pull that has begun.
        for _ in range(BEHIND_MAX):
            worker.steps.step([None, None])
        worker.session.gate.set()
        worker.steps.flush()
    # Of where it began 0.9 ** 200 is left.
    np.testing.assert_allclose(worker.served_mean, minibatch.mean(0), rtol=1e-5)
    worker.steps.close()


def test_the_average_follows_what_the_servers_serve():
    worker = Worker(mode="average")
    worker.session.parameters[1][:SIZE] = 100
    worker.session.version += 1
    first, second = minibatches(2)
    worker.train(first)
    assert worker.mean.min() > 99
    worker.train(second)
    assert worker.mean.max() < 100


def test_the_first_keeps_its_own_and_makes_up_for_pushes_that_were_weighed_down():
    worker = Worker(mode="first")
    values = minibatches(30)
    for minibatch in values:
        worker.train(minibatch)
        # The servers took a fifth of this move only.
        pushed = worker.session.pushes[-1].vectors[1]
        worker.session.parameters[1] -= np.float32(0.8) * pushed
        worker.session.version += 1
        worker.steps.step([None, None])
        np.testing.assert_allclose(worker.mean, statistics_alone(values[: len(worker.session.pushes)]).running_mean)
    for _ in range(20):
        worker.steps.step([parameter.grad for parameter in worker.module.parameters()])
    np.testing.assert_allclose(worker.served_mean, worker.mean, rtol=1e-4)


def test_others_follow_the_first_and_push_nothing_of_their_own():
    worker = Worker(mode="first", is_first=False)
    worker.session.parameters[1][:SIZE] = 7
    worker.train(minibatches(1)[0])
    assert worker.session.pushes[0].present == [True, True, False, False]
    np.testing.assert_array_equal(worker.mean, np.full(SIZE, 7, np.float32))


def test_a_skipped_minibatch_leaves_no_trace_in_the_statistics():
    worker = Worker(mode="average", pull_every=10)
    good, other = minibatches(2)
    worker.train(good)
    before = worker.mean
    worker.train(torch.full((8, SIZE), float("nan")))
    np.testing.assert_array_equal(worker.mean, before)
    worker.train(other)
    assert len(worker.session.pushes) == 2


def test_a_buffer_that_was_replaced_is_refused_by_name():
    worker = Worker(mode="average")
    worker.module.running_mean = torch.zeros(SIZE)
    with pytest.raises(InvalidArgument, match=r"buffer 'running_mean' was replaced .* change it in place"):
        worker.train(minibatches(1)[0])
