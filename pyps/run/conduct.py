"""How the workers and the shards of a run work together: the behaviour in force, rounds, pace, stalls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from pyps.core import aggregation, schedule, staleness
from pyps.core.aggregation import Aggregation
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import require_rate
from pyps.core.pacing import Free, Pacer
from pyps.core.recorder import Recorder
from pyps.core.roster import Roster
from pyps.core.schedule import Constant
from pyps.core.shard import Shard
from pyps.run.attendance import Attendance
from pyps.run.caveats import Caveats
from pyps.run.content import Content
from pyps.run.events import Events
from pyps.run.pacing import Pacing
from pyps.run.pending_account import PendingAccount
from pyps.run.pushes import Pushes
from pyps.run.schedule_owner import ScheduleOwner
from pyps.run.stalls import Stalls
from pyps.statistics import Statistics
from pyps_wire.errors import ScheduleOwned

if TYPE_CHECKING:
    from pyps.config import ServerConfig


@dataclass(frozen=True)
class Settled:
    """What a change of protocol made of the gradients that waited."""

    gradients: int
    updates: int


class Conduct:
    """Keeps protocol, pace and membership in step. Every method may be called from any thread.

    What completes rounds or settles gradients runs kernels under shards' locks: not for the event loop.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        attendance: Attendance,
        statistics: Statistics,
        events: Events,
        clock: Callable[[], float],
        recorder: Recorder | None,
    ):
        self._config = config
        self._attendance = attendance
        self._membership = attendance.membership
        self._statistics = statistics
        self._events = events
        self._clock = clock
        self.account = PendingAccount(config.max_pending_bytes, statistics=statistics, recorder=recorder)
        self.owner = ScheduleOwner()
        self.pacing = Pacing(None)
        self._caveats = Caveats()
        self.pushes = Pushes(
            attendance=attendance,
            statistics=statistics,
            events=events,
            clock=clock,
            account=self.account,
            owner=self.owner,
            pacing=self.pacing,
            caveats=self._caveats,
            logged=recorder is not None,
            behaviour=lambda: self.behaviour,
            on_update=lambda shard: self.on_update(shard),
            on_smaller_roster=lambda content, shard: self._complete(content, shard, self._membership.roster),
        )
        # Called after an update, with its shard.
        self.on_update: Callable[[Shard], None] = lambda shard: None
        # Held for one change, or one look at rounds, at a time; taken before any shard's lock.
        self._lock = Lock()
        # Guarded by _lock; read without it, since each is replaced as a whole.
        self.behaviour = config.behaviour
        self._content: Content | None = None
        self._stalls = Stalls(stall_seconds=config.stall_seconds)
        # The workers with whom rounds were looked at last.
        self._roster = Roster()
        self._told: tuple[str, ...] = ()

    def begin(self, content: Content) -> None:
        """Takes the shards in, which serve from now on."""
        with self._lock:
            self._content = content
            for shard in content.shards.values():
                self.account.note(shard)
            if content.initializer is None and not self._membership.expected_workers:
                # Whoever pushed to a round before the server ended is likely to come back.
                former: dict[int, set[str]] = {}
                for shard_id, shard in content.shards.items():
                    former.setdefault(content.parts[shard_id], set()).update(shard.contributors)
                # A replica pushes to each part of the model by one of its processes.
                self._membership.await_workers(max(map(len, former.values()), default=0))
            self.pacing.replace(self._new_pacer(content))
            self.pacing.excuse(self._membership.arrived())
            self.pacing.advanced(content.version_max)

    @property
    def aggregation(self) -> Aggregation:
        """The protocol in force, a warm-up before it included."""
        return self.behaviour.aggregation

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people should know about the behaviour with the workers that count, in sentences."""
        return self._warnings_with(self._membership.roster.num_expected)

    @property
    def warnings_of_a_change(self) -> tuple[str, ...]:
        """The same for whoever changes it; where nobody counts now, with the workers to expect or those known."""
        members = len(self._membership.names())
        return self._warnings_with(self._membership.roster.num_expected or self._membership.expected_workers or members)

    def _warnings_with(self, num_workers: int) -> tuple[str, ...]:
        # A server of a small model may hold none of its shards.
        shard = self._content.first if self._content is not None and self._content.shards else None
        return self._caveats.sentences(self.behaviour, shard, num_workers=num_workers)

    # What a change of membership brings.

    def departed(self, name: str) -> None:
        """Waits no longer for the step of a worker or replica; its rounds are completed by `complete_rounds`."""
        self.pacing.depart(name)
        if self.owner.release(name):
            self._events.add("owner", "the schedule of the learning rate has no owner now", worker=name)

    def complete_rounds(self) -> None:
        """Makes the updates that are due since other workers count."""
        with self._lock:
            content, before, roster = self._content, self._roster, self._membership.roster
            if content is None or roster is before:
                return
            self._roster = roster
            updates = sum(self._complete(content, shard, roster) for shard in content.shards.values())
        gone = ", ".join(sorted({*before.workers} - {*roster.workers}))
        if updates:
            if not self.aggregation.barrier:
                what = "gradients that waited became updates, as fewer workers count"
            elif gone:
                what = "rounds were completed without a worker that others waited for"
            else:
                what = "rounds were completed without workers that were expected"
            self._events.add("round", what, worker=gone, shards=updates, workers=roster.num_workers)

    def _look_for_stalls(self, now: float) -> None:
        """Stops counting workers that live and yet hold the others up for too long."""
        with self._lock:
            content, roster = self._content, self._membership.roster
            if content is None:
                return
            idle = self._stalls.idle(self._membership.alive(), now=now)
            rounds = set[str]()
            # Most of the time nobody is idle, and no lock is taken.
            # In the order of the rosters, each once.
            awaited = list(dict.fromkeys(name for of_part in content.rosters(roster) for name in of_part.awaited))
            for shard_id, shard in content.shards.items() if idle or awaited else ():
                if shard.num_pending:
                    rounds.update(shard.waiting_for(content.roster_of(shard_id, roster)))
            gate_holds = not rounds.isdisjoint(awaited) or self.pacing.gate_holds
            gate_stalled = self._stalls.look_at_gate(holds=gate_holds, now=now)
            waited_for = rounds.difference(awaited)
            stalled = self._stalls.look(waited_for & idle, self._membership, now=now)
        if gate_stalled:
            self._go_without_the_missing(", ".join(awaited or roster.awaited))
        for worker_id in stalled:
            if not self._membership.stall(worker_id):
                # It went meanwhile, or with another process of its replica.
                continue
            self._events.add(
                "stalled",
                "worker does not count until its next push: others waited too long for it",
                worker=worker_id,
                stall_seconds=self._config.stall_seconds,
                warning=True,
            )
            self.departed(self._membership.name_of(worker_id))
        for worker_id in self.pacing.set_aside(now=now, stall_seconds=self._config.stall_seconds):
            self._events.add(
                "stalled",
                "worker is not waited for until it asks for its next step: others waited too long for it",
                worker=worker_id,
                stall_seconds=self._config.stall_seconds,
                warning=True,
            )

    def _go_without_the_missing(self, awaited: str) -> None:
        """Opens the gate: expected workers that have not come count from their first push, as any other does."""
        alive = self._membership.names(alive=True)
        self._events.add(
            "stalled",
            "expected workers are waited for no longer, as they came too late; each counts from its first push",
            waited_for=", ".join(self.pacing.awaited(alive)) or awaited,
            stall_seconds=self._config.stall_seconds,
            warning=True,
        )
        self._membership.expect_no_more()
        self.pacing.open_gate()

    def waited_for_by(self, worker_id: str) -> tuple[str, ...]:
        """Whom a worker waits for that may not begin its next step yet."""
        alive = self._membership.names(alive=True)
        return self.pacing.awaited(alive) or self.pacing.waiting_for(self._membership.name_of(worker_id))

    def tick(self, now: float) -> None:
        """Does what time brings to the workers: leases, stalls, and the rounds that they then are left out of."""
        for name in self._attendance.expire(now):
            self.departed(name)
        content = self._content
        if content is None:
            return
        restored = content.initializer is None
        missing = any(of_part.missing for of_part in content.rosters(self._membership.roster))
        if restored and missing and now - content.ready_at > self._config.lease_seconds:
            # Workers of a restored run that live have said so by now.
            self._membership.expect_no_more()
            self.pacing.open_gate()
        self._look_for_stalls(now)
        self.complete_rounds()
        self._warn()

    def _warn(self) -> None:
        """Tells what people should know about the protocol, once, when the workers that count have settled."""
        warnings = self.warnings
        if warnings != self._told and self._membership.roster is self._roster:
            self._told = warnings
            for warning in warnings:
                self._events.add("warning", warning, warning=True)

    # What people change.

    def configure(
        self,
        *,
        protocol: str = "",
        staleness: str = "",
        learning_rate: float | None = None,
        schedule: str = "",
        num_servers: int,
    ) -> Settled:
        """Changes what is named, on all shards; everything is checked before anything changes.

        Gradients that wait for a protocol that goes become one update of each shard, by that protocol's rule.
        """
        staleness = staleness or aggregation.brought_policy(protocol)
        with self._lock:
            behaviour = self._changed(protocol=protocol, policy=staleness, schedule_text=schedule)
            asked = behaviour.aggregation
            asked.check_change(self.behaviour.aggregation)
            asked.check_servers(num_servers)
            for member in self._membership.alive():
                asked.check_worker(member.worker_id, member.parts, member.replica)
            if learning_rate is not None:
                require_rate(learning_rate)
                self._require_unowned("before the server's is changed")
            settled = self._adopt(behaviour, learning_rate=learning_rate)
        rate = "" if learning_rate is None else f"{learning_rate:g}"
        self._events.add(
            "configured",
            "settings changed",
            protocol=protocol and behaviour.aggregation.text,
            staleness=staleness and behaviour.staleness.text,
            schedule=schedule and behaviour.schedule.text,
            learning_rate=rate,
            gradients_settled=settled.gradients or "",
            updates_made=settled.updates or "",
        )
        return settled

    def adopt(self, behaviour: Behaviour) -> Settled:
        """Puts a behaviour in force on all shards, whatever they went by before."""
        with self._lock:
            return self._adopt(behaviour, learning_rate=None)

    def go_on(self, in_force: Behaviour, *, kept: Behaviour, told: Behaviour) -> None:
        """Puts in force what a restored run goes on with: what its checkpoint kept, or what the server was told."""
        self.adopt(in_force)
        if in_force != kept:
            what = "the server was told other settings than the checkpoint holds"
            self._events.add("configured", what, **in_force.texts)
        elif in_force != told:
            what = "the run keeps its checkpoint's settings where the server was told no others"
            self._events.add("configured", what, **kept.texts)

    # Helpers; those from here on are called under the lock.

    def expect(self, num_workers: int) -> None:
        """Waits for so many workers at the beginning, those that pushed or are gone included; 0 when unknown."""
        with self._lock:
            self._membership.expect(num_workers)
            self.pacing.expect(num_workers if self._membership.roster.missing else 0)
            self.pacing.excuse(self._membership.arrived())
        self._events.add("configured", "settings changed", expected_workers=num_workers)
        self.complete_rounds()

    def _changed(self, *, protocol: str, policy: str, schedule_text: str) -> Behaviour:
        old = self.behaviour
        changed = dataclasses.replace(
            old,
            aggregation=aggregation.parse(protocol) if protocol else old.aggregation,
            staleness=staleness.parse(policy) if policy else old.staleness,
            schedule=schedule.parse(schedule_text, epoch_examples=old.epoch_examples)
            if schedule_text
            else old.schedule,
        )
        roster, content = self._membership.roster, self._content
        for of_part in (roster,) if content is None else (roster, *content.rosters(roster)):
            changed.aggregation.check(of_part.num_expected)
        if schedule_text and changed.schedule.text != Constant.name:
            self._require_unowned("before the server gets a schedule")
        return changed

    def _require_unowned(self, what: str) -> None:
        if self.owner.worker_id:
            raise ScheduleOwned(
                f"worker {self.owner.worker_id!r} owns the schedule and sends its learning rates: end its scheduler"
                f" (or let it go on with owns_schedule=False) {what}"
            )

    def _adopt(self, behaviour: Behaviour, *, learning_rate: float | None) -> Settled:
        content, roster = self._content, self._membership.roster
        new_protocol = behaviour.aggregation != self.behaviour.aggregation
        self.behaviour = behaviour
        if content is None:
            return Settled(0, 0)
        gradients = updates = 0
        for shard in content.shards.values():
            gradients += shard.num_pending
            of_shard = content.roster_of(shard.shard_id, roster)
            made = shard.configure(behaviour=behaviour, learning_rate=learning_rate, roster=of_shard)
            updates += made
            self._updated(shard, made)
        if new_protocol:
            self.pacing.replace(self._new_pacer(content))
            self.pacing.excuse(self._membership.arrived())
        return Settled(gradients if new_protocol else 0, updates)

    def _complete(self, content: Content, shard: Shard, roster: Roster) -> int:
        made = shard.complete(content.roster_of(shard.shard_id, roster))
        self._updated(shard, made)
        return made

    def _updated(self, shard: Shard, made: int) -> None:
        self.account.note(shard)
        if made:
            self._statistics.updated(shard.shard_id, made, now=self._clock())
            self.pacing.advanced(shard.version)
            self.on_update(shard)

    def _new_pacer(self, content: Content) -> Pacer | None:
        # Nothing crosses between servers: the first alone grants steps.
        pacer = self.behaviour.aggregation.pacer() if content.server_index == 0 else None
        if pacer is None and self._config.start_together and content.server_index == 0:
            pacer = Free()
        if pacer is not None and self._membership.roster.missing:
            pacer.quorum = self._membership.expected_workers
        return pacer
