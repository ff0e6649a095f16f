"""How pushes and pulls run beside the computation: in step, or on threads of their own.

Both links do what the same few calls say, so that Downpour decides what happens and a link only when.
Gradients are never dropped: while a push is under way, `can_push` is false and the caller goes on gathering.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pyps_client.fork import ForkGuard
from pyps_client.push import Description, GroupRate
from pyps_client.retry import SIGNAL_SECONDS
from pyps_client.torch.gradient_buffer import GradientBuffer
from pyps_client.torch.parameter_buffer import ParameterBuffer
from pyps_client.work import LeaseCall
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.work_pb2 import LeaseReply

T = TypeVar("T")
SessionLike = Worker
Versions = Mapping[int, int]


class Link(Protocol):
    """The way of gradients to the servers and of parameters back. Only the training thread calls it."""

    # Receipts of the newest push that was answered.
    receipts: Sequence[Receipt]

    @property
    def in_flight(self) -> GradientBuffer | None:
        """The gradients of a push that is not known to be answered; they rest until the next call."""

    def raise_error(self) -> None:
        """Raises what went wrong on another thread since the last call."""

    def can_push(self) -> bool:
        """True when a push may begin now."""

    def push(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> GradientBuffer:
        """Begins to push sealed gradients, with new rates by group; returns an empty buffer to go on with."""

    def can_pull(self) -> bool:
        """True when a pull may begin now."""

    def pull(self) -> None:
        """Begins to pull into the parameter buffer."""

    def take_pulled(self) -> Versions | None:
        """The versions that a pull has brought into the parameter buffer since the last call; None without one."""

    def wait_for_push(self) -> None:
        """Returns once no push is under way; raises what it raised."""

    def wait_for_pull(self) -> None:
        """Returns once no pull is under way; raises what it raised."""

    def close(self) -> None:
        """Ends the link's threads, each after what it is doing."""


