"""Who may send the first parameters: one worker at a time, and nobody over a run that serves."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from pyps.core.election import Election, Term
from pyps.core.rule_settings import RuleSettings
from pyps.run.content import Content
from pyps.run.handshake import Holding
from pyps.run.initialization import Initialization, Opening
from pyps_wire.errors import RunMismatch, Superseded
from pyps_wire.partition import Partition

# An initialiser that is silent for so long has died: another takes its place.
ELECTION_LEASE_SECONDS = 10.0


class InitializationGate:
    """Lets one initialiser through. Guarded by its run's lock.

    On server 0 that is the elected worker. The other servers hold no election: they follow the terms of
    server 0, whose Initialize comes last and makes the run; until then a later term replaces an earlier one.
    """

    def __init__(self, *, lease_seconds: float, first_term: int):
        """`lease_seconds`: the workers' own, which may be shorter than an initialiser's."""
        self._election = Election(lease_seconds=min(ELECTION_LEASE_SECONDS, lease_seconds), first_term=first_term)
        self._newest_run = ""
        self._newest_term = 0
        # The one that goes on: the processes of a replica share it, each with a call of its own.
        self._begun: Initialization | None = None

    @property
    def lease_seconds(self) -> float:
        """How long an initialiser may be silent before another takes its place."""
        return self._election.lease_seconds

    @property
    def busy(self) -> bool:
        """Whether somebody has been given the turn."""
        return self._election.term is not None or self._newest_term > 0

    @property
    def num_bytes(self) -> int:
        """The size of the first parameters on their way in. May be read from any thread."""
        begun = self._begun
        return begun.num_bytes if begun is not None else 0

    def elect(self, name: str, incarnation: int, *, now: float, is_over: Callable[[str, int], bool]) -> Term | None:
        """Gives the turn to a worker of server 0, or to its replica; None when another has it.

        Another has it until its own turn's lease runs out, or `is_over` says that its life has ended.
        """
        return self._election.elect(name, incarnation, now=now, is_over=is_over)

    def stood_still(self, seconds: float) -> None:
        """Adds that time to the turn: the server could hear nobody."""
        self._election.stood_still(seconds)

    def renew(self, opening: Opening, *, now: float) -> None:
        """Notes that the initialiser is at work; Superseded when the turn has passed to another."""
        if opening.server_index == 0:
            term = self._election.term
            owner = (term.number, term.worker_id, term.incarnation) if term else None
            current = owner == opening.initializer and self._election.renew(opening.term, now=now)
        else:
            current = opening.run_id != self._newest_run or opening.term >= self._newest_term
            if current:
                self._newest_run, self._newest_term = opening.run_id, opening.term
        if not current:
            raise Superseded(
                f"worker {opening.name!r} is not (or no longer) the one that initialises this run: "
                f"term {opening.term} is over; say Hello again"
            )

    def admit(self, opening: Opening, plan: Partition, settings: RuleSettings) -> Initialization:
        """The initialisation that the caller, who has the turn, adds its shards to; an earlier one is thrown away."""
        shared = self._begun
        if (
            shared is not None
            and opening.replica
            and (shared.opening.run_id, shared.opening.initializer)
            == (
                opening.run_id,
                opening.initializer,
            )
        ):
            shared.join(opening, plan, settings)
            return shared
        if self._begun is not None:
            self._begun.abandon()
        self._begun = Initialization(opening, plan, settings)
        return self._begun

    def already_done(self, content: Content | None, opening: Opening) -> bool:
        """Whether this very initialisation has made the run; refuses a second one of the same run."""
        if content is None:
            return False
        same_run = opening.run_id == content.run_id
        if same_run and opening.initializer == content.initializer:
            return True
        if same_run and opening.server_index == 0:
            raise Superseded(f"another worker has initialised run {content.run_id!r}: say Hello again")
        return False

    def require_replaceable(
        self, content: Content | None, opening: Opening, *, holding: Holding, workers_alive: int
    ) -> None:
        """Refuses to initialise over anything but what server 0 has not made a run yet."""
        if content is None:
            return
        untouched = content.version_max == 0 and content.initializer is not None and opening.server_index > 0
        if not untouched or (opening.run_id != content.run_id and workers_alive):
            raise RunMismatch(
                f"this server holds {holding} and cannot be initialised again: join it by name "
                f"(PYPS_RUN_ID={content.run_id}), or forget it with `pyps reset {shlex.quote(content.run_id)}`"
            )

    def done(self) -> None:
        """Ends the election: the parameters are there."""
        self._begun = None
        self._election.done()
