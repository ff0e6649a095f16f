"""Election of the worker, or replica, that sends the first parameters: one at a time, by lease."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from pyps_wire.errors import RunMismatch, Superseded

# An initialiser that is silent for longer may be replaced.
LEASE_SECONDS = 10.0


class Term(NamedTuple):
    """The turn of a worker or replica to initialise. `expires_at` is in seconds of the caller's clock."""

    number: int
    # The replica's name where it has several processes.
    worker_id: str
    incarnation: int
    expires_at: float


class Claim(NamedTuple):
    """An initialiser's identity, its term, and the run that it initialises on a server; equal in a whole replica."""

    run_id: str
    server_index: int
    term: int
    worker_id: str
    incarnation: int


class Election:
    """Admits one initialiser at a time until the run begins. The caller guards it.

    Server 0 elects one worker after another. Terms grow by one, so that it recognises messages of an earlier
    initialiser; after a restart `first_term` must be larger than all terms before. The other servers follow the terms
    of server 0, which receives Initialize last: until then a later term replaces an earlier one.
    """

    def __init__(self, *, lease_seconds: float, first_term: int = 1) -> None:
        self.lease_seconds = min(LEASE_SECONDS, lease_seconds)
        self._first_term = first_term
        self._term: Term | None = None
        # The newest run and term that a server other than the first knows.
        self._newest = ("", 0)
        # The run, None before there is one, and its initialiser, None for a checkpoint.
        self._run_id: str | None = None
        self._initializer: Claim | None = None

    @property
    def busy(self) -> bool:
        """True if a worker has the turn."""
        return self._term is not None or self._newest[1] > 0

    def elect(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        is_over: Callable[[str, int], bool] = lambda worker_id, incarnation: False,
        yields: bool = False,
    ) -> Term | None:
        """Return the worker's term if it has the turn, None if another has it or there is a run.

        A turn ends with its lease, or when `is_over` returns True for the worker's life. A worker that `yields` never
        has the first turn.
        """
        if self._run_id is not None or (yields and self._term is None):
            return None
        current, expires_at = self._term, now + self.lease_seconds
        if current is None:
            self._term = Term(self._first_term, worker_id, incarnation, expires_at)
        elif (current.worker_id, current.incarnation) == (worker_id, incarnation):
            self._term = current._replace(expires_at=expires_at)
        elif now > current.expires_at or is_over(current.worker_id, current.incarnation):
            self._term = Term(current.number + 1, worker_id, incarnation, expires_at)
        else:
            return None
        return self._term

    def open(self, claim: Claim, *, now: float, holding: object, version: int, workers_alive: int) -> bool:
        """Let the caller begin, or go on; return False where it has completed the run already.

        Raise Superseded when another has the turn, RunMismatch where the server holds a run (`holding`, in words) that
        may not be replaced. A run may be if it has no updates and server 0 has not completed it.
        """
        if self.is_done(claim):
            return False
        untouched = version == 0 and self._initializer is not None and claim.server_index > 0
        if self._run_id is not None and (not untouched or (claim.run_id != self._run_id and workers_alive)):
            raise RunMismatch(
                f"this server holds {holding} and cannot be initialised again: join it by name "
                f"(PYPS_RUN_ID={self._run_id}), or forget it with `pyps reset {shlex.quote(self._run_id)}`"
            )
        self.renew(claim, now=now)
        return True

    def is_done(self, claim: Claim) -> bool:
        """Return whether this initialisation has made the run; raise Superseded if another has."""
        if self._run_id is None or claim == self._initializer:
            return self._run_id is not None
        if claim.run_id == self._run_id and claim.server_index == 0:
            raise Superseded(f"another worker has initialised run {self._run_id!r}: say Hello again")
        return False

    def renew(self, claim: Claim, *, now: float) -> None:
        """Renew the initialiser's turn; raise Superseded if another has it."""
        term, mine = self._term, (claim.term, claim.worker_id, claim.incarnation)
        if claim.server_index > 0:
            current = claim.run_id != self._newest[0] or claim.term >= self._newest[1]
            if current:
                self._newest = claim.run_id, claim.term
        elif current := self._run_id is None and term is not None and term[:3] == mine:
            self._term = term._replace(expires_at=now + self.lease_seconds)
        if not current:
            raise Superseded(
                f"worker {claim.worker_id!r} is not (or no longer) the one that initialises this run: "
                f"term {claim.term} is over; say Hello again"
            )

    def stood_still(self, seconds: float) -> None:
        """Prolong the turn by the time in which the server was suspended."""
        if self._term is not None:
            self._term = self._term._replace(expires_at=self._term.expires_at + seconds)

    def done(self, run_id: str, initializer: Claim | None) -> None:
        """End the election: there is a run."""
        self._run_id, self._initializer = run_id, initializer