class BlockingLink:
    """overlap="off": a push or a pull is over when the call returns."""

    def __init__(self, session: SessionLike, parameters: ParameterBuffer) -> None:
        self._session = session
        self._parameters = parameters
        self._pulled: Versions | None = None
        self.receipts: Sequence[Receipt] = ()

    def raise_error(self) -> None:
        """Nothing runs elsewhere, so nothing went wrong elsewhere."""

    def can_push(self) -> bool:
        return True

    @property
    def in_flight(self) -> GradientBuffer | None:
        return None

    def push(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> GradientBuffer:
        try:
            self.receipts = _push(self._session, gradients, _described(gradients, learning_rates))
        finally:
            # After an error too: the session has tried for as long as it was told to.
            gradients.clear()
        return gradients

    def exchange(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> None:
        """Pushes sealed gradients and pulls what is newer, in one; the buffer is empty then."""
        try:
            gradients.ready()
            self._parameters.wait_until_free()
            described = _described(gradients, learning_rates)
            self.receipts = self._session.exchange(gradients.vectors, self._parameters.vectors, **described)
        finally:
            gradients.clear()
            # After an error too: some shards may have come, and the model's parameters may lie in the vectors.
            self._pulled = self._session.held_versions

    def can_pull(self) -> bool:
        return True

    def pull(self) -> None:
        self._pulled = _pull(self._session, self._parameters)

    def lease(self, ask: Callable[[LeaseCall], LeaseReply]) -> LeaseReply:
        """Asks for a portion with which the parameters come."""
        self._parameters.wait_until_free()
        try:
            return ask(self._session.with_parameters(self._parameters.vectors))
        finally:
            self._pulled = self._session.held_versions

    def take_pulled(self) -> Versions | None:
        pulled, self._pulled = self._pulled, None
        return pulled

    def wait_for_push(self) -> None:
        """A push is over when it returns."""

    def wait_for_pull(self) -> None:
        """A pull is over when it returns."""

    def close(self) -> None:
        """There are no threads."""


class ThreadedLink:
    """overlap="step": one push and one pull at a time, each on its thread, with a second gradient buffer."""

    def __init__(self, session: SessionLike, parameters: ParameterBuffer, spare: GradientBuffer) -> None:
        self._session = session
        self._parameters = parameters
        self._spare: GradientBuffer | None = spare
        self._in_flight: GradientBuffer | None = None
        self._pushing = Lane[Sequence[Receipt]]("pyps-push")
        self._pulling = Lane[Versions]("pyps-pull")
        self._pulled: Versions | None = None
        self.receipts: Sequence[Receipt] = ()

    def raise_error(self) -> None:
        self._collect()

    def can_push(self) -> bool:
        self._collect()
        return self._spare is not None

    @property
    def in_flight(self) -> GradientBuffer | None:
        return self._in_flight

    def push(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> GradientBuffer:
        assert self._spare is not None, "a push began while another was under way"
        spare, self._spare, self._in_flight = self._spare, None, gradients
        described = self._describe(gradients, learning_rates)
        self._pushing.start(lambda: _push(self._session, gradients, described))
        return spare

    def can_pull(self) -> bool:
        self._collect()
        # What landed is taken first: a pull rewrites the buffer.
        return self._pulled is None and self._is_over(self._pulling)

    def pull(self) -> None:
        self._pulling.start(lambda: _pull(self._session, self._parameters))

    def take_pulled(self) -> Versions | None:
        self._collect()
        pulled, self._pulled = self._pulled, None
        return pulled

    def wait_for_push(self) -> None:
        self._pushing.wait()
        self._collect()

    def wait_for_pull(self) -> None:
        self._pulling.wait()
        self._collect()

    def close(self) -> None:
        self._pushing.stop()
        self._pulling.stop()

    def _describe(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> Description:
        return _described(gradients, learning_rates)

    def _is_over(self, lane: Lane[Any]) -> bool:
        return not lane.busy

    def _collect(self) -> None:
        """Takes over what the threads have finished; raises what they raised."""
        if self._in_flight is not None and self._is_over(self._pushing):
            # After an error too: the session has tried for as long as it was told to.
            self._in_flight.clear()
            self._spare, self._in_flight = self._in_flight, None
            self.receipts = self._pushing.take() or ()
        pulled = self._pulling.take() if self._is_over(self._pulling) else None
        if pulled is not None:
            self._pulled = pulled


class Lane(Generic[T]):
    """A thread that runs one job at a time. Made in the process that uses it; a forked child has none.

    A daemon, so that an interrupted program is not held up by a push that waits for a lost server. Jobs end
    by themselves: every call of a session has a deadline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._guard = ForkGuard()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # Guarded by _changed.
        self._job: Callable[[], T] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._stopped = False

    @property
    def busy(self) -> bool:
        """True while a job runs."""
        with self._changed:
            return self._job is not None

    def start(self, job: Callable[[], T]) -> None:
        """Runs the job on the thread."""
        self._guard.check()
        with self._changed:
            assert self._job is None, "a lane runs one job at a time"
            self._job = job
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def take(self) -> T | None:
        """The finished job's result, once; raises what the job raised."""
        with self._changed:
            result, self._result = self._result, None
            error, self._error = self._error, None
        if error is not None:
            raise error
        return result

    def wait(self) -> None:
        """Returns once no job runs."""
        with self._changed:
            while self._job is not None:
                self._changed.wait(SIGNAL_SECONDS)

    def stop(self) -> None:
        """Ends the thread after its job."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._stopped)
                job = self._job
            if job is None:
                return
            result: T | None = None
            error: BaseException | None = None
            try:
                result = job()
            except BaseException as raised:  # handed to the training thread, which raises it
                error = raised
            with self._changed:
                self._result, self._error, self._job = result, error, None
                self._changed.notify_all()


def _push(session: SessionLike, gradients: GradientBuffer, described: Description) -> Sequence[Receipt]:
    gradients.ready()
    return session.push(gradients.vectors, **described)


def _described(gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> Description:
    return {
        "present": gradients.present,
        "example_count": gradients.example_count,
        "minibatch_count": gradients.minibatch_count,
        "base_versions": gradients.base_versions,
        "newest_base_versions": gradients.newest_base_versions,
        "learning_rates": learning_rates,
        "kinds": gradients.kinds,
    }


def _pull(session: SessionLike, parameters: ParameterBuffer) -> Versions:
    parameters.wait_until_free()
    session.pull(parameters.vectors)
    return session.held_versions
