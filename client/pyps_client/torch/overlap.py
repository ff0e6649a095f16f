"""What goes on beside the computation: a push and a pull at a time, each on a thread, or both in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyps_client.torch.gradients import Gradients
from pyps_client.transport.threads import Future, Threads
from pyps_wire.common_pb2 import Receipt


class Overlap:
    """overlap="step": what is under way, and the gradients that it takes along. Only the training thread calls it.

    Gradients are never dropped: while a push is under way they gather in the other buffer, and go together after.
    """

    def __init__(self, spare: Gradients | None) -> None:
        """`spare`: the other buffer; None where nothing ever goes on beside the computation."""
        self.is_used = spare is not None
        self._spare = spare
        self._threads = Threads()
        # The gradients of the push under way, or whose end nobody has taken over; they rest.
        self.in_flight: Gradients | None = None
        # The same for an exchange.
        self.pushing: Future[Sequence[Receipt]] | None = None
        self.pulling: Future[Any] | None = None

    def push(self, gradients: Gradients, exchange: Callable[[], Sequence[Receipt]], *, pulls: bool) -> Gradients:
        """Begins to push sealed gradients, and to pull where that is one; returns an empty buffer to go on with."""
        assert self._spare is not None and self.pushing is None, "a push began while another was under way"
        self.pushing = self._threads.submit(exchange)
        if pulls:
            self.pulling = self.pushing
        self.in_flight = gradients
        return self._spare

    def pull(self, bring: Callable[[], object]) -> None:
        """Begins to pull."""
        self.pulling = self._threads.submit(bring)

    def over(self) -> tuple[bool, bool]:
        """Whether a push, and whether a pull, was under way and has ended."""
        pushed = self.pushing is not None and self.pushing.done()
        if self.pulling is self.pushing:
            return pushed, pushed
        return pushed, self.pulling is not None and self.pulling.done()

    def end(self, *, pushed: bool, pulled: bool) -> Sequence[Receipt] | None:
        """Takes over that they have ended; returns the push's receipts, and raises what was raised."""
        receipts: Sequence[Receipt] | None = None
        pushing, pulling = self.pushing, self.pulling
        if pushed and pulling is pushing:
            self.pulling = None
        if pushed and pushing is not None and self.in_flight is not None:
            # After an error too: the worker has tried for as long as it was told to.
            self.in_flight.clear()
            self.pushing, self._spare, self.in_flight = None, self.in_flight, None
            # Should this raise, a pull beside it stays to be taken over.
            receipts = pushing.value()
        if pulled and pulling is not None and pulling is not pushing:
            self.pulling = None
            pulling.value()
        return receipts

    def close(self) -> None:
        """Ends the threads, each after what it is doing."""
        self._threads.close()
