"""Who sends the first parameters: one worker at a time, by lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Term:
    """One worker's turn to initialise, or one replica's. `expires_at` is in seconds of the caller's clock."""

    number: int
    # The replica's name where it has several processes.
    worker_id: str
    incarnation: int
    expires_at: float


class Election:
    """Gives one worker after the other the turn, until initialisation is done. The caller guards it.

    Terms grow by one, so that what an earlier initialiser still sends is told apart from the present one's. Where the
    electing process may start anew, `first_term` must be larger than all terms of its former life.
    """

    def __init__(self, *, lease_seconds: float, first_term: int = 1) -> None:
        self.lease_seconds = lease_seconds
        self._first_term = first_term
        self._term: Term | None = None
        self._done = False

    @property
    def term(self) -> Term | None:
        """The latest term; it may have run out."""
        return self._term

    def elect(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        is_over: Callable[[str, int], bool] = lambda worker_id, incarnation: False,
    ) -> Term | None:
        """Returns the worker's term when the turn is its own, None when it is another's or all is done.

        A turn is over with its lease, or as soon as `is_over` says that of the worker's life.
        """
        if self._done:
            return None
        current, expires_at = self._term, now + self.lease_seconds
        if current is None:
            self._term = Term(self._first_term, worker_id, incarnation, expires_at)
        elif (current.worker_id, current.incarnation) == (worker_id, incarnation):
            self._term = replace(current, expires_at=expires_at)
        elif now > current.expires_at or is_over(current.worker_id, current.incarnation):
            self._term = Term(current.number + 1, worker_id, incarnation, expires_at)
        else:
            return None
        return self._term

    def renew(self, number: int, *, now: float) -> bool:
        """Prolongs the term; False when it is no longer the current one."""
        if self._term is None or not self.is_current(number):
            return False
        self._term = replace(self._term, expires_at=now + self.lease_seconds)
        return True

    def stood_still(self, seconds: float) -> None:
        """Adds that time to the term: the caller could hear nobody."""
        if self._term is not None:
            self._term = replace(self._term, expires_at=self._term.expires_at + seconds)

    def is_current(self, number: int) -> bool:
        """Whether that term has not been followed by another, and initialisation is still to be done."""
        return not self._done and self._term is not None and self._term.number == number

    def done(self) -> None:
        """Ends the election: the parameters are there."""
        self._done = True
