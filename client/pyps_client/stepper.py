"""What portions of data need of whatever trains on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from pyps_client.session import Session
from pyps_client.work import LeaseCall
from pyps_wire.work_pb2 import LeaseReply


class Stepper(Protocol):
    """One worker's steps, as its portions see them. Used by the thread that trains."""

    @property
    def session(self) -> Session:
        """The worker's membership in the run, connected."""

    @property
    def steps(self) -> int:
        """Minibatches handed in, empty steps included."""

    @property
    def steps_answered(self) -> int:
        """Minibatches, from the first on, that are done with: their gradients answered, refused or left out."""

    @property
    def finished(self) -> bool:
        """True when the run is over."""

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        """Asks for a portion, and in one for the parameters where the protocol hands out both under one mutex."""

    def tell_examples(self, count: int) -> None:
        """Says how many examples the minibatch that comes next has."""

    def end_portion_after(self, step: int) -> None:
        """Says that minibatch number `step`, from 0, is its portion's last."""

    def flush(self) -> None:
        """Pushes what has gathered and waits for the answer."""

    def idle(self) -> None:
        """Takes a step without a minibatch, where others wait for each worker's steps."""

    def finish(self) -> None:
        """Takes over that the run is over, and its last parameters."""

    def tell_over(self) -> None:
        """Says that a loop goes on although the run is over: once, or by RunFinished where a push would raise it."""


@runtime_checkable
class HasStepper(Protocol):
    """What can train on portions: RemoteOptimizer and Client are such."""

    @property
    def stepper(self) -> Stepper: ...


def others_wait(session: Session) -> bool:
    """True where the protocol in force makes workers wait for each other's steps: one that takes none holds them up."""
    return session.current_version_only or session.ask_to_proceed
