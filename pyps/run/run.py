"""The run that a server holds, from empty over initialised to finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

from pyps import __version__, logs
from pyps.core.aggregation import Aggregation, brought_policy
from pyps.core.behaviour import Behaviour
from pyps.core.election import Election
from pyps.core.gradient import Finding, Gradient, scan
from pyps.core.membership import Membership, WorkerInfo
from pyps.core.plan import PushPlan
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Pushed, Store
from pyps.run import handshake
from pyps.run.content import Content, Ending, ReadyContent, RunRecorder
from pyps.run.handshake import Greeting, Holding, Opening, Pulse, RunState, Welcome, is_measurement
from pyps.run.initialization import ContentFactory, Initialization
from pyps.run.observers import Events, Waits
from pyps.run.rounds import RoundController, Settled
from pyps.run_header import RunHeader, Snapshot
from pyps.statistics import Statistics
from pyps.work import WorkQueue
from pyps_wire.errors import NotInitialized, RunMismatch, ServerUnavailable, UnknownWorker

if TYPE_CHECKING:
    from pyps.config import ServerConfig
    from pyps.run_header import RestoredRun

SOFTWARE = f"pyps {__version__}"

log = logs.get("pyps.run")


class Run:
    """One run, or the place for one. Every method may be called from any thread.

    `_lock` guards which run it is; it is never held while a shard is updated or a caller waited for.
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
        self.told = RuleSettings.parse(config.optimizer) if config.optimizer else None
        self.started_at = clock()
        self.waits = Waits()
        self.events = Events(clock)
        self.on_ready: Callable[[], None] = lambda: None
        self._lock = RLock()
        # Held while one content is made the run's; taken before _lock.
        self._initializing = Lock()
        # Guarded by _lock; read without it, since each is replaced as a whole.
        self._draining = False
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
        # Guarded by _lock, as is what comes in of the first parameters.
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
            # A checkpoint may not know of leases that were given out before the server ended.
            first_lease=time.time_ns() // 1_000,
        )
        self.rounds.on_gone = lambda worker_id, lost: self.work.release(worker_id, lost=lost)
        self._ending = Ending(config.stop_condition, on_end=self._ended)
        if config.stop_condition is not None:
            self.rounds.on_update = partial(self._look_for_the_end, self._ending)
        self.content = Content(run_id=config.run_id, epoch=epoch, settings=self.told)

    # How workers come and go.

    def hello(self, greeting: Greeting) -> Welcome:
        """Takes a caller in, or refuses it with the reason; elects it where somebody has to initialise."""
        handshake.check_caller(greeting, software=SOFTWARE, now_nanoseconds=time.time_ns())
        if not self.is_ready and not greeting.observer:
            # Not under the lock: to cut a large model takes long. Who finds a run there after all is compared with it.
            handshake.check_initialization(greeting, config=self.config, told=self.told, protocol=self._aggregation)
        now = self.clock()
        with self._lock:
            self._refuse_when_draining()
            content = self.content
            if isinstance(content, ReadyContent):
                # Who came while the server was empty waited for the first parameters: it is of this run.
                member = self.membership.get(greeting.worker_id)
                waited = member is not None and member.incarnation == greeting.incarnation
                handshake.check_joining(greeting, content, holding=self.holding(), waited=waited)
            elif greeting.observer:
                handshake.check_run_told(greeting.run_id, told=self.config.run_id)
            if greeting.observer:
                return Welcome()
            greeting = handshake.with_parts(greeting, content.model, protocol=self._aggregation)
            info = WorkerInfo(greeting.host, greeting.process_id, greeting.device, greeting.software)
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
                return Welcome()
            is_over = self.membership.is_over
            term = self.election.elect(greeting.name, greeting.incarnation, now=now, is_over=is_over)
            if term is None:
                return Welcome()
            log.info("worker elected to initialise the run", worker=greeting.name, term=term.number)
            return Welcome(initialize=True, term=term.number)

    def heartbeat(
        self,
        run_id: str,
        worker_id: str,
        incarnation: int,
        secret: bytes = b"",
        *,
        clock: int,
        scalars: Mapping[str, float],
    ) -> Pulse:
        """Renews a worker's lease and tells what the server wants of it."""
        known = run_id == self.content.run_id or not run_id
        try:
            if known:
                now = self.clock()
                heard = self.membership.heard(
                    worker_id, incarnation, now=now, clock=clock, scalars=scalars, secret=secret
                )
                self.rounds.carry_out(heard)
        except UnknownWorker:
            known = False
        state, content = self.state, self.content
        return Pulse(known, state == RunState.FINISHED, state, content.epoch, content.version_max)

    def heard(self, run_id: str, worker_id: str, incarnation: int, secret: bytes = b"") -> None:
        """Takes a worker's call as a heartbeat; refuses one of another run, of an unknown worker or not its own."""
        self._require_run(self._require_content(), run_id)
        self.rounds.carry_out(self.membership.heard(worker_id, incarnation, now=self.clock(), secret=secret))

    def require_named(self, run_id: str) -> None:
        """Refuses a caller that names another run; one may name none, as while nobody knew its name."""
        if self.is_ready:
            self._require_run(self.content, run_id or None)

    def leave(
        self, run_id: str, worker_id: str, incarnation: int, secret: bytes = b"", *, failed: bool, message: str
    ) -> int:
        """Ends a worker's membership; returns how many are left alive. `rounds.complete_rounds` is to follow."""
        # Before there is a run, whoever waits for its parameters, or sends them, is of the run to come.
        if not self.is_ready or run_id == self.content.run_id:
            now = self.clock()
            left = self.membership.leave(worker_id, incarnation, now=now, failed=failed, message=message, secret=secret)
            self.rounds.carry_out(left)
        return self.membership.num_alive

    # How the first parameters come in.

    def begin_initialize(self, opening: Opening) -> Initialization | None:
        """Opens an initialisation; None when this very one is done already."""
        handshake.check_opening(opening)
        self.membership.require_own(opening.worker_id, opening.incarnation, opening.secret, replica=opening.replica)
        with self._lock:
            if self._already_initialized(opening):
                return None
        told, protocol = self.told, self._aggregation
        plan, settings = handshake.check_initialization(opening, config=self.config, told=told, protocol=protocol)
        plan.of_server(opening.server_index)
        with self._lock:
            if self._already_initialized(opening):
                return None
            before = self.incoming
            if before is not None and opening.replica and before.opening.claim == opening.claim:
                before.join(opening, plan, settings)
                return before
            if before is not None:
                before.abandon()
            self.incoming = Initialization(opening, plan, settings)
            return self.incoming

    def renew_term(self, opening: Opening) -> None:
        """Prolongs the initialiser's turn; Superseded when it has passed to another, ReplicaLost when it is out."""
        self.membership.require_replica(opening.replica, opening.incarnation)
        with suppress(UnknownWorker):
            # It may be at it for longer than its lease.
            heard = self.membership.heard(
                opening.worker_id, opening.incarnation, now=self.clock(), secret=opening.secret
            )
            self.rounds.carry_out(heard)
        with self._lock:
            # Another call may have brought the last shards meanwhile.
            if not self.election.is_done(opening.claim):
                self.election.renew(opening.claim, now=self.clock())

    def commit(self, initialization: Initialization) -> None:
        """Makes the collected parameters the run's, if all are there: from now on it serves."""
        with self._lock:
            received = initialization.take()
        if received is None:
            return
        content = self._factory(self.content.epoch).first(initialization, received, now=self.clock())
        with self._initializing:
            with self._lock:
                if self._already_initialized(initialization.opening):
                    return
            # Not under the lock: it takes as long as the disk does.
            self._begin_log(content)
            with self._lock:
                if self._already_initialized(initialization.opening):
                    return
                self._set_content(content)
        self.on_ready()

    def restore(self, restored: RestoredRun) -> None:
        """Goes on from a checkpoint under a new epoch; refuses one that contradicts what the server was told.

        It goes on as it was: with what was changed meanwhile, and what the server is not told anew, in force.
        """
        header = restored.header
        handshake.check_restoring(header, run_id=self.config.run_id, told=self.told)
        told, kept = self.rounds.behaviour, Behaviour.parse(**header.behaviour)
        before: Mapping[str, object] = dict(header.told)
        anew = {name: said for name, said in told.texts.items() if self._is_told(name) and said != before[name]}
        texts: dict[str, Any] = {**kept.texts, **anew}
        in_force = Behaviour.parse(**texts)
        in_force.aggregation.check_servers(header.num_servers)
        in_force.aggregation.check_change(kept.aggregation)
        with self._lock:
            # Gradients that wait are settled by the protocol that kept them, should another be told now.
            self.rounds.adopt(kept)
            content = self._factory(header.epoch + 1).restored(restored, now=self.clock())
            if restored.work is not None:
                self.work.restore(restored.work)
            self._begin_log(content)
            self._set_content(content)
        self.rounds.go_on(in_force, kept=kept, told=told)
        self.on_ready()

    # How the run moves.

    def scan(self, gradient: Gradient, shard_id: int, *, run_id: str | None = None) -> Finding:
        """Looks through one part of a push that is to be taken as a whole or not at all, and changes nothing.

        Raises as `push` does for a part that does not fit. Scan all parts (several threads may), then push each
        with `finding=first_of(findings)`: where one of them holds NaN or infinity every shard refuses
        its part (NOT_FINITE), and no part is scanned twice.
        """
        shard = self._serving(run_id).shard(shard_id)
        return scan(gradient, shard_id=shard_id, shard_length=shard.length)

    def push(self, plan: PushPlan, *, run_id: str | None = None, finding: Finding | None = None) -> Pushed:
        """Handles one pushed shard; see `Shard.push`. `run_id` None trusts the caller to mean this run.

        Parameters that it brings are counted and logged as a pull of the worker.
        """
        content = self.content
        # The usual case first: a small push is over in no time.
        if not isinstance(content, ReadyContent) or self._draining or (run_id is not None and run_id != content.run_id):
            content = self._serving(run_id)
        return self.rounds.push(content, plan, finding=finding)

    def push_whole(
        self, plans: Sequence[PushPlan], *, run_id: str | None = None, finding: Finding | None = None
    ) -> list[Pushed]:
        """Handles all parts of one push as one; see `RoundController.push_whole`."""
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
        """Whether a worker may begin its next step; where not, `wake` is called when it is worth asking again.

        The worker's call renews its lease. To ask `again` for a call that has waited is none: it raises
        WaitTimedOut where the worker's lease ran out meanwhile.
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

    def configure(
        self,
        *,
        protocol: str = "",
        staleness: str = "",
        learning_rate: float | None = None,
        schedule: str = "",
        validate_only: bool = False,
    ) -> Settled:
        """Changes what is named, on all shards, while the run goes on; see `RoundController.configure`."""
        content = self._require_content()
        settled = self.rounds.configure(
            protocol=protocol,
            staleness=staleness,
            learning_rate=learning_rate,
            schedule=schedule,
            num_servers=content.partition.num_servers,
            validate_only=validate_only,
        )
        # Whoever waits may wait for something that no longer comes.
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
        """The shards that a caller may read, those named or all that it may; a worker's lease is renewed."""
        content = self._require_content()
        if observer:
            handshake.check_run(run_id, self.holding(), observer=True)
            return [content.shard(shard_id) for shard_id in shard_ids] or list(content.shards.values())
        self.heard(run_id, worker_id, incarnation, secret)
        shards = [content.shard(shard_id) for shard_id in shard_ids]
        member = self.membership.get(worker_id) if self.membership.parted else None
        if member is None:
            return shards or list(content.shards.values())
        for shard in shards:
            self.membership.require_part(worker_id, shard.shard_id, content.parts[shard.shard_id])
        return shards or [shard for i, shard in content.shards.items() if member.holds(content.parts[i])]

    def stood_still(self, seconds: float) -> None:
        """Holds against nobody that the server heard nothing for so long, as it stood still itself."""
        self.rounds.carry_out(self.membership.stood_still(seconds, now=self.clock()))
        with self._lock:
            self.election.stood_still(seconds)

    def tick(self, now: float | None = None) -> None:
        """Does what time brings: forgets silent workers, ends a run whose time is over, forgets one that measured.

        It may run kernels, for rounds that others are done without: not for the event loop.
        """
        now, content = self.clock() if now is None else now, self.content
        self.rounds.tick(now)
        self.work.tick(now)
        if content.ready_at is not None:
            self._ending.after_seconds(now - content.ready_at, content.shards.values())
            if self.measures and self.membership.done(expected_workers=1):
                self.reset(content.run_id)

    def finish(self, reason: str = "stopped on request") -> None:
        """Ends the run: pushes are refused, workers told to stop; pulls go on."""
        if self.is_ready:
            self._ending.finish(self.content.shards.values(), reason)

    def drain(self) -> None:
        """Refuses everything from now on, before the server ends; waiting calls end too."""
        with self._lock:
            self._draining = True
        self.waits.wake_all()

    def reset(self, run_id: str, *, validate_only: bool = False) -> None:
        """Forgets the run that goes by that name: the server is empty afterwards."""
        with self._lock:
            content = self.content
            if not self.is_ready:
                raise NotInitialized("this server holds no run: there is nothing to reset")
            if run_id != content.run_id:
                raise RunMismatch(f"this server holds {self.holding()}, not run {run_id!r}: name the run to reset")
            if validate_only:
                return
            # Held versions of the forgotten run mean nothing in the next.
            self._clear(epoch=content.epoch + 1)
        for shard in content.shards.values():
            shard.finish()
        self.waits.wake_all()
        self.events.add("reset", "run reset", run=run_id)

    # What the run is.

    @property
    def state(self) -> RunState:
        """Where the server stands with its run."""
        if self._draining:
            return RunState.DRAINING
        if self._ending.over:
            return RunState.FINISHED
        if self.is_ready:
            return RunState.READY
        return RunState.INITIALIZING if self.election.busy else RunState.EMPTY

    @property
    def is_ready(self) -> bool:
        """Whether there is a run, initialised or restored."""
        return self.content.ready_at is not None

    @property
    def measures(self) -> bool:
        """Whether the run held is that of a `pyps bench`, of which nothing is to be kept."""
        return is_measurement(self.content.run_id)

    @property
    def mutex(self) -> Lock | None:
        """Held for all shards of a push or a pull, where the protocol wants one mutex for the model."""
        return self.content.mutex if self.is_ready and self._aggregation.whole_model else None

    def holding(self) -> Holding:
        """What the server holds, as a newcomer is told."""
        last, now = self.statistics.last_update, self.clock()
        return Holding(self.content.run_id, self.content.version_max, None if last is None else now - last)

    @property
    def done(self) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        return not self.measures and self.membership.done(expected_workers=self.membership.expected_workers)

    @property
    def workers_finished(self) -> bool:
        """True when it is done and no worker failed, or fell silent, that has not come again and finished."""
        return not self.measures and self.membership.finished(expected_workers=self.membership.expected_workers)

    def header(self) -> RunHeader:
        """What the run is, apart from its shards: the head of a checkpoint."""
        return self._header(self._require_content())

    def snapshot(self) -> Snapshot:
        """What a checkpoint is made of. The queue before the shards: an example is rather trained twice than lost."""
        work = None if self.work.spec is None else self.work.state()
        content = self._require_content()
        return Snapshot(self._header(content), dict(content.shards), content.machine, work)

    def _header(self, content: ReadyContent) -> RunHeader:
        return content.header(behaviour=self.rounds.behaviour, told=self.config.behaviour)

    # Helpers.

    @property
    def _aggregation(self) -> Aggregation:
        return self.rounds.behaviour.aggregation

    def _batch_size_in(self, epoch: int) -> int:
        """Return the minibatch that the schedule wants in that pass over the data; 0 where it has none."""
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
        self._refuse_when_draining()
        self._require_run(content, run_id)
        return content

    def _require_run(self, content: Content, run_id: str | None) -> None:
        if run_id is not None and run_id != content.run_id:
            handshake.check_run(run_id or "(none)", self.holding(), observer=False)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ServerUnavailable("this server is shutting down: try again once it is back")

    def _is_told(self, name: str) -> bool:
        """Whether somebody chose that setting for this server, be it by a protocol's name that brings it."""
        if name == "staleness" and self._is_told("protocol") and brought_policy(self.config.protocol):
            return True
        return name in self.config.given or getattr(self.config, name) != getattr(type(self.config), name)

    def _already_initialized(self, opening: Opening) -> bool:
        """Whether there is nothing to do; refuses whoever may not initialise now."""
        self._refuse_when_draining()
        self.membership.require_replica(opening.replica, opening.incarnation)
        return not self.election.open(
            opening.claim,
            now=self.clock(),
            holding=self.holding(),
            version=self.content.version_max,
            workers_alive=self.membership.num_alive,
        )

    def _factory(self, epoch: int) -> ContentFactory:
        return ContentFactory.of(self.config, self.rounds.behaviour, self.recorder, self.rounds.pending, epoch=epoch)

    def _begin_log(self, content: ReadyContent) -> None:
        if self.recorder is not None:
            self.recorder.begin(self._header(content), content.shards)

    def _set_content(self, content: ReadyContent) -> None:
        self.rounds.begin(content)
        self.content = content
        self.election.done(content.run_id, content.initializer)
        self.incoming = None
        for shard in content.shards.values():
            # A restored run may have reached its end already.
            self._look_for_the_end(self._ending, shard)

    def _look_for_the_end(self, ending: Ending, shard: Store) -> None:
        ending.after_update(shard, examples=lambda: self.content.examples, shards=self.content.shards.values())

    def _ended(self, reason: str) -> None:
        self.waits.wake_all()
        self.events.add(
            "finished", "run finished", run=self.content.run_id, version=self.content.version_max, reason=reason
        )
