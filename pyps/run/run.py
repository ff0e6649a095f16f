"""The run that a server holds: empty, initialised, finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Unpack

from pyps import __version__, logs
from pyps.core.behaviour import Behaviour
from pyps.core.election import Election
from pyps.core.gradient import Finding, Gradient, PushPlan, scan
from pyps.core.membership import Membership, WorkerInfo
from pyps.core.protocols import brought_policy
from pyps.core.protocols.base import Aggregation
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Pushed, Store
from pyps.run import handshake
from pyps.run.content import Content, Ending, ReadyContent, RunRecorder
from pyps.run.handshake import MEASUREMENT, Greeting, Holding, Opening, RunState
from pyps.run.initialization import Initialization, make_content
from pyps.run.observers import Events, Waits
from pyps.run.rounds import Changes, RoundController, Settled
from pyps.run_header import RunHeader, Snapshot
from pyps.statistics import Statistics
from pyps.work import WorkQueue
from pyps_wire.errors import NotInitialized, RunMismatch, ServerUnavailable, UnknownWorker

if TYPE_CHECKING:
    from pyps.config import ServerConfig
    from pyps.run_header import RestoredRun
    from pyps.storage.parameter_file import ParameterFile
    from pyps_wire.partition import Model

SOFTWARE = f"pyps {__version__}"

log = logs.get("pyps.run")


class Run:
    """One run, or the place for one. Every method may be called from any thread.

    `_lock` guards which run it is. Nobody holds it while a shard is updated or a call waits.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        recorder: RunRecorder | None = None,
    ):
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self.configured = RuleSettings.parse(config.optimizer) if config.optimizer else None
        self.started_at = clock()
        # Unix time at the start, or the newest life of a worker that a restored run knows, whichever is later.
        self._began_nanoseconds = time.time_ns()
        # The file whose values take the place of those that a worker sends first, if there is one.
        self.source: ParameterFile | None = None
        self.waits = Waits()
        self.events = Events(clock)
        if recorder is not None:
            self.events.on_event = lambda event: recorder.note(
                {"event": "run", "kind": event.kind, "message": event.message, "worker_id": event.worker}
            )
        self.on_ready: Callable[[], None] = lambda: None
        self.on_finished: Callable[[], None] = lambda: None
        # Where workers find the standby, once it can take over; "" without one. And what it is, in words.
        self.standby = ""
        # The workers that it was told.
        self.told: set[str] = set()
        # Who serves the run in place of this server; "" where it does so itself.
        self.elsewhere = ""
        self.about_standby: Callable[[], str] = lambda: ""
        self._lock = RLock()
        # Held while one content is made the run's; taken before _lock.
        self._initializing = Lock()
        # Guarded by _lock; read without it, since each is replaced as a whole.
        self._unavailable = ""
        self._clear(epoch=0)

    def _clear(self, *, epoch: int) -> None:
        config = self.config
        self.statistics = Statistics()
        self.membership = Membership(
            lease_seconds=config.lease_seconds,
            workers_max=config.max_workers,
            expected_workers=config.expected_workers,
            stall_seconds=config.stall_seconds,
        )
        self.rounds = RoundController(
            config,
            membership=self.membership,
            statistics=self.statistics,
            events=self.events,
            clock=self.clock,
            recorder=self.recorder,
        )
        # Guarded by _lock, as the incoming first parameters are.
        self.election = Election(
            lease_seconds=config.lease_seconds,
            # The other servers remember terms over a restart of this one.
            first_term=time.time_ns() // 1_000_000,
        )
        self.incoming: Initialization | None = None
        self.work = WorkQueue(
            stall_seconds=config.stall_seconds,
            batch_size_of=self._batch_size_in,
            accumulate=lambda: self._aggregation.accumulate,
            epochs_ahead=self._epochs_ahead,
            on_event=self.events.add,
            # A checkpoint may lack leases that were granted before the server ended.
            first_lease=time.time_ns() // 1_000,
        )
        self.rounds.on_gone = lambda worker_id, lost: self.work.release(worker_id, lost=lost)
        self._ending = Ending(config.stop_condition, content=lambda: self.content, on_end=self._ended)
        if config.stop_condition is not None:
            self.rounds.on_update = self._ending.after_update
        self.content = Content(run_id=config.run_id, epoch=epoch, settings=self.configured)

    # How workers come and go.

    def hello(self, greeting: Greeting) -> int:
        """Let a caller join, or refuse it with the reason.

        Return the term in which it is elected to send the first parameters, 0 where it is not.
        """
        handshake.check_caller(greeting, software=SOFTWARE)
        # A worker that joined while the server was empty belongs to this run, which it waited for.
        member = self.membership.get(greeting.worker_id)
        waited = member is not None and member.incarnation == greeting.incarnation
        if not (greeting.observer or waited):
            # This time does not go back where the machine's clock is set back.
            elapsed = round((self.clock() - self.started_at) * 1e9)
            now_nanoseconds = max(time.time_ns(), self._began_nanoseconds + elapsed)
            handshake.check_incarnation(greeting.incarnation, now_nanoseconds=now_nanoseconds)
        if not self.is_ready and not greeting.observer:
            # Not under the lock: to check a large model takes long. Where a run begins meanwhile, it is compared below.
            assert greeting.model is not None
            self._check_initialization(greeting, greeting.model, greeting.num_servers)
        now = self.clock()
        with self._lock:
            self.refuse_when_unavailable()
            content = self.content
            if isinstance(content, ReadyContent):
                handshake.check_joining(greeting, content, holding=self.holding(), waited=waited)
            elif greeting.observer:
                handshake.check_run_configured(greeting.run_id, configured=self.config.run_id)
            if greeting.observer:
                return 0
            greeting = handshake.with_parts(greeting, content.model, protocol=self._aggregation)
            process = greeting.host, greeting.process_id, greeting.device, greeting.software
            codecs = (greeting.gradient_codec, greeting.parameter_codec)
            pushed, pulled = (codec.name if codec is not None else "" for codec in codecs)
            info = WorkerInfo(*process, pushed, pulled, greeting.index)
            joined = self.membership.join(
                greeting.worker_id,
                greeting.incarnation,
                now=now,
                info=info,
                replica=greeting.replica,
                parts=greeting.parts,
                secret=greeting.secret,
            )
            self.rounds.carry_out(joined)
            if self.is_ready or greeting.server_index != 0:
                return 0
            term = self.election.elect(
                *(greeting.name, greeting.incarnation),
                now=now,
                is_over=self.membership.is_over,
                yields=greeting.yields,
            )
            if term is None:
                return 0
            log.info("worker elected to initialise the run", worker=greeting.name, term=term.number)
            return term.number

    def position_for(self, greeting: Greeting) -> bytes:
        """Return where the data of the worker stood whose place the caller takes; b"" for none."""

        def is_alive(worker_id: str) -> bool:
            member = self.membership.get(worker_id)
            return member is not None and member.alive

        def applied(worker_id: str, incarnation: int) -> int:
            shards = self.content.shards.values()
            newest = [shard.newest_sequence(worker_id, incarnation) for shard in shards]
            # The others are of parts of the model that the worker does not hold.
            return min((sequence for sequence in newest if sequence >= 0), default=-1)

        if greeting.observer:
            return b""
        caller = greeting.worker_id, greeting.index, greeting.incarnation
        return self.rounds.positions.of_predecessor(*caller, is_alive=is_alive, applied=applied)

    def heartbeat(
        self,
        run_id: str,
        worker_id: str,
        incarnation: int,
        secret: bytes = b"",
        *,
        clock: int,
        scalars: Mapping[str, float],
    ) -> bool:
        """Renew a worker's lease; return False for another run, or a worker that the run does not know."""
        if run_id not in ("", self.content.run_id):
            return False
        now, member = self.clock(), self.membership.get(worker_id)
        before = member.scalars if member is not None else {}
        try:
            heard = self.membership.heard(worker_id, incarnation, now=now, clock=clock, scalars=scalars, secret=secret)
        except UnknownWorker:
            return False
        self.rounds.carry_out(heard)
        if self.recorder is not None and scalars != before:
            self.recorder.note({"event": "report", "worker_id": worker_id, "clock": clock, "scalars": dict(scalars)})
        return True

    def heard(self, run_id: str, worker_id: str, incarnation: int, secret: bytes = b"") -> None:
        """Count a worker's call as a heartbeat; refuse another run, an unknown worker and a wrong secret."""
        self._require_run(self._require_content(), run_id)
        self.rounds.carry_out(self.membership.heard(worker_id, incarnation, now=self.clock(), secret=secret))

    def require_named(self, run_id: str) -> None:
        """Refuse a caller that names another run; it may name none."""
        if self.is_ready:
            self._require_run(self.content, run_id or None)

    def leave(
        self, run_id: str, worker_id: str, incarnation: int, secret: bytes = b"", *, failed: bool, message: str
    ) -> int:
        """End a worker's membership; return how many are alive. Call `rounds.complete_rounds` next."""
        # Before there is a run, its first workers wait for parameters, or send them.
        if not self.is_ready or run_id == self.content.run_id:
            now = self.clock()
            left = self.membership.leave(worker_id, incarnation, now=now, failed=failed, message=message, secret=secret)
            self.rounds.carry_out(left)
        return self.membership.num_alive

    # The first parameters.

    def begin_initialize(self, opening: Opening) -> Initialization | None:
        """Open an initialisation; return None when this one is complete already."""
        handshake.check_opening(opening)
        self.membership.require_own(opening.worker_id, opening.incarnation, opening.secret, replica=opening.replica)
        with self._lock:
            if self._already_initialized(opening):
                return None
        plan = opening.partition
        settings = self._check_initialization(opening, plan.model, plan.num_servers)
        plan.of_server(opening.server_index)
        with self._lock:
            if self._already_initialized(opening):
                return None
            before = self.incoming
            if before is not None and opening.replica and before.opening.claim == opening.claim:
                before.join(opening, settings)
                return before
            if before is not None:
                before.abandon()
            self.incoming = Initialization(opening, settings)
            return self.incoming

    def renew_term(self, opening: Opening) -> None:
        """Prolong the initialiser's turn; raise Superseded if another has it, ReplicaLost if its replica is out."""
        self.membership.require_replica(opening.replica, opening.incarnation)
        with suppress(UnknownWorker):
            # It may take longer than its lease.
            heard = self.membership.heard(
                opening.worker_id, opening.incarnation, now=self.clock(), secret=opening.secret
            )
            self.rounds.carry_out(heard)
        with self._lock:
            # Another call may have completed the initialisation meanwhile.
            if not self.election.is_done(opening.claim):
                self.election.renew(opening.claim, now=self.clock())

    def commit(self, initialization: Initialization) -> None:
        """Make the collected parameters the run's, if they are complete, and begin to serve it."""
        with self._lock:
            states = initialization.take()
        if states is None:
            return
        try:
            opening, settings, epoch = initialization.opening, initialization.settings, self.content.epoch
            if (source := self.source) is not None:
                # A model is never held twice.
                for shard_id in states:
                    states[shard_id] = replace(states[shard_id], parameters=source.values(opening.partition, shard_id))
                source.log_unused(opening.partition.model)
            content = make_content(
                *(opening, settings, states),
                rounds=self.rounds,
                epoch=epoch,
                now=self.clock(),
                origin=f"begun with {source.path}" if source else f"begun by {opening.name}",
            )
            with self._initializing:
                with self._lock:
                    if self._already_initialized(opening):
                        return
                # Not under the lock: it writes to disk.
                self._begin_log(content)
                with self._lock:
                    if self._already_initialized(opening):
                        return
                    self._set_content(content)
        except BaseException:
            # The parameters are gone: the next try of the replica's processes must not join this one.
            initialization.abandon()
            with self._lock:
                if self.incoming is initialization:
                    self.incoming = None
            raise
        self.on_ready()

    def restore(self, restored: RestoredRun) -> None:
        """Restore a checkpoint under a new epoch; refuse one that contradicts the server's flags.

        The checkpoint's settings stay in force, except those that the flags set to other values than before.
        """
        header = restored.header
        handshake.check_restoring(header, run_id=self.config.run_id, configured=self.configured)
        configured, kept = self.rounds.behaviour, Behaviour.parse(**header.behaviour)
        before: Mapping[str, object] = dict(header.configured)
        changed = {
            name: said for name, said in configured.texts.items() if self._is_configured(name) and said != before[name]
        }
        texts: dict[str, Any] = {**kept.texts, **changed}
        in_force = Behaviour.parse(**texts)
        in_force.aggregation.check_servers(header.num_servers)
        in_force.aggregation.check_change(kept.aggregation)
        with self._lock:
            # Waiting gradients are settled by the protocol that parked them, where the flags now name another.
            self.rounds.behaviour = kept
            lives = (life.incarnation for state in restored.shards.values() for life in state.ledger.entries)
            self._began_nanoseconds = max([self._began_nanoseconds, *lives])
            settings, states, epoch = header.optimizer, dict(restored.shards), header.epoch + 1
            version = max((state.version for state in states.values()), default=0)
            content = make_content(
                *(header, settings, states),
                rounds=self.rounds,
                epoch=epoch,
                now=self.clock(),
                origin=f"{'resumed from a checkpoint' if restored.is_durable else 'taken over'} at update {version}",
            )
            for shard in content.shards.values() if not restored.is_durable else ():
                shard.durable_version = 0
            if restored.machine is not None:
                content.machine.restore(restored.machine)
            if restored.work is not None:
                self.work.restore(restored.work)
            self.rounds.positions.restore(restored.positions)
            if restored.workers is not None:
                known, expected_workers = restored.workers
                self.membership.restore(known, expected_workers=expected_workers, now=self.clock())
            self._begin_log(content)
            self._set_content(content, former_workers=restored.num_workers)
        self.rounds.resume(in_force, kept=kept, configured=configured)
        self.on_ready()

    # Pushes, pulls and time.

    def scan(self, gradient: Gradient, shard_id: int, *, run_id: str | None = None) -> Finding:
        """Scan one part of a push for NaN and infinity, before any part of it is applied.

        Raises as `push` does for a part that does not fit. Scan all parts (several threads may), then push each with
        `finding=first_of(findings)`: if one part is not finite, every shard refuses its part (NOT_FINITE).
        """
        shard = self._serving(run_id).shard(shard_id)
        return scan(gradient, shard_id=shard_id, shard_length=shard.length)

    def push(self, plan: PushPlan, *, run_id: str | None = None, finding: Finding | None = None) -> Pushed:
        """Handle one pushed shard; see `Shard.push`. `run_id` None trusts the caller to mean this run.

        Parameters in the reply are counted and logged as a pull of the worker.
        """
        content = self.content
        # The usual case first: a small push takes microseconds.
        if (
            not isinstance(content, ReadyContent)
            or self._unavailable
            or (run_id is not None and run_id != content.run_id)
        ):
            content = self._serving(run_id)
        return self.rounds.push(content, plan, finding=finding)

    def push_whole(
        self, plans: Sequence[PushPlan], *, run_id: str | None = None, finding: Finding | None = None
    ) -> list[Pushed]:
        """Handle all parts of one push as one; see `RoundController.push_whole`."""
        return self.rounds.push_whole(self._serving(run_id), plans, finding=finding)

    def may_proceed(
        self,
        run_id: str,
        worker_id: str,
        incarnation: int,
        secret: bytes = b"",
        *,
        clock: int,
        wake: Callable[[], None],
        again: bool = False,
    ) -> bool:
        """Return whether a worker may begin its next step; if not, `wake` is called when the call should ask again.

        The worker's call renews its lease. A call that waited and asks `again` does not: it raises WaitTimedOut where
        the lease ran out meanwhile.
        """
        self._serving(run_id)
        if again:
            self.membership.require_alive(worker_id, incarnation)
        else:
            heard = self.membership.heard(worker_id, incarnation, now=self.clock(), clock=clock, secret=secret)
            self.rounds.carry_out(heard)
        if self._ending.over:
            return True
        return self.rounds.may_proceed(worker_id, clock=clock, wake=wake)

    def configure(self, *, validate_only: bool = False, **changes: Unpack[Changes]) -> Settled:
        """Change the named settings on all shards while the run goes on; see `RoundController.configure`."""
        settled = self.rounds.configure(self._require_content(), validate_only=validate_only, **changes)
        # Calls may wait for something that no longer comes.
        self.waits.wake_all()
        return settled

    def shards_to_pull(
        self,
        run_id: str,
        worker_id: str,
        incarnation: int,
        secret: bytes = b"",
        *,
        observer: bool,
        shard_ids: Iterable[int],
    ) -> list[Store]:
        """Return the named shards, or all that the caller may read; renew a worker's lease."""
        content = self._require_content()
        if observer:
            handshake.check_run(run_id, self.holding(), observer=True)
            return [content.shard(shard_id) for shard_id in shard_ids] or content.vectors
        self.heard(run_id, worker_id, incarnation, secret)
        shards = [content.shard(shard_id) for shard_id in shard_ids]
        member = self.membership.get(worker_id) if self.membership.parted else None
        if member is None:
            return shards or content.vectors
        for shard in shards:
            self.membership.require_part(worker_id, shard.shard_id, content.parts[shard.shard_id])
        return shards or [shard for shard in content.vectors if member.holds(content.parts[shard.shard_id])]

    def stood_still(self, seconds: float) -> None:
        """Prolong all leases by the time in which the server was suspended."""
        self.rounds.carry_out(self.membership.stood_still(seconds, now=self.clock()))
        with self._lock:
            self.election.stood_still(seconds)

    def tick(self, now: float | None = None) -> None:
        """Expire silent workers, end a run whose time is over, forget one that measured.

        It may run kernels, where rounds complete without a worker: not for the event loop.
        """
        now, content = self.clock() if now is None else now, self.content
        self.rounds.tick(now)
        self.work.tick(now)
        if isinstance(content, ReadyContent):
            self._ending.after_seconds(now - content.ready_at)
            if self.measures and self.membership.done(expected_workers=1):
                self.reset(content.run_id)

    def finish(self, reason: str = "stopped on request") -> None:
        """End the run: refuse pushes and let workers stop; pulls go on."""
        if self.is_ready:
            self._ending.finish(reason)

    def refuse(self, reason: str) -> None:
        """Refuse all calls from now on, for this reason, and end waiting calls; "" ends that."""
        with self._lock:
            self._unavailable = reason
        self.waits.wake_all()

    def reset(self, run_id: str, *, validate_only: bool = False) -> None:
        """Forget the run of that name: the server is empty afterwards."""
        with self._lock:
            content = self.content
            if not self.is_ready:
                raise NotInitialized("this server holds no run: there is nothing to reset")
            if run_id != content.run_id:
                raise RunMismatch(f"this server holds {self.holding()}, not run {run_id!r}: name the run to reset")
            if validate_only:
                return
            # Versions of the forgotten run mean nothing in the next.
            self._clear(epoch=content.epoch + 1)
        for shard in content.shards.values():
            shard.finish()
        self.waits.wake_all()
        self.events.add("reset", "run reset", run=run_id)

    # State.

    @property
    def state(self) -> RunState:
        """The state of the server and its run."""
        if self._unavailable:
            return RunState.STANDBY if self.elsewhere else RunState.DRAINING
        if self._ending.over:
            return RunState.FINISHED
        if self.is_ready:
            return RunState.READY
        return RunState.INITIALIZING if self.election.busy else RunState.EMPTY

    @property
    def is_ready(self) -> bool:
        """True once the run is initialised or restored."""
        return isinstance(self.content, ReadyContent)

    @property
    def measures(self) -> bool:
        """True for the run of a `pyps bench`, of which nothing is kept."""
        return MEASUREMENT.fullmatch(self.content.run_id) is not None

    @property
    def mutex(self) -> Lock | None:
        """Held for all shards of a push or a pull, where the protocol wants one mutex for the model."""
        return self.content.mutex if self.is_ready and self._aggregation.whole_model else None

    def holding(self) -> Holding:
        """Return the run held, for refusals."""
        last, now = self.statistics.last_update, self.clock()
        return Holding(self.content.run_id, self.content.version_max, None if last is None else now - last)

    @property
    def done(self) -> bool:
        """True once at least one worker, and as many as expected, have joined, and all are gone."""
        return not self.measures and self.membership.done(expected_workers=self.membership.expected_workers)

    @property
    def workers_finished(self) -> bool:
        """True once the run is done and each worker finished, in any of its lives."""
        return not self.measures and self.membership.finished(expected_workers=self.membership.expected_workers)

    def snapshot(self) -> Snapshot:
        """Return the run for a checkpoint."""
        # The queue before the shards: an example is trained twice rather than lost.
        work = None if self.work.spec is None else self.work.state()
        positions, content = self.rounds.positions.state(), self._require_content()
        return Snapshot(self.header_of(content), dict(content.shards), content.machine, work, positions)

    def header_of(self, content: ReadyContent) -> RunHeader:
        return RunHeader(
            run_id=content.run_id,
            epoch=content.epoch,
            server_index=content.server_index,
            partition=content.partition,
            optimizer=content.settings,
            behaviour=self.rounds.behaviour.texts,
            configured=self.config.behaviour.texts,
        )

    # Helpers.

    @property
    def _aggregation(self) -> Aggregation:
        return self.rounds.behaviour.aggregation

    def _batch_size_in(self, epoch: int) -> int:
        """Return the schedule's minibatch in that pass over the data; 0 if it has none."""
        growth = self.rounds.behaviour.batch_growth
        return growth.size(epoch * growth.epoch_examples) if growth else 0

    def _epochs_ahead(self) -> int:
        """Return how many epochs of shared data free workers may begin ahead; none where steps wait for others."""
        return 0 if self._aggregation.barrier or self.rounds.steps.asks else self.config.epochs_ahead

    def _require_content(self) -> ReadyContent:
        content = self.content
        if not isinstance(content, ReadyContent):
            raise NotInitialized(
                f"this server holds no parameters yet (it is {self.state.name.lower()}): "
                "a worker's Hello and Initialize come first"
            )
        return content

    def _serving(self, run_id: str | None) -> ReadyContent:
        """Return the content, where the server serves the caller's run; None trusts the caller to mean this one."""
        content = self._require_content()
        self.refuse_when_unavailable()
        self._require_run(content, run_id)
        return content

    def _require_run(self, content: Content, run_id: str | None) -> None:
        if run_id is not None and run_id != content.run_id:
            handshake.check_run(run_id or "(none)", self.holding(), observer=False)

    def refuse_when_unavailable(self) -> None:
        """Raise ServerUnavailable on a server that ends, or that does not serve yet."""
        if self._unavailable:
            raise ServerUnavailable(self._unavailable)

    def _is_configured(self, name: str) -> bool:
        """Return whether a flag of this server sets that value, or a protocol's name implies it."""
        if name == "staleness" and self._is_configured("protocol") and brought_policy(self.config.protocol):
            return True
        return name in self.config.given or getattr(self.config, name) != getattr(type(self.config), name)

    def _already_initialized(self, opening: Opening) -> bool:
        """Return whether the initialisation is complete; refuse a worker without the turn."""
        self.refuse_when_unavailable()
        self.membership.require_replica(opening.replica, opening.incarnation)
        return not self.election.open(
            opening.claim,
            now=self.clock(),
            holding=self.holding(),
            version=self.content.version_max,
            workers_alive=self.membership.num_alive,
        )

    def _check_initialization(self, caller: Greeting | Opening, model: Model, num_servers: int) -> RuleSettings:
        if self.source is not None:
            self.source.check(model)
        return handshake.check_initialization(
            *(caller, model, num_servers), config=self.config, configured=self.configured, protocol=self._aggregation
        )

    def _begin_log(self, content: ReadyContent) -> None:
        if self.recorder is not None:
            self.recorder.begin(self.header_of(content), content.shards)

    def _set_content(self, content: ReadyContent, *, former_workers: int = 0) -> None:
        self.rounds.begin(content, former_workers=former_workers)
        self.content = content
        self.election.done(content.run_id, content.initializer)
        self.incoming = None
        for shard in content.shards.values():
            # A restored run may have reached its end already.
            self._ending.after_update(shard)

    def _ended(self, reason: str) -> None:
        self.waits.wake_all()
        self.on_finished()
        self.events.add(
            "finished", "run finished", run=self.content.run_id, version=self.content.version_max, reason=reason
        )
