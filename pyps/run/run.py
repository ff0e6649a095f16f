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
from pyps.core.member import WorkerInfo
from pyps.core.membership import Membership
from pyps.core.plan import PushPlan
from pyps.core.registry import WorkerRegistry
from pyps.core.roster import Roster
from pyps.core.rule_settings import RuleSettings
from pyps.core.staleness import StalenessPolicy
from pyps.core.store import Pushed, Store
from pyps.core.vectors.machine import VectorMachine
from pyps.run import handshake
from pyps.run.content import Content, Ending, RunRecorder
from pyps.run.handshake import Greeting, Holding, Opening, Pulse, RunState, Welcome, is_measurement
from pyps.run.initialization import ContentFactory, Initialization
from pyps.run.observers import Events, Waits
from pyps.run.rounds import RoundController, Settled
from pyps.run_header import RunHeader, Snapshot
from pyps.statistics import Statistics
from pyps.work import WorkQueue
from pyps_wire.errors import NotInitialized, RunMismatch, ServerUnavailable, UnknownWorker
from pyps_wire.partition import Model, Partition

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
        self.epoch = 0
        self._draining = False
        self._clear()

    def _clear(self) -> None:
        config = self.config
        self.statistics = Statistics()
        self._registry = WorkerRegistry(
            Membership(
                lease_seconds=config.lease_seconds,
                workers_max=config.max_workers,
                expected_workers=config.expected_workers,
            ),
            stall_seconds=config.stall_seconds,
        )
        self.rounds = RoundController(
            config,
            registry=self._registry,
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
            batch_size_of=self.batch_size_in,
            accumulate=lambda: self.aggregation.accumulate,
            epochs_ahead=self.epochs_ahead,
            tell=self.events.add,
            # A checkpoint may not know of leases that were given out before the server ended.
            first_lease=time.time_ns() // 1_000,
        )
        self.rounds.on_gone = lambda worker_id, lost: self.work.release(worker_id, now=self.clock(), lost=lost)
        self._ending = Ending(config.stop_condition, on_end=self._ended)
        if config.stop_condition is not None:
            self.rounds.on_update = partial(self._look_for_the_end, self._ending)
        self._content: Content | None = None

    # How workers come and go.

    def hello(self, greeting: Greeting) -> Welcome:
        """Takes a caller in, or refuses it with the reason; elects it where somebody has to initialise."""
        handshake.check_caller(greeting, software=SOFTWARE, now_nanoseconds=time.time_ns())
        if self._content is None and not greeting.observer:
            # Not under the lock: to cut a large model takes long. Who finds a run there after all is compared with it.
            handshake.check_initialization(greeting, config=self.config, told=self.told, protocol=self.aggregation)
        now = self.clock()
        with self._lock:
            self._refuse_when_draining()
            if self._content is not None:
                # Who came while the server was empty waited for the first parameters: it is of this run.
                waited = self._registry.is_member(greeting.worker_id, greeting.incarnation)
                handshake.check_joining(greeting, self._content, holding=self.holding(), waited=waited)
            elif greeting.observer:
                handshake.check_run_told(greeting.run_id, told=self.config.run_id)
            if greeting.observer:
                return Welcome()
            greeting = handshake.with_parts(greeting, self.model, protocol=self.aggregation)
            info = WorkerInfo(greeting.host, greeting.process_id, greeting.device, greeting.software)
            joined = self._registry.join(
                greeting.worker_id,
                greeting.incarnation,
                now=now,
                info=info,
                replica=greeting.replica,
                parts=greeting.parts,
                secret=greeting.secret,
            )
            self.rounds.carry_out(joined)
            if self._content is not None or greeting.server_index != 0:
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
        known = run_id == self.run_id or not run_id
        try:
            if known:
                now = self.clock()
                heard = self._registry.heard(
                    worker_id, incarnation, now=now, clock=clock, scalars=scalars, secret=secret
                )
                self.rounds.carry_out(heard)
        except UnknownWorker:
            known = False
        state = self.state
        return Pulse(known, state == RunState.FINISHED, state, self.epoch, self.version_max)

    def heard(self, run_id: str, worker_id: str, incarnation: int, secret: bytes = b"") -> None:
        """Takes a worker's call as a heartbeat; refuses one of another run, of an unknown worker or not its own."""
        self._require_run(self._require_content(), run_id)
        self.rounds.carry_out(self._registry.heard(worker_id, incarnation, now=self.clock(), secret=secret))

    def require_named(self, run_id: str) -> None:
        """Refuses a caller that names another run; one may name none, as while nobody knew its name."""
        if self._content is not None:
            self._require_run(self._content, run_id or None)

    def leave(
        self, run_id: str, worker_id: str, incarnation: int, secret: bytes = b"", *, failed: bool, message: str
    ) -> int:
        """Ends a worker's membership; returns how many are left alive. `rounds.complete_rounds` is to follow."""
        # Before there is a run, whoever waits for its parameters, or sends them, is of the run to come.
        if self._content is None or run_id == self.run_id:
            now = self.clock()
            left = self._registry.leave(worker_id, incarnation, now=now, failed=failed, message=message, secret=secret)
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
        told, protocol = self.told, self.aggregation
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
            heard = self._registry.heard(
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
        content = self._factory().first(initialization, received, now=self.clock())
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
        told, kept = self.behaviour, Behaviour.parse(**header.behaviour)
        before: Mapping[str, object] = dict(header.told)
        anew = {name: said for name, said in told.texts.items() if self._is_told(name) and said != before[name]}
        texts: dict[str, Any] = {**kept.texts, **anew}
        in_force = Behaviour.parse(**texts)
        in_force.aggregation.check_servers(header.num_servers)
        in_force.aggregation.check_change(kept.aggregation)
        with self._lock:
            self.epoch = header.epoch + 1
            # Gradients that wait are settled by the protocol that kept them, should another be told now.
            self.rounds.adopt(kept)
            content = self._factory().restored(restored, now=self.clock())
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
        content = self._content
        if content is None or self._draining or (run_id is not None and run_id != content.run_id):
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
            self._registry.require_alive(worker_id, incarnation)
        else:
            heard = self._registry.heard(worker_id, incarnation, now=self.clock(), clock=clock, secret=secret)
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
        self.require_declared(worker_id, (shard.shard_id for shard in shards))
        return shards or list(self.shards_of(worker_id).values())

    def stood_still(self, seconds: float) -> None:
        """Holds against nobody that the server heard nothing for so long, as it stood still itself."""
        self.rounds.carry_out(self._registry.stood_still(seconds, now=self.clock()))
        with self._lock:
            self.election.stood_still(seconds)

    def tick(self, now: float | None = None) -> None:
        """Does what time brings: forgets silent workers, ends a run whose time is over, forgets one that measured.

        It may run kernels, for rounds that others are done without: not for the event loop.
        """
        now, content = self.clock() if now is None else now, self._content
        self.rounds.tick(now)
        self.work.tick(now)
        if content is not None:
            self._ending.after_seconds(now - content.ready_at, content.shards.values())
            if self.measures and self._registry.done(expected_workers=1):
                self.reset(content.run_id)

    def finish(self, reason: str = "stopped on request") -> None:
        """Ends the run: pushes are refused, workers told to stop; pulls go on."""
        if self._content is not None:
            self._ending.finish(self._content.shards.values(), reason)

    def drain(self) -> None:
        """Refuses everything from now on, before the server ends; waiting calls end too."""
        with self._lock:
            self._draining = True
        self.waits.wake_all()

    def reset(self, run_id: str, *, validate_only: bool = False) -> None:
        """Forgets the run that goes by that name: the server is empty afterwards."""
        with self._lock:
            content = self._content
            if content is None:
                raise NotInitialized("this server holds no run: there is nothing to reset")
            if run_id != content.run_id:
                raise RunMismatch(f"this server holds {self.holding()}, not run {run_id!r}: name the run to reset")
            if validate_only:
                return
            # Held versions of the forgotten run mean nothing in the next.
            self.epoch += 1
            self._clear()
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
        if self._content is not None:
            return RunState.READY
        return RunState.INITIALIZING if self.election.busy else RunState.EMPTY

    @property
    def run_id(self) -> str:
        """The run held, or the one that the server was told to hold; empty when nobody named one yet."""
        return self._content.run_id if self._content else self.config.run_id

    @property
    def measures(self) -> bool:
        """Whether the run held is that of a `pyps bench`, of which nothing is to be kept."""
        return is_measurement(self.run_id)

    @property
    def partition(self) -> Partition | None:
        """The plan of the whole model, None before initialisation."""
        return self._content.partition if self._content else None

    @property
    def model(self) -> Model | None:
        """The whole model, None before initialisation."""
        return self._content.partition.model if self._content else None

    @property
    def server_index(self) -> int:
        """This server's place among the run's servers."""
        return self._content.server_index if self._content else 0

    @property
    def num_servers(self) -> int:
        """The servers of the run; 0 before initialisation."""
        return self._content.partition.num_servers if self._content else 0

    @property
    def optimizer(self) -> RuleSettings | None:
        """The rule in force with its settings, or what the server was told; None when nobody said yet."""
        return self._content.settings if self._content else self.told

    @property
    def shards(self) -> Mapping[int, Store]:
        """This server's shards by id; empty before initialisation."""
        return self._content.shards if self._content else {}

    @property
    def version_max(self) -> int:
        """The largest version among this server's shards: updates of the run."""
        return self._content.version_max if self._content else 0

    @property
    def examples(self) -> int:
        """Examples behind the updates made, counted on the shard with the lowest number."""
        content = self._content
        return content.first.examples if content is not None and content.shards else 0

    @property
    def incoming_bytes(self) -> int:
        """The size of the first parameters on their way in."""
        incoming = self.incoming
        return incoming.num_bytes if incoming is not None else 0

    @property
    def durable_version(self) -> int:
        """The newest version that checkpoints hold of every shard here; 0 for none."""
        return min((shard.durable_version for shard in self.shards.values()), default=0)

    @property
    def ready_at(self) -> float | None:
        """When the run was initialised or restored, in the run's clock."""
        return self._content.ready_at if self._content else None

    @property
    def membership(self) -> Membership:
        """The run's workers."""
        return self._registry.membership

    @property
    def roster(self) -> Roster:
        """Those of them that are active in the protocol's rounds."""
        return self.membership.roster

    def roster_of(self, shard_id: int) -> Roster:
        """Those that are active at a shard: the workers, or processes of replicas, with its part."""
        content = self._content
        # A call that waits may ask after a shard of a run that was reset.
        return self.roster.of_part(0 if content is None else content.parts.get(shard_id, 0))

    def shards_of(self, worker_id: str) -> Mapping[int, Store]:
        """This server's shards of the parts of the model that a worker holds; all where it did not name parts."""
        content = self._content
        member = self.membership.get(worker_id) if self.membership.parted else None
        if content is None or member is None or not member.parts:
            return self.shards
        return {i: shard for i, shard in content.shards.items() if member.holds(content.parts[i])}

    def require_declared(self, worker_id: str, shard_ids: Iterable[int]) -> None:
        """Refuses (BadRequest) a worker that means shards of a part that it did not declare in Hello."""
        content = self._content
        if content is not None and self.membership.parted:
            for shard_id in shard_ids:
                self.membership.require_part(worker_id, shard_id, content.parts[shard_id])

    # How it goes about its work.

    @property
    def behaviour(self) -> Behaviour:
        """Protocol, staleness policy, schedule and their like, as they are in force."""
        return self.rounds.behaviour

    @property
    def aggregation(self) -> Aggregation:
        """The protocol in force, a warm-up before it included."""
        return self.rounds.behaviour.aggregation

    @property
    def staleness(self) -> StalenessPolicy:
        """The staleness policy in force."""
        return self.rounds.behaviour.staleness

    @property
    def mutex(self) -> Lock | None:
        """Held for all shards of a push or a pull, where the protocol wants one mutex for the model."""
        content = self._content
        return content.mutex if content is not None and self.aggregation.whole_model else None

    @property
    def machine(self) -> VectorMachine | None:
        """What a coordinator keeps beside the shards; None before initialisation."""
        return self._content.machine if self._content else None

    @property
    def batch_size(self) -> int:
        """The minibatch that the schedule asks of workers now; 0 where it has none or the run has not begun."""
        content, growth = self._content, self.behaviour.batch_growth
        return growth.size(content.first.examples) if content and content.shards and growth else 0

    def batch_size_in(self, epoch: int) -> int:
        """The minibatch that the schedule asks for in that pass over the data; 0 where it has none."""
        growth = self.behaviour.batch_growth
        return growth.size(epoch * growth.epoch_examples) if growth else 0

    def epochs_ahead(self) -> int:
        """How many epochs of shared data free workers may begin ahead; none where steps wait for others' steps."""
        return 0 if self.aggregation.barrier or self.rounds.steps.asks else self.config.epochs_ahead

    def holding(self) -> Holding:
        """What the server holds, as a newcomer is told."""
        last, now = self.statistics.last_update, self.clock()
        return Holding(self.run_id, self.version_max, None if last is None else now - last)

    @property
    def done(self) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        return not self.measures and self._registry.done(expected_workers=self.membership.expected_workers)

    @property
    def workers_finished(self) -> bool:
        """True when it is done and no worker failed, or fell silent, that has not come again and finished."""
        return not self.measures and self._registry.finished(expected_workers=self.membership.expected_workers)

    def header(self) -> RunHeader:
        """What the run is, apart from its shards: the head of a checkpoint."""
        return self._header(self._require_content())

    def snapshot(self) -> Snapshot:
        """What a checkpoint is made of. The queue before the shards: an example is rather trained twice than lost."""
        work = None if self.work.spec is None else self.work.state()
        content = self._require_content()
        return Snapshot(self._header(content), dict(content.shards), content.machine, work)

    def _header(self, content: Content) -> RunHeader:
        return content.header(epoch=self.epoch, behaviour=self.behaviour, told=self.config.behaviour)

    # Helpers.

    def _require_content(self) -> Content:
        content = self._content
        if content is None:
            raise NotInitialized(
                f"this server holds no parameters yet (it is {self.state.name.lower()}): "
                "a worker's Hello and Initialize come first"
            )
        return content

    def _serving(self, run_id: str | None) -> Content:
        """The content, where the server serves the caller's run; None trusts the caller to mean this one."""
        content = self._content
        # The usual case first: a small push is over in no time.
        if content is None or self._draining or (run_id is not None and run_id != content.run_id):
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
            version=self.version_max,
            workers_alive=self.membership.num_alive,
        )

    def _factory(self) -> ContentFactory:
        return ContentFactory.of(self.config, self.behaviour, self.recorder, self.rounds.pending, epoch=self.epoch)

    def _begin_log(self, content: Content) -> None:
        if self.recorder is not None:
            self.recorder.begin(self._header(content), content.shards)

    def _set_content(self, content: Content) -> None:
        self.rounds.begin(content)
        self._content = content
        self.election.done(content.run_id, content.founder)
        self.incoming = None
        for shard in content.shards.values():
            # A restored run may have reached its end already.
            self._look_for_the_end(self._ending, shard)

    def _look_for_the_end(self, ending: Ending, shard: Store) -> None:
        ending.after_update(shard, examples=lambda: self.examples, shards=self.shards.values())

    def _ended(self, reason: str) -> None:
        self.waits.wake_all()
        self.events.add("finished", "run finished", run=self.run_id, version=self.version_max, reason=reason)
